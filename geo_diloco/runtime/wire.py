"""The border between bytes and the core's frozen types: how entries, snapshots and messages are written and read.

Everything that other peers rely on is signed, and the exact text that was signed is its only form: a digest or a
signature covers `Signed.body` as it came, never a re-encoding. What is signed begins with its purpose, so that an
envelope can't pass for an entry. Reading is strict: unknown keys, other types, numbers out of range, NaN, control
characters and malformed ids raise RemoteProtocolError, and sizes are checked before anything is parsed. Writing obeys
the same rules and raises LocalProtocolError, so that we never put on the chain what others must refuse.
The one home of `pydantic` besides `config.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, TypeVar, cast

from blake3 import blake3
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from geo_diloco.errors import LocalProtocolError, RemoteProtocolError
from geo_diloco.manifest import WIRE_VERSION, BootId, BranchId, Digest, PeerId, RunId, Seq
from geo_diloco.protocol.amendments import AmendmentOrder
from geo_diloco.protocol.election.ballots import ELECTORS_MAX, Head, SignedVote, Vote
from geo_diloco.protocol.messages import Amendment, Entry, Envelope, Open, Snapshot
from geo_diloco.runtime.identity import Identity, verify

T = TypeVar("T")
Purpose = Literal["entry", "snapshot", "envelope", "order", "amendment"]

MESSAGE_BYTES_MAX = 1 << 20
"""Of an envelope's body."""
ENTRY_BYTES_MAX = 4 << 20
"""Of an entry's or a snapshot's body."""
INTEGER_MAX = (1 << 53) - 1
"""No count, size or time of ours comes near it; beyond it floats and other languages lose digits."""
TEXT_CHARACTERS_MAX = 4096
"""Of one free-text field."""

ORDER_BYTES_MAX = 8192
"""Of an owner's order to a peer; it may hold an amendment or a reform as signed."""
AMENDMENT_BYTES_MAX = 2048

_LINE_OVERHEAD = 1024
MESSAGE_LINE_BYTES_MAX = 2 * MESSAGE_BYTES_MAX + _LINE_OVERHEAD
"""Of an envelope as sent: quoting at most doubles a body of ours."""
LINE_BYTES_MAX = 2 * ENTRY_BYTES_MAX + _LINE_OVERHEAD
"""Of any signed line."""

_BYTES_MAX: dict[str, int] = {
    "entry": ENTRY_BYTES_MAX,
    "snapshot": ENTRY_BYTES_MAX,
    "envelope": MESSAGE_BYTES_MAX,
    "order": ORDER_BYTES_MAX,
    "amendment": AMENDMENT_BYTES_MAX,
}


@dataclass(frozen=True, slots=True)
class Signed:
    """A signed text. Reading one with `from_line` does not verify it: `open_entry` and its like do."""

    body: str
    signer: PeerId
    signature: str
    purpose: Purpose = "entry"

    @property
    def digest(self) -> Digest:
        """BLAKE3 of the body's UTF-8 bytes: an entry's name on the chain."""
        return Digest(blake3(self.body.encode()).hexdigest())

    def to_line(self) -> str:
        """One line of JSON, without the line end."""
        return _SIGNED.dump_json(self).decode()

    @classmethod
    def from_line(cls, line: str | bytes) -> Signed:
        """Raises RemoteProtocolError on anything but one signed line."""
        if len(line) > LINE_BYTES_MAX:
            raise RemoteProtocolError(f"signed line of {len(line)} bytes, at most {LINE_BYTES_MAX} are allowed")
        signed = _parse(_SIGNED, line, what="signed line", peer="unknown")
        if not _HEX_64.fullmatch(signed.signer) or not _HEX_128.fullmatch(signed.signature):
            raise RemoteProtocolError("signed line whose signer or signature is not lower-case hex of its length")
        return signed


def seal_entry(entry: Entry, identity: Identity) -> Signed:
    return _seal(_ENTRY, entry, identity, "entry")


