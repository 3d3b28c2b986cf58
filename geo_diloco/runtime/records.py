"""What a peer says of itself in the directory, and which records of others are believed.

The DHT stores anybody's bytes, so every record is bound to its author: it lies under the author's peer id as subkey
and ends in that peer's signature over key, peer id, expiration and body. Every participant, bootstraps included, must
pass the same check, else a forgery survives where it was not made. Two rules follow from how hivemind uses the check:

- It hands a key's records over as one dictionary and drops all of them if one fails. So `refusal` depends on nothing
  but the record: no clock, no schema that another release of ours might see differently. Honest peers then always
  agree, and a bad record costs only whoever passes it on. Fields are read later, one record at a time (`read_record`).
- It deserialises a record that passed. So the body has exactly one outer form, checked byte by byte here.

A record proves who wrote it, never that what it says is true, nor that a majority exists: the DHT is not a lock.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from geo_diloco.errors import RemoteProtocolError
from geo_diloco.manifest import BootId, PeerId, RunId, Seq, Term

EXPIRES_S = 60.0
"""How long a record lives; its peer renews it every 20 s."""
FUTURE_S = 10 * EXPIRES_S
"""A record that claims to live longer than this from now on is not believed."""
BODY_BYTES_MAX = 2048
"""Size of a record's JSON."""
ROLES_MAX = 8
INTEGER_MAX = 2**53
SIGNATURE_BYTES = 128
"""An Ed25519 signature in hex."""

_SUBKEY = re.compile(rb"\xd9\x40([0-9a-f]{64})\Z")
"""MessagePack's only short form of a string of 64 bytes."""
_SIGNATURE = re.compile(rb"\.[0-9a-f]{128}\Z")
_DOMAIN = b"geo_diloco directory record 1\n"
_ROLE = re.compile(r"[a-z]{1,16}\Z")
_HEX = re.compile(r"[0-9a-f]{0,64}\Z")
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}\Z")

Verify = Callable[[PeerId, bytes, str], bool]
"""Peer, data, hex signature; False on anything malformed (`identity.verify`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRecord:
    """One peer of a run, as it describes itself. Without roles it is a tombstone: the peer has left."""

    run: RunId
    peer: PeerId
    roles: tuple[str, ...]
    """`syncer`, `standby`, `learner` or `follower`, as it claims them, and `mirror` beside."""
    address: str
    """`host:port` of its HTTP side; empty if it only dials out."""
    term: Term
    boot: BootId
    head_seq: Seq
    """Newest entry it knows."""
    wire_version: int
    lineage: int = 0
    """Of the branch it is in: one that the owner has reformed later goes before, whatever its terms."""


def directory_key(run: RunId) -> str:
    """The DHT key under which the peers of a run are found."""
    return f"{run}/peers"


CAN_SERVE = frozenset({"syncer", "standby"})
MIRROR = "mirror"
SERVES_BLOBS = frozenset({"syncer", MIRROR})


def by_claim(records: Iterable[PeerRecord]) -> list[PeerRecord]:
    """Who claims to serve, then who claims to be able to; the highest term and the longest chain first."""
    claims = [record for record in records if record.address and CAN_SERVE & set(record.roles)]
    return sorted(
        claims,
        key=lambda record: ("syncer" in record.roles, record.lineage, record.term, record.head_seq, record.peer),
        reverse=True,
    )


def tombstone_of(record: PeerRecord) -> PeerRecord:
    """The same peer, gone. The DHT can't delete: this replaces its record until both have expired."""
    return dataclasses.replace(record, roles=(), address="")


# ---- one record as bytes ---------------------------------------------------------------------------------------


def body_of(record: PeerRecord) -> bytes:
    """Canonical JSON, ASCII."""
    return json.dumps(dataclasses.asdict(record), sort_keys=True, separators=(",", ":")).encode()


