"""Who may say what in the directory, and what is believed of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.errors import RemoteProtocolError
from geo_diloco.manifest import BootId, PeerId, RunId, Seq, Term
from geo_diloco.runtime import records
from geo_diloco.runtime.directory import Found, believed
from geo_diloco.runtime.records import PeerRecord

RUN = RunId("ab" * 20)
KEY = hashlib.sha1(RUN.encode()).digest()
ANNA, BERT = PeerId("a" * 64), PeerId("b" * 64)
RECORD = PeerRecord(
    run=RUN,
    peer=ANNA,
    roles=("syncer",),
    address="192.0.2.7:31340",
    term=Term(3),
    boot=BootId("0f" * 8),
    head_seq=Seq(17),
    wire_version=1,
)
EXPIRATION = 1_700_000_060.25


def signature(peer: str, data: bytes) -> str:
    """Stands in for Ed25519: only whoever knows the peer's name can make it."""
    return hashlib.sha512(peer.encode() + data).hexdigest()


def verify(peer: PeerId, data: bytes, signed: str) -> bool:
    return signed == signature(peer, data)


def packed(body: bytes) -> bytes:
    """MessagePack's byte string, as hivemind makes it."""
    return (b"\xc4" + bytes([len(body)]) if len(body) < 256 else b"\xc5" + len(body).to_bytes(2, "big")) + body


def subkey(peer: str) -> bytes:
    return b"\xd9\x40" + peer.encode()


def signed_value(
    body: bytes = records.body_of(RECORD), peer: str = ANNA, by: str = ANNA, key: bytes = KEY, until: float = EXPIRATION
) -> bytes:
    return records.sign_value(key, subkey(peer), packed(body), until, sign=lambda data: signature(by, data))


def refusal(key: bytes, sub: bytes, value: bytes, expiration: float) -> str:
    return records.refusal(key, sub, value, expiration, verify=verify)


def test_a_peers_own_record_is_accepted_and_reads_back() -> None:
    value = signed_value()
    assert refusal(KEY, subkey(ANNA), value, EXPIRATION) == ""
    body = records.strip_value(value)[3 if value[0] == 0xC5 else 2 :]
    assert records.read_record(body, run=RUN, peer=ANNA) == RECORD


def test_nobody_writes_for_another_peer() -> None:
    assert refusal(KEY, subkey(ANNA), signed_value(by=BERT), EXPIRATION) == "signature is not the peer's"


def test_a_record_is_worth_nothing_under_another_run_peer_or_expiration() -> None:
    value = signed_value()
    for moved in ((bytes(20), subkey(ANNA), EXPIRATION), (KEY, subkey(BERT), EXPIRATION), (KEY, subkey(ANNA), 2e9)):
        assert refusal(moved[0], moved[1], value, moved[2]) == "signature is not the peer's"


@given(st.integers(0, 400), st.integers(1, 255))
def test_a_changed_byte_is_noticed(at: int, change: int) -> None:
    value = bytearray(signed_value())
    value[at % len(value)] ^= change
    assert refusal(KEY, subkey(ANNA), bytes(value), EXPIRATION)


@pytest.mark.parametrize(
    ("sub", "value", "expiration", "reason"),
    [
        (b"\xc0", signed_value(), EXPIRATION, "subkey is not a peer id"),
        (b"", signed_value(), EXPIRATION, "subkey is not a peer id"),
        (subkey(ANNA.upper()), signed_value(peer=ANNA.upper()), EXPIRATION, "subkey is not a peer id"),
        (subkey(ANNA) + b"\n", signed_value(), EXPIRATION, "subkey is not a peer id"),
        (b"\xda\x00\x40" + ANNA.encode(), signed_value(), EXPIRATION, "subkey is not a peer id"),
        (subkey(ANNA), packed(records.body_of(RECORD)), EXPIRATION, "not signed"),
        (subkey(ANNA), b"", EXPIRATION, "not signed"),
        (subkey(ANNA), signed_value(b"x" * 4000), EXPIRATION, "too large"),
        (subkey(ANNA), signed_value(until=math.nan), math.nan, "no expiration"),
        (subkey(ANNA), signed_value(until=math.inf), math.inf, "no expiration"),
    ],
)
def test_a_malformed_record_is_refused_with_a_reason(sub: bytes, value: bytes, expiration: float, reason: str) -> None:
    assert refusal(KEY, sub, value, expiration) == reason


