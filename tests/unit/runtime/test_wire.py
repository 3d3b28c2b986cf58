from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.errors import LocalProtocolError, RemoteProtocolError
from geo_diloco.manifest import (
    WIRE_VERSION,
    BranchId,
    CodecSpec,
    Digest,
    FragmentId,
    MonoMs,
    PeerId,
    RunId,
    Seq,
    Term,
    Version,
)
from geo_diloco.protocol.amendments import UNSTRETCHED, Amended, AmendmentOrder, Changes
from geo_diloco.protocol.election.ballots import (
    NO_HEAD,
    NO_RANK,
    Ack,
    Append,
    Ask,
    Elector,
    Head,
    Need,
    Offer,
    PeerBoot,
    Rank,
    Refuse,
    Release,
    Serving,
    Vote,
)
from geo_diloco.protocol.messages import (
    Allotment,
    Amendment,
    BlobRef,
    Contribution,
    ContributionId,
    Decision,
    Durable,
    Finished,
    Found,
    Goodbye,
    LeftOut,
    Message,
    Progress,
    Reform,
    RoundOpen,
    Sampled,
    Welcome,
)
from geo_diloco.runtime import wire
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.wire import Signed

from .samples import BOOT, BRANCH, D1, D2, RUN, commit, envelope, header, hello, opening, record, snapshot

ME, OTHER, OWNER = Identity.generate(), Identity.generate(), Identity.generate()
CHANGES = Changes(quorum=2, grace=False, minutes=2.5, codec_up=CodecSpec(name="int8"))
CONTRIBUTION_ID = ContributionId(ME.peer_id, FragmentId(1), D1, 48)
HEAD = Head(Rank(0, Term(2), Seq(7)), D1)
BALLOTS: list[Message] = [
    Offer(held=HEAD.rank, can_serve=HEAD, enrolment="ab", host="h", address="127.0.0.1:1", free=True),
    Offer(held=NO_RANK, can_serve=NO_HEAD, enrolment="ab", host="h", address="", free=False),
    Need(points=(HEAD, NO_HEAD)),
    Ask(head=HEAD),
    Vote(candidate=PeerBoot(OTHER.peer_id, BOOT), head=D1, enrolment="ab"),
    Append(head=HEAD, durable_seq=Seq(-1), sent_at=MonoMs(0)),
    Ack(acked=NO_HEAD, sent_at=MonoMs(5), enrolment="ab", host="h", address=""),
    Release(to=OTHER.peer_id),
    Serving(term=Term(2), syncer=OTHER.peer_id),
]
MESSAGES: list[Message] = [
    *BALLOTS,
    Durable(seq=Seq(3), digest=D1),
    replace(hello(), undecided=(CONTRIBUTION_ID,)),
    Welcome(
        head_seq=Seq(3),
        head_digest=D1,
        merged_until=(0, 24),
        resume_step=24,
        allotment=Allotment(share=1, num_shares=8, cursor=0, pass_number=0),
    ),
    Welcome(head_seq=Seq(3), head_digest=D1, merged_until=(), resume_step=0, allotment=None),
    Refuse(reason="term", detail="behind", term=Term(2)),
    Progress(step=1, tokens=2, step_time_us=3, upload_bytes_per_s=4, loss=None, cursor=5),
    Progress(step=1, tokens=2, step_time_us=3, upload_bytes_per_s=4, loss=5.5, cursor=5),
    RoundOpen(round=1, fragment=FragmentId(0), attempt=0, version=Version(1), base=D1, collect_at=""),
    Sampled(round=1, fragment=FragmentId(0), attempt=0),
    Contribution(
        id=CONTRIBUTION_ID,
        round=1,
        attempt=0,
        base_version=Version(1),
        first_step=24,
        steps=24,
        tokens=1000,
        tokens_unmerged=1000,
        cursor=9,
        blob=BlobRef(D2, 5),
    ),
    Decision(id=CONTRIBUTION_ID, verdict="kept_late", reason="late"),
    Goodbye(reason="SIGTERM"),
]


def sealed_text(body: str, *, purpose: str = "entry", signer: Identity = ME) -> Signed:
    """Signed properly, whatever the body says: what a liar with a key can do."""
    data = f"geo-diloco {purpose} {WIRE_VERSION}\n".encode() + body.encode("utf-8", "surrogatepass")
    return Signed(body, signer.peer_id, signer.sign(data), purpose)  # type: ignore[arg-type]