def read_record(body: bytes, *, run: RunId, peer: PeerId) -> PeerRecord:
    """Parses what `peer` published under `run`; keys that a later release may add are ignored.

    Raises RemoteProtocolError that names the field.
    """
    if len(body) > BODY_BYTES_MAX:
        raise RemoteProtocolError(f"directory record of {len(body)} bytes, at most {BODY_BYTES_MAX}", peer=peer)
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError("directory record is not JSON", peer=peer) from error
    if not isinstance(fields, dict):
        raise RemoteProtocolError("directory record is not a JSON object", peer=peer)
    roles = fields.get("roles")
    well_formed = {
        "run": fields.get("run") == run,
        "peer": fields.get("peer") == peer,
        "roles": isinstance(roles, list)
        and len(roles) <= ROLES_MAX
        and all(isinstance(role, str) and _ROLE.match(role) for role in roles),
        "address": _is_address(fields.get("address")),
        "term": _is_count(fields.get("term")),
        "boot": isinstance(fields.get("boot"), str) and bool(_HEX.match(fields["boot"])),
        "head_seq": _is_count(fields.get("head_seq"), least=-1),
        "wire_version": _is_count(fields.get("wire_version")),
        "lineage": _is_count(fields.get("lineage")),
    }
    for name, fine in well_formed.items():
        if not fine:
            raise RemoteProtocolError(f"directory record with a bad {name}", peer=peer)
    known = {field.name: fields[field.name] for field in dataclasses.fields(PeerRecord)}
    return PeerRecord(**{**known, "roles": tuple(fields["roles"])})


def _is_count(value: object, *, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= INTEGER_MAX


def _is_address(value: object) -> bool:
    if not isinstance(value, str):
        return False
    host, _, port = value.rpartition(":")
    in_form = bool(_HOST.match(host)) and port.isascii() and port.isdecimal() and len(port) <= 5
    return not value or (in_form and 0 < int(port) < 65536)


# ---- one record as the DHT holds it: MessagePack bytes, a dot, the signature ------------------------------------


def signed_bytes(key: bytes, peer: PeerId, value: bytes, expiration: float) -> bytes:
    """What the signature covers. Everything before `value` has a fixed length, so the parts can't be shifted."""
    return b"".join((_DOMAIN, key, peer.encode(), struct.pack(">d", expiration), value))


def sign_value(key: bytes, subkey: bytes, value: bytes, expiration: float, *, sign: Callable[[bytes], str]) -> bytes:
    """Appends this peer's signature; `sign` is the identity's. A subkey that is no peer id is left unsigned."""
    named = _SUBKEY.match(subkey)
    if named is None:
        return value
    peer = PeerId(named[1].decode())
    return value + b"." + sign(signed_bytes(key, peer, value, expiration)).encode()


def strip_value(value: bytes) -> bytes:
    """Without the signature."""
    return value[: -SIGNATURE_BYTES - 1]


def refusal(key: bytes, subkey: bytes, value: bytes, expiration: float, *, verify: Verify) -> str:
    """Why a record is not accepted; empty if it is. Depends on nothing but its arguments, and never raises."""
    named = _SUBKEY.match(subkey)
    if named is None:
        return "subkey is not a peer id"
    if len(value) > BODY_BYTES_MAX + SIGNATURE_BYTES + 4:
        return "too large"
    if not math.isfinite(expiration):
        return "no expiration"
    if len(key) != 20 or not _SIGNATURE.search(value):
        return "not signed"
    stripped = strip_value(value)
    if not _is_msgpack_bytes(stripped):
        return "not one byte string"
    peer = PeerId(named[1].decode())
    if not verify(peer, signed_bytes(key, peer, stripped, expiration), value[-SIGNATURE_BYTES:].decode()):
        return "signature is not the peer's"
    return ""


def _is_msgpack_bytes(value: bytes) -> bool:
    """Exactly one MessagePack byte string in its shortest form."""
    if value[:1] == b"\xc4":
        return len(value) >= 2 and value[1] == len(value) - 2
    return value[:1] == b"\xc5" and len(value) >= 259 and int.from_bytes(value[1:3], "big") == len(value) - 3


# ---- addresses -------------------------------------------------------------------------------------------------


def maddr_of(host: str, port: int) -> str:
    """The multiaddr of a TCP port: `/ip4/...`, `/ip6/...` or, for a name, `/dns4/...`."""
    try:
        family = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        family = "dns4"
    return f"/{family}/{host}/tcp/{port}"


def tcp_of_maddr(maddr: str) -> tuple[str, int] | None:
    """Host and port that a multiaddr begins with, or None if it is no TCP address."""
    parts = maddr.split("/")
    if len(parts) < 5 or parts[0] or parts[1] not in ("ip4", "ip6", "dns", "dns4", "dns6") or parts[3] != "tcp":
        return None
    return (parts[2], int(parts[4])) if parts[4].isascii() and parts[4].isdecimal() else None