def open_entry(signed: Signed) -> Entry:
    """The verified, parsed entry, and of an `open` each vote. Whether its signer serves its term, and whether the votes
    are of a majority, is for the core to know."""
    entry = _open(_ENTRY, signed, "entry")
    if isinstance(entry, Open):
        if entry.syncer != signed.signer:
            raise RemoteProtocolError("`open` entry that names another syncer than its signer", peer=signed.signer)
        if len(entry.votes) > ELECTORS_MAX:
            raise RemoteProtocolError(f"`open` entry with {len(entry.votes)} votes", peer=signed.signer)
        for vote in entry.votes:
            _check_vote(entry, vote)
    elif isinstance(entry, Amendment):
        header = entry.header
        wanted = AmendmentOrder(run=header.run, branch=header.branch, number=entry.number, changes=entry.changes)
        _check_order(entry.order, entry.owner, wanted, signed.signer)
    return entry


def _check_order(order: str, owner: PeerId, wanted: AmendmentOrder, shown_by: PeerId) -> None:
    """An amendment is what its owner signed, for this run and branch."""
    said, signer = open_amendment(order)
    if signer != owner or said != wanted:
        raise RemoteProtocolError(f"amendment {wanted.number} is not what its owner signed", peer=shown_by)


def _check_vote(entry: Open, vote: SignedVote) -> None:
    """A vote is what its elector signed, in this run and branch. The syncer's own is covered by the entry."""
    if vote.elector == entry.syncer and not vote.evidence:
        return
    said = open_envelope(vote.evidence)
    shown = Vote(candidate=vote.candidate, head=vote.head, enrolment=vote.enrolment)
    header = entry.header
    if (said.sender, said.run, said.branch, said.term) != (vote.elector, header.run, header.branch, vote.term):
        raise RemoteProtocolError("`open` entry with a vote of another elector, run, branch or term", peer=entry.syncer)
    if said.message != shown:
        raise RemoteProtocolError("`open` entry with a vote that its elector did not sign", peer=entry.syncer)


def seal_snapshot(snapshot: Snapshot, identity: Identity) -> Signed:
    return _seal(_SNAPSHOT, snapshot, identity, "snapshot")


def open_snapshot(signed: Signed) -> Snapshot:
    """Verified, with the owner's orders that it shows."""
    snapshot = _open(_SNAPSHOT, signed, "snapshot")
    for each in snapshot.amended:
        wanted = AmendmentOrder(run=snapshot.run, branch=each.branch, number=each.number, changes=each.changes)
        _check_order(each.order, each.owner, wanted, signed.signer)
    return snapshot


def seal_envelope(envelope: Envelope, identity: Identity) -> str:
    if envelope.sender != identity.peer_id:
        raise LocalProtocolError(f"envelope of {envelope.sender[:8]} sealed by {identity.peer_id[:8]}")
    return _seal(_ENVELOPE, envelope, identity, "envelope").to_line()


def open_envelope(text: str | bytes | Signed) -> Envelope:
    """Verified: its sender is its signer. Run, receiver, nonce and number are checked by the connection."""
    signed = text if isinstance(text, Signed) else Signed.from_line(text)
    envelope = _open(_ENVELOPE, signed, "envelope")
    if envelope.sender != signed.signer:
        raise RemoteProtocolError("envelope signed by another peer than its sender", peer=signed.signer)
    return envelope


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What an owner wants of a running process: of his own peer, whose key he has, or of whoever serves his run."""

    run: RunId
    nonce: str
    """Of this one occasion, chosen by the peer: an order can't be given twice."""
    wish: Literal["hand_over", "amend", "reform"]
    to: PeerId | None = None
    """To whom to hand over; to whoever is best placed if none is named."""
    signed: str = ""
    """To be appended: an amendment (`seal_amendment`); or to be taken in: a `reform` entry."""


def seal_order(order: Order, identity: Identity) -> str:
    return _seal(_ORDER, order, identity, "order").to_line()


def open_order(text: str | bytes) -> tuple[Order, PeerId]:
    """Verified, and who signed it."""
    signed = Signed.from_line(text)
    return _open(_ORDER, signed, "order"), signed.signer


def seal_amendment(order: AmendmentOrder, identity: Identity) -> str:
    return _seal(_AMENDMENT, order, identity, "amendment").to_line()