def body_with(change: Callable[[dict[str, Any]], None]) -> str:
    body = json.loads(wire.seal_entry(commit(ME.peer_id), ME).body)
    change(body)
    return json.dumps(body)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_every_message_arrives_as_it_was_sent(message: Message) -> None:
    sent = envelope(ME.peer_id, OTHER.peer_id, message)
    assert wire.open_envelope(wire.seal_envelope(sent, ME)) == sent


def test_every_entry_arrives_as_it_was_sealed() -> None:
    found = Found(
        header=replace(header(0), branch="", prev=""),  # type: ignore[arg-type]
        boot=BOOT,
        state_digests=(D1,),
        momentum_digests=(D2,),
        layout_digest=D1,
        num_elements=(10,),
        roster=(Elector(ME.peer_id, "ab", "machine"),),
    )
    finished = Finished(header=header(), reason="tokens", tokens_total=5)
    for entry in (found, opening(ME.peer_id), commit(ME.peer_id), record(1, D1), amendment(), reform(), finished):
        signed = wire.seal_entry(entry, ME)
        again = Signed.from_line(signed.to_line())
        assert wire.open_entry(again) == entry
        assert (again, again.digest) == (signed, signed.digest)
        assert "\n" not in signed.to_line()


def test_a_snapshot_arrives_as_it_was_sealed() -> None:
    signed = wire.seal_snapshot(snapshot(), ME)
    assert wire.open_snapshot(Signed.from_line(signed.to_line().encode())) == snapshot()


def test_the_digest_is_of_the_exact_body_without_the_signature() -> None:
    one, other = wire.seal_entry(record(1, D1), ME), wire.seal_entry(record(1, D1), OTHER)
    assert one.signature != other.signature
    assert one.digest == other.digest
    assert sealed_text(one.body + " ").digest != one.digest


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_every_bit(value: float) -> None:
    entry = commit(ME.peer_id, eta=value, rho=-value)
    again = wire.open_entry(wire.seal_entry(entry, ME))
    assert repr(again) == repr(entry)


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=200))
def test_any_printable_text_survives(text: str) -> None:
    sent = envelope(ME.peer_id, OTHER.peer_id, Goodbye(reason=text))
    assert wire.open_envelope(wire.seal_envelope(sent, ME)) == sent


# ---- forgery


def test_a_changed_body_a_foreign_signer_or_signature_is_refused() -> None:
    signed = wire.seal_entry(record(1, D1), ME)
    for forged in (
        replace(signed, body=signed.body.replace("2.5", "1.5")),
        replace(signed, body=signed.body + " "),
        replace(signed, signer=OTHER.peer_id),
        replace(signed, signature=OTHER.sign(signed.body.encode())),
        replace(signed, signature=ME.sign(signed.body.encode())),
    ):
        with pytest.raises(RemoteProtocolError, match="signature"):
            wire.open_entry(forged)


def test_a_signature_for_one_purpose_is_worth_nothing_for_another() -> None:
    entry = wire.seal_entry(record(1, D1), ME)
    with pytest.raises(RemoteProtocolError, match="entry where envelope was wanted"):
        wire.open_envelope(entry)
    with pytest.raises(RemoteProtocolError, match="signature"):
        wire.open_snapshot(replace(entry, purpose="snapshot"))
    shot = wire.seal_snapshot(snapshot(), ME)
    with pytest.raises(RemoteProtocolError, match="signature"):
        wire.open_entry(replace(shot, purpose="entry"))


def test_an_envelope_is_signed_by_its_sender() -> None:
    sent = envelope(ME.peer_id, OTHER.peer_id, Goodbye(reason=""))
    stolen = sealed_text(Signed.from_line(wire.seal_envelope(sent, ME)).body, purpose="envelope", signer=OTHER)
    with pytest.raises(RemoteProtocolError, match="another peer than its sender"):
        wire.open_envelope(stolen)
    with pytest.raises(LocalProtocolError):
        wire.seal_envelope(sent, OTHER)


def test_an_open_entry_is_signed_by_the_syncer_it_names() -> None:
    with pytest.raises(RemoteProtocolError, match="another syncer"):
        wire.open_entry(wire.seal_entry(opening(OTHER.peer_id), ME))


# ---- the owner's orders


