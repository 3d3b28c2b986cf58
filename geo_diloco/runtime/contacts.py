"""Contacts: where peers of a run could be reached lately, for the day on which no bootstrap answers.

Nothing here is believed. A contact is a place to ask, and what it answers is checked as anybody's answer is: the
manifest by its digest, who serves by a proof. So all that a lie costs is the time to find it out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from geo_diloco.errors import RemoteProtocolError
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.records import tcp_of_maddr
from geo_diloco.runtime.wire import url_from_address

ADDRESSES_MAX = 16
MADDRS_MAX = 16
CONTACTS_BYTES_MAX = 16 << 10
"""Of a file, or of an answer."""
TEXT_MAX = 256
"""Characters of one address."""

_MADDR = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[A-Za-z0-9.:_-]+/tcp/\d{1,5}/p2p/[1-9A-HJ-NP-Za-km-z]{40,70}")


@dataclass(frozen=True, slots=True)
class Contacts:
    """Newest first, without doubles, bounded; what can't be an address is left out."""

    addresses: tuple[str, ...] = ()
    """`host:port` of HTTP sides."""
    maddrs: tuple[str, ...] = ()
    """Multiaddrs of DHT sides, ending in /p2p/..."""

    def __post_init__(self) -> None:
        addresses = [each for each in dict.fromkeys(self.addresses) if _is_address(each)]
        maddrs = [each for each in dict.fromkeys(self.maddrs) if _is_maddr(each)]
        object.__setattr__(self, "addresses", tuple(addresses[:ADDRESSES_MAX]))
        object.__setattr__(self, "maddrs", tuple(maddrs[:MADDRS_MAX]))

    def __bool__(self) -> bool:
        return bool(self.addresses or self.maddrs)

    def before(self, older: Contacts) -> Contacts:
        """These, and of the older ones what there is room for."""
        return Contacts((*self.addresses, *older.addresses), (*self.maddrs, *older.maddrs))

    def to_json(self) -> bytes:
        """The form that `contacts_from_json` reads."""
        return json.dumps({"addresses": self.addresses, "maddrs": self.maddrs}).encode()


def contacts_from_json(body: bytes) -> Contacts:
    """Keys that a later release may add are ignored. Raises RemoteProtocolError if it is something else."""
    try:
        fields = json.loads(body) if len(body) <= CONTACTS_BYTES_MAX else None
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError("contacts that are no JSON") from exc
    if not isinstance(fields, dict):
        raise RemoteProtocolError("contacts that are no JSON object, or too large")
    return Contacts(_texts(fields.get("addresses")), _texts(fields.get("maddrs")))


def read_contacts(path: Path) -> Contacts:
    """None if there is no such file. Raises RemoteProtocolError if it is damaged, OSError if it can't be read."""
    try:
        with path.open("rb") as file:
            return contacts_from_json(file.read(CONTACTS_BYTES_MAX + 1))
    except FileNotFoundError:
        return Contacts()


def write_contacts(path: Path, contacts: Contacts) -> None:
    """The file is whole or as before. Raises OSError."""
    atomic_write(path, contacts.to_json())


def _texts(value: object) -> tuple[str, ...]:
    items: Iterable[object] = value if isinstance(value, list) else ()
    return tuple(item for item in items if isinstance(item, str))


def _is_address(text: str) -> bool:
    try:
        url_from_address(text)
    except RemoteProtocolError:
        return False
    return len(text) <= TEXT_MAX


def _is_maddr(text: str) -> bool:
    place = tcp_of_maddr(text) if len(text) <= TEXT_MAX and _MADDR.fullmatch(text) else None
    return place is not None and 0 < place[1] < 65536
