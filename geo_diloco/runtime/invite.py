"""The one string that lets a person join a run.

`gd1-` and base64url: it survives chat programs, shells and double clicks. It carries the run's id, under which the
manifest is checked, the bootstraps and, if the run asks for one, the admission token; an invite with a token is a
secret. A short checksum tells a mistyped or cut one from a wrong one: it guards against accidents, not against
forgery, for which there is nothing to gain here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from geo_diloco.errors import InviteError
from geo_diloco.manifest import RunId

PREFIX = "gd1-"
CHECK_BYTES = 4
LENGTH_MAX = 8192
"""Characters."""
BOOTSTRAPS_MAX = 16
TEXT_MAX = 256
"""Characters of a bootstrap's address, the token or the name."""

_RUN = re.compile(r"[0-9a-f]{40}")
_MADDR = re.compile(r"(/[A-Za-z0-9.:%_-]+)+/p2p/[A-Za-z0-9]+")
_PRINTABLE = re.compile(r"[ -~]*")


@dataclass(frozen=True, kw_only=True)
class Invite:
    """What a joining peer has to know. Checked when made, so a bad one is never handed out."""

    run: RunId
    bootstraps: tuple[str, ...]
    """Multiaddrs ending in /p2p/..., of which one has to answer."""
    token: str = field(default="", repr=False)
    """Admission token, empty if the run is open to all."""
    name: str = ""
    """The run's name, for people."""

    def __post_init__(self) -> None:
        """Raises InviteError that names what can't be used."""
        if not _RUN.fullmatch(self.run):
            raise InviteError(f"invite: run id {self.run[:60]!r} is not 40 hex characters")
        if not 0 < len(self.bootstraps) <= BOOTSTRAPS_MAX:
            raise InviteError(f"invite: {len(self.bootstraps)} bootstraps, wanted 1 to {BOOTSTRAPS_MAX}")
        for maddr in self.bootstraps:
            if len(maddr) > TEXT_MAX or not _MADDR.fullmatch(maddr):
                raise InviteError(
                    f"invite: bootstrap {maddr[:80]!r} is not of the form /ip4/HOST/tcp/PORT/p2p/IDENTITY"
                )
        if len(self.token) > TEXT_MAX or not _PRINTABLE.fullmatch(self.token):
            raise InviteError(f"invite: a token has up to {TEXT_MAX} plain characters")
        if len(self.name) > TEXT_MAX or not self.name.isprintable():
            raise InviteError(f"invite: a name has up to {TEXT_MAX} printable characters")

    def to_string(self) -> str:
        """The form that `parse` reads."""
        fields: dict[str, object] = {"run": self.run, "bootstraps": list(self.bootstraps)}
        if self.token:
            fields["token"] = self.token
        if self.name:
            fields["name"] = self.name
        body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        return PREFIX + base64.urlsafe_b64encode(_check(body) + body).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Reads an invite as pasted: space around it and line breaks inside it are ignored. Raises InviteError."""
        compact = "".join(text.split())
        if len(compact) > LENGTH_MAX:
            raise InviteError(f"invite: {len(compact)} characters, at most {LENGTH_MAX}; paste the invite alone")
        fields = _fields(_body(compact))
        run, bootstraps = fields.pop("run", None), fields.pop("bootstraps", None)
        token, name = fields.pop("token", ""), fields.pop("name", "")
        if fields:
            raise InviteError(f"invite: unknown field {min(fields)[:40]!r}; this release is older than the invite")
        if not isinstance(run, str) or not isinstance(token, str) or not isinstance(name, str):
            raise InviteError("invite: run, token and name must be text; ask for a new one")
        if not isinstance(bootstraps, list) or not all(isinstance(maddr, str) for maddr in bootstraps):
            raise InviteError("invite: bootstraps must be a list of addresses; ask for a new one")
        return cls(run=RunId(run), bootstraps=tuple(bootstraps), token=token, name=name)


def place_of(where: str) -> Path | Invite:
    """A folder on this machine, or an invite. Raises InviteError for what is neither."""
    if os.path.isdir(where):  # an invite is longer than a path may be
        return Path(where)
    try:
        return Invite.parse(where)
    except InviteError as exc:
        if where.strip().startswith("gd") and "/" not in where:
            raise
        raise InviteError(f"{where[:60]!r} is neither a folder on this machine nor an invite, gd1-...") from exc


def _body(compact: str) -> bytes:
    if re.match(r"gd[0-9]+-", compact) and not compact.startswith(PREFIX):
        raise InviteError(
            f"invite: version {compact.split('-')[0]!r}, this release reads {PREFIX[:-1]!r}; update one side"
        )
    if not compact.startswith(PREFIX):
        raise InviteError(f"invite: {compact[:12]!r} does not begin with {PREFIX!r}; paste the whole invite")
    coded = compact[len(PREFIX) :].rstrip("=")
    try:
        if not re.fullmatch(r"[A-Za-z0-9_-]*", coded):
            raise InviteError("invite: has characters that no invite has; paste the invite alone")
        raw = base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4))
    except binascii.Error as error:
        raise InviteError("invite: cut short or changed; paste the whole invite") from error
    body = raw[CHECK_BYTES:]
    if not body or _check(body) != raw[:CHECK_BYTES]:
        raise InviteError("invite: cut short or changed (its checksum differs); paste the whole invite")
    return body


def _fields(body: bytes) -> dict[str, object]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InviteError("invite: unreadable content; ask for a new one") from error
    if not isinstance(fields, dict):
        raise InviteError("invite: unreadable content; ask for a new one")
    return fields


def _check(body: bytes) -> bytes:
    return hashlib.sha256(b"geo_diloco invite 1\n" + body).digest()[:CHECK_BYTES]