def order(owner: Identity = OWNER, **changed: Any) -> str:
    plain = AmendmentOrder(run=RUN, branch=BRANCH, number=1, changes=CHANGES)
    return wire.seal_amendment(replace(plain, **changed), owner)


def amendment(**changed: Any) -> Amendment:
    """As a syncer appends it, with what the owner signed."""
    plain = Amendment(
        header=header(), owner=OWNER.peer_id, number=1, changes=CHANGES, stretch=UNSTRETCHED, order=order()
    )
    return replace(plain, **changed)


def reform() -> Reform:
    return Reform(header=header(), lineage=1, roster=(Elector(ME.peer_id, "ab", "machine", "127.0.0.1:1"),))


def of_another_purpose() -> str:
    text = Signed.from_line(order()).body
    return sealed_text(text, purpose="order", signer=OWNER).to_line()


FORGED: dict[str, Amendment] = {
    "another owner": amendment(owner=ME.peer_id),
    "another number": amendment(number=2),
    "other changes": amendment(changes=Changes(quorum=3)),
    "more changes": amendment(changes=replace(CHANGES, eta=0.1)),
    "another run": amendment(header=header(run=RunId("9" * 40))),
    "another branch": amendment(header=replace(header(), branch=BranchId("9" * 64))),
    "an order of another run": amendment(order=order(run=RunId("9" * 40))),
    "an order of another branch": amendment(order=order(branch=BranchId("9" * 64))),
    "an order by its syncer": amendment(order=order(owner=ME)),
    "another purpose": amendment(order=of_another_purpose()),
    "no order": amendment(order=""),
    "not an order": amendment(order="nonsense"),
}


@pytest.mark.parametrize("name", FORGED)
def test_no_syncer_can_invent_an_amendment(name: str) -> None:
    signed = wire.seal_entry(FORGED[name], ME)
    with pytest.raises(RemoteProtocolError):
        wire.open_entry(signed)


def test_a_snapshot_shows_what_the_owner_signed() -> None:
    shown = Amended(
        seq=Seq(2),
        branch=BRANCH,
        owner=OWNER.peer_id,
        number=1,
        changes=CHANGES,
        stretch=UNSTRETCHED,
        order=order(),
    )
    honest = replace(snapshot(), amended=(shown,))
    assert wire.open_snapshot(wire.seal_snapshot(honest, ME)) == honest
    for change in ({"number": 2}, {"owner": ME.peer_id}, {"changes": Changes(quorum=3)}, {"order": order(owner=ME)}):
        forged = replace(honest, amended=(replace(shown, **change),))
        with pytest.raises(RemoteProtocolError, match="not what its owner signed"):
            wire.open_snapshot(wire.seal_snapshot(forged, ME))


# ---- malformed bodies, properly signed


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body[key] = value

    return change


def _set_in(key: str, inner: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        place = body[key][0] if isinstance(body[key], list) else body[key]
        place[inner] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("surprise", 1),
        _set_in("header", "surprise", 1),
        _set_in("participants", "surprise", 1),
        lambda body: body.pop("rbar"),
        lambda body: body.pop("kind"),
        _set("kind", "comit"),
        _set("kind", "found"),
        _set("version", 2.0),
        _set("version", "2"),
        _set("version", True),
        _set("version", None),
        _set("version", -1),
        _set("tokens_total", 1 << 53),
        _set("tokens_total", 10**400),
        _set("eta", "0.7"),
        _set("eta", None),
        _set("eta", float("nan")),
        _set("rbar", float("inf")),
        _set("rho", 10**400),
        _set("state_digest", "zz" * 32),
        _set("state_digest", "AA" * 32),
        _set("state_digest", "../" + "a" * 61),
        _set("state_digest", ""),
        _set_in("update", "digest", "a" * 63),
        _set_in("update", "size", -1),
        _set_in("participants", "peer", "nobody"),
        _set_in("participants", "weight", float("nan")),
        _set_in("header", "run", "a" * 39),
        _set_in("header", "branch", "x"),
        _set("close_reason", "\x1b[2J"),
        _set("close_reason", "x" * 5000),
        _set("participants", {}),
        _set("participants", None),
        _set("header", []),
    ],
)
def test_a_body_that_is_not_exactly_an_entry_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    assert wire.open_entry(sealed_text(body_with(lambda body: None)))
    with pytest.raises(RemoteProtocolError, match=ME.peer_id[:8]):
        wire.open_entry(sealed_text(body_with(change)))