def open_amendment(text: str) -> tuple[AmendmentOrder, PeerId]:
    """Verified, and who signed it."""
    signed = Signed.from_line(text)
    return _open(_AMENDMENT, signed, "amendment"), signed.signer


_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


def url_from_address(address: str, *, peer: str = "unknown") -> str:
    """`http://host:port` from a peer's published `host:port` (IPv6 in brackets). Raises RemoteProtocolError."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match.group(1)) < 65536:
        raise RemoteProtocolError(f"address {address[:80]!r} is not host:port", peer=peer)
    return f"http://{address}"


# ---- lines that go to many ----------------------------------------------------------------------------------------

_PACKED_FROM = 4096
"""Characters. What is shorter goes as it is."""


def pack_line(line: str) -> str | bytes:
    """A signed line as it is sent on a control connection: a long one is packed. Hex digits and quotes are most of a
    commit with a thousand participants, so a fifth of it is left, and it is packed once for all who get it."""
    return line if len(line) < _PACKED_FROM else zlib.compress(line.encode(), 1)


def unpack_line(packed: bytes, *, bytes_max: int) -> str:
    """Raises RemoteProtocolError if it is not a packed line, or would be longer than `bytes_max`."""
    reading = zlib.decompressobj()
    try:
        line = reading.decompress(packed, bytes_max)
        if not reading.eof or reading.unused_data:
            raise RemoteProtocolError(f"packed line that is cut, or of more than {bytes_max} bytes")
        return line.decode()
    except (zlib.error, UnicodeDecodeError) as exc:
        raise RemoteProtocolError("packed line that can't be unpacked") from exc


# ---- sealing and opening ---------------------------------------------------------------------------------------

_SIGNED: TypeAdapter[Signed] = TypeAdapter(Signed)
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])
_SNAPSHOT: TypeAdapter[Snapshot] = TypeAdapter(Snapshot)
_ENVELOPE: TypeAdapter[Envelope] = TypeAdapter(Envelope)
_ORDER: TypeAdapter[Order] = TypeAdapter(Order)
_AMENDMENT: TypeAdapter[AmendmentOrder] = TypeAdapter(AmendmentOrder)


def _signed_bytes(purpose: Purpose, body: bytes) -> bytes:
    return f"geo-diloco {purpose} {WIRE_VERSION}\n".encode() + body


def _seal(adapter: TypeAdapter[T], value: T, identity: Identity, purpose: Purpose) -> Signed:
    try:
        _check(value)
        body = adapter.dump_json(value, warnings="error")
    except (_BadValue, PydanticSerializationError, UnicodeError) as exc:
        raise LocalProtocolError(f"{purpose} that others would refuse: {exc}") from exc
    if len(body) > _BYTES_MAX[purpose]:
        raise LocalProtocolError(f"{purpose} of {len(body)} bytes, at most {_BYTES_MAX[purpose]} may be sent")
    return Signed(body.decode(), identity.peer_id, identity.sign(_signed_bytes(purpose, body)), purpose)


def _open(adapter: TypeAdapter[T], signed: Signed, purpose: Purpose) -> T:
    if signed.purpose != purpose:
        raise RemoteProtocolError(f"{signed.purpose} where {purpose} was wanted", peer=signed.signer)
    if len(signed.body) > _BYTES_MAX[purpose]:
        raise RemoteProtocolError(f"{purpose} above {_BYTES_MAX[purpose]} bytes", peer=signed.signer)
    body = signed.body.encode("utf-8", "replace")
    if len(body) > _BYTES_MAX[purpose]:
        raise RemoteProtocolError(f"{purpose} above {_BYTES_MAX[purpose]} bytes", peer=signed.signer)
    if not verify(signed.signer, _signed_bytes(purpose, body), signed.signature):
        raise RemoteProtocolError(f"{purpose} whose signature is not its signer's", peer=signed.signer)
    value = _parse(adapter, signed.body, what=purpose, peer=signed.signer)
    try:
        _check(value)
    except _BadValue as exc:
        raise RemoteProtocolError(f"{purpose}: {exc}", peer=signed.signer) from exc
    return value


def _parse(adapter: TypeAdapter[T], text: str | bytes, *, what: str, peer: str) -> T:
    try:
        return adapter.validate_json(text, strict=True, extra="forbid")
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part)[:40] for part in first["loc"][:6])
        raise RemoteProtocolError(f"{what} refused at {place or 'its start'}: {first['msg'][:200]}", peer=peer) from exc
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"{what} is not valid JSON text", peer=peer) from exc


# ---- what types alone don't say: ranges, alphabets, lengths ------------------------------------------------------


class _BadValue(ValueError):
    pass


_HEX_128 = re.compile(r"[0-9a-f]{128}")
_HEX_64 = re.compile(r"[0-9a-f]{64}")
_HEX_40 = re.compile(r"[0-9a-f]{40}")
_HEX_16 = re.compile(r"[0-9a-f]{16}")
_HEX_64_OR_EMPTY = re.compile(r"(?:[0-9a-f]{64})?")
_ALPHABETS: dict[object, re.Pattern[str]] = {
    PeerId: _HEX_64,
    Digest: _HEX_64,
    BranchId: _HEX_64_OR_EMPTY,
    RunId: _HEX_40,
    BootId: _HEX_16,
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _check(value: object) -> None:
    """Walks a dataclass or named tuple of the core; raises _BadValue naming the field."""
    for name, check in _checks_of(cast(Hashable, type(value))):
        try:
            check(getattr(value, name))
        except _BadValue as exc:
            raise _BadValue(f"{name}: {exc}") from exc


@functools.cache
def _checks_of(kind: Hashable) -> tuple[tuple[str, Callable[[Any], None]], ...]:
    assert isinstance(kind, type)
    hints = typing.get_type_hints(kind)
    if kind is Head:  # of a chain without an entry
        hints["digest"] = Digest | Literal[""]
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else hints
    return tuple((name, _check_for(hints[name])) for name in names)


def _check_for(hint: Any) -> Callable[[Any], None]:
    if hint in _ALPHABETS:
        return functools.partial(_check_alphabet, _ALPHABETS[hint])
    if hint is Seq:  # -1: of a chain without an entry
        return functools.partial(_check_integer, least=-1)
    if isinstance(hint, NewType):
        return _check_for(hint.__supertype__)
    if dataclasses.is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, tuple)):
        return _check
    origin = typing.get_origin(hint)
    if origin is tuple:
        return functools.partial(_check_all, _check_for(typing.get_args(hint)[0]))
    if origin in (typing.Union, types.UnionType):
        return _check_for_union(typing.get_args(hint))
    return cast(Callable[[Any], None], {int: _check_integer, float: _check_float, str: _check_text}.get(hint, _accept))


def _check_for_union(members: tuple[Any, ...]) -> Callable[[Any], None]:
    """`X | None`, `Digest | Literal[""]`, or a union of dataclasses."""
    if all(dataclasses.is_dataclass(member) for member in members):
        return _check
    spared = {None} if type(None) in members else set()
    for member in members:
        if typing.get_origin(member) is Literal:
            spared.update(typing.get_args(member))
    (rest,) = (m for m in members if m is not type(None) and typing.get_origin(m) is not Literal)
    check = _check_for(rest)
    return lambda value: None if value in spared else check(value)


def _check_all(check: Callable[[Any], None], values: tuple[Any, ...]) -> None:
    for value in values:
        check(value)


def _check_alphabet(alphabet: re.Pattern[str], value: str) -> None:
    if not alphabet.fullmatch(value):
        raise _BadValue(f"{value[:80]!r} is not {alphabet.pattern}")


def _check_integer(value: int, *, least: int = 0) -> None:
    if not least <= value <= INTEGER_MAX:
        raise _BadValue(f"integer outside {least} to {INTEGER_MAX}")


def _check_float(value: float) -> None:
    if not math.isfinite(value):
        raise _BadValue(f"{value} is not a finite number")


def _check_text(value: str) -> None:
    if len(value) > TEXT_CHARACTERS_MAX:
        raise _BadValue(f"text of {len(value)} characters, at most {TEXT_CHARACTERS_MAX} are allowed")
    if _CONTROL.search(value):
        raise _BadValue("text with control characters")


def _accept(value: object) -> None:
    pass