@pytest.mark.parametrize(
    "value", [b"", b"\xc4", b"\xc4\x05abcd", b"\xc4\x03abcd", b"\xc1", b"\xa3abc", b"\xc5\x00\x03abc", b"\x81\xa1a\x01"]
)
def test_even_its_author_stores_nothing_that_would_break_a_reader(value: bytes) -> None:
    signed = records.sign_value(KEY, subkey(ANNA), value, EXPIRATION, sign=lambda data: signature(ANNA, data))
    assert refusal(KEY, subkey(ANNA), signed, EXPIRATION) == "not one byte string"


@given(st.binary(max_size=40), st.binary(max_size=80), st.binary(max_size=300), st.floats())
def test_the_check_never_raises(key: bytes, sub: bytes, value: bytes, expiration: float) -> None:
    assert refusal(key, sub, value, expiration)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("run", "cd" * 20),
        ("peer", BERT),
        ("roles", "syncer"),
        ("roles", ["syncer"] * 9),
        ("roles", ["Syncer\n"]),
        ("roles", [7]),
        ("address", "no port"),
        ("address", "host:0"),
        ("address", "host:65536"),
        ("address", "host:²"),
        ("address", "a b:80"),
        ("address", "http://host:80"),
        ("address", None),
        ("term", -1),
        ("term", True),
        ("term", 2**53 + 1),
        ("term", 1.0),
        ("boot", "xyz"),
        ("head_seq", -2),
        ("head_seq", None),
        ("wire_version", "1"),
    ],
)
def test_a_record_with_a_bad_field_is_refused_by_name(field: str, wrong: object) -> None:
    fields = {**dataclasses.asdict(RECORD), field: wrong}
    with pytest.raises(RemoteProtocolError, match=f"bad {field}"):
        records.read_record(json.dumps(fields).encode(), run=RUN, peer=ANNA)


@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 2000, b"[]", b"7", b" " * 3000])
def test_a_body_that_is_no_record_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        records.read_record(body, run=RUN, peer=ANNA)


def test_a_later_releases_extra_field_is_ignored() -> None:
    body = json.dumps({**dataclasses.asdict(RECORD), "later": 1}).encode()
    assert records.read_record(body, run=RUN, peer=ANNA) == RECORD


def found(record: PeerRecord, expiration: float) -> Found:
    return Found(subkey=record.peer, body=records.body_of(record), expiration=expiration)


def test_newest_records_come_first_and_what_is_over_or_gone_is_left_out() -> None:
    others = [dataclasses.replace(RECORD, peer=PeerId(letter * 64)) for letter in "bcdef"]
    listed = believed(
        [
            found(others[0], 1030.0),
            found(others[1], 1050.0),
            found(RECORD, 1050.0),
            found(others[2], 999.0),
            found(records.tombstone_of(others[3]), 1055.0),
            found(others[4], 1000.0 + records.FUTURE_S + 1),
            Found(subkey="9" * 64, body=b"junk", expiration=1050.0),
        ],
        run=RUN,
        now=1000.0,
    )
    assert listed == [RECORD, others[1], others[0]]


def test_the_syncer_is_who_claims_the_highest_term() -> None:
    older = dataclasses.replace(RECORD, peer=BERT, term=Term(2), head_seq=Seq(99))
    learner = dataclasses.replace(RECORD, peer=PeerId("c" * 64), term=Term(9), roles=("learner",))
    unreachable = dataclasses.replace(RECORD, peer=PeerId("d" * 64), term=Term(9), address="")
    standby = dataclasses.replace(RECORD, peer=PeerId("f" * 64), term=Term(8), roles=("standby",))
    assert records.by_claim([older, standby, learner, RECORD, unreachable]) == [RECORD, older, standby]
    assert records.by_claim([learner]) == []


@pytest.mark.parametrize(
    ("host", "maddr"),
    [
        ("0.0.0.0", "/ip4/0.0.0.0/tcp/31330"),
        ("::1", "/ip6/::1/tcp/31330"),
        ("boot.example.org", "/dns4/boot.example.org/tcp/31330"),
    ],
)
def test_a_host_and_port_become_a_multiaddr_and_back(host: str, maddr: str) -> None:
    assert records.maddr_of(host, 31330) == maddr
    assert records.tcp_of_maddr(f"{maddr}/p2p/QmX") == (host, 31330)


@pytest.mark.parametrize("maddr", ["", "/ip4/1.2.3.4", "/ip4/1.2.3.4/udp/5/quic", "/unix/tmp/x/y/z", "ip4/a/tcp/1/x"])
def test_other_multiaddrs_have_no_tcp_port(maddr: str) -> None:
    assert records.tcp_of_maddr(maddr) is None