@pytest.mark.parametrize(
    "body", ["", "null", "[]", "{", "{}", "[" * 100_000, '{"kind":"record"' + " " * 1000, "\ud800"]
)
def test_a_body_that_is_no_entry_at_all_is_refused(body: str) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.open_entry(sealed_text(body))


@given(st.binary(max_size=300) | st.text(max_size=300))
def test_noise_is_refused_and_never_raises_anything_else(line: bytes | str) -> None:
    with pytest.raises(RemoteProtocolError):
        Signed.from_line(line)


@given(st.integers(0, 2000), st.integers(0, 255))
def test_a_line_with_one_byte_changed_is_refused_or_has_the_same_meaning(place: int, byte: int) -> None:
    entry = commit(ME.peer_id)
    line = bytearray(wire.seal_entry(entry, ME).to_line().encode())
    line[place % len(line)] = byte
    try:
        again = wire.open_entry(Signed.from_line(bytes(line)))
    except RemoteProtocolError:
        return
    assert again == entry


@given(st.integers(0, 5000))
def test_a_truncated_line_is_refused(length: int) -> None:
    line = wire.seal_entry(commit(ME.peer_id), ME).to_line()
    with pytest.raises(RemoteProtocolError):
        Signed.from_line(line[: length % len(line)])


def test_a_line_names_its_signer_and_signature_in_one_spelling() -> None:
    line = wire.seal_entry(record(1, D1), ME).to_line()
    with pytest.raises(RemoteProtocolError, match="lower-case hex"):
        Signed.from_line(line.replace(ME.peer_id, ME.peer_id.upper()))
    with pytest.raises(RemoteProtocolError, match="surprise"):
        Signed.from_line(line[:-1] + ',"surprise":1}')


def test_sizes_are_checked_before_anything_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("parsed or verified")

    monkeypatch.setattr(wire, "verify", never)
    monkeypatch.setattr(wire, "_parse", never)
    with pytest.raises(RemoteProtocolError, match="at most"):
        Signed.from_line(b"x" * (wire.LINE_BYTES_MAX + 1))
    big = Signed("x" * (wire.MESSAGE_BYTES_MAX + 1), ME.peer_id, "0" * 128, "envelope")
    with pytest.raises(RemoteProtocolError, match="above"):
        wire.open_envelope(big)
    wide = Signed("ü" * (wire.MESSAGE_BYTES_MAX // 2 + 1), ME.peer_id, "0" * 128, "envelope")
    with pytest.raises(RemoteProtocolError, match="above"):
        wire.open_envelope(wide)
    with pytest.raises(RemoteProtocolError, match="above"):
        wire.open_entry(replace(big, body="x" * (wire.ENTRY_BYTES_MAX + 1), purpose="entry"))


# ---- what we would put out ourselves


@pytest.mark.parametrize(
    "changed",
    [
        {"rbar": float("nan")},
        {"rho": float("inf")},
        {"tokens_total": -1},
        {"state_digest": Digest("short")},
        {"close_reason": "\x00"},
        {"close_reason": "\ud800"},
        {"left_out": (LeftOut(peer=PeerId("nobody"), reason=""),)},
    ],
)
def test_what_others_must_refuse_is_never_sealed(changed: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="entry that others would refuse"):
        wire.seal_entry(commit(ME.peer_id, **changed), ME)


def test_what_is_too_large_is_never_sealed() -> None:
    many = (LeftOut(peer=ME.peer_id, reason="x" * 4000),) * 1100
    with pytest.raises(LocalProtocolError, match="at most"):
        wire.seal_entry(commit(ME.peer_id, left_out=many), ME)


def test_an_address_is_host_and_port_and_nothing_more() -> None:
    assert wire.url_from_address("127.0.0.1:31340") == "http://127.0.0.1:31340"
    assert wire.url_from_address("[::1]:80") == "http://[::1]:80"
    assert wire.url_from_address("host-1.example.org:1") == "http://host-1.example.org:1"
    for bad in (
        "",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "a@b:1",
        "host:1/path",
        "host:1?q",
        "::1:80",
        "ho st:1",
        "h:\u0661",
    ):
        with pytest.raises(RemoteProtocolError, match="host:port"):
            wire.url_from_address(bad)


def test_runs_in_samples_are_well_formed() -> None:
    assert len(RUN) == 40
