"""A tape gives back exactly what was recorded, survives the death of its writer, and names what differs."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from geo_diloco import tape
from geo_diloco.errors import TapeError
from geo_diloco.manifest import (
    BootId,
    BranchId,
    Digest,
    FragmentId,
    MonoMs,
    PeerId,
    RunId,
    RunRules,
    Seq,
    SyncSpec,
    Term,
    Version,
)
from geo_diloco.protocol.effects import Adopt, Effect, Note, Send
from geo_diloco.protocol.election.ballots import Elector, Opened, PeerBoot, Rank, VoteRecord
from geo_diloco.protocol.events import (
    Connected,
    Event,
    Received,
    Resumed,
    SnapshotLoaded,
    StepDone,
    StopRequested,
    Tick,
    UndecidedAccount,
)
from geo_diloco.protocol.events import FragmentAccount as Account
from geo_diloco.protocol.messages import BlobRef, Contribution, ContributionId, Durable, FragmentHead, Progress
from geo_diloco.protocol.peer import Peer
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.tape import record as record_module

A, B = PeerId("a" * 64), PeerId("b" * 64)
DIGEST = Digest("d" * 64)
VOTED = VoteRecord(
    branch=BranchId("e" * 64),
    lineage=0,
    term=Term(2),
    voted_for=PeerBoot(B, BootId("3" * 16)),
    held=Rank(0, Term(1), Seq(5)),
    enrolment="ab",
)
OPENED = Opened(B, BootId("2" * 16), "", ())


def boot(boot_id: str = "0" * 16) -> tape.Boot:
    return tape.Boot(
        peer=A,
        boot=BootId(boot_id),
        role="learner",
        run=RunId("1" * 40),
        layout_digest=DIGEST,
        hello=HelloFacts(host="machine", software="geo_diloco"),
        seat=Seat(may_elect=True, record=VOTED, fresh_enrolment="ab"),
        rules=RunRules(sync=SyncSpec(num_fragments=1), founder=B),
    )


def snapshot_loaded() -> SnapshotLoaded:
    head = FragmentHead(version=Version(3), base=DIGEST, state_digest=DIGEST, momentum_digest=DIGEST)
    roster = (Elector(B, "cd", "machine"),)
    return SnapshotLoaded(
        BranchId("e" * 64), Term(1), Seq(5), DIGEST, (head,), (10,), DIGEST, (1234,), 0.25, roster, Seq(0), OPENED
    )


def events() -> list[Event]:
    progress = Progress(step=1, tokens=8, step_time_us=1000, upload_bytes_per_s=0, loss=None, cursor=8)
    return [
        snapshot_loaded(),
        Connected(B, True),
        Received(B, BranchId("e" * 64), Term(1), BootId("2" * 16), progress),
        StepDone(1, 8, 1000, 5.5, 8),
        StepDone(2, 16, 1000, None, 16),
        Tick(),
        StopRequested("test"),
    ]


def record(path: Path, given: list[Event], part: tape.Boot | None = None) -> None:
    """As the driver does: the event, then what a core asked for."""
    part = part or boot()
    core, writer = part.fresh_core(), tape.TapeWriter(path, part)
    for at, event in enumerate(given):
        writer.event(event, MonoMs(at * 10))
        effects = core.handle(event, MonoMs(at * 10))
        if effects:
            writer.effects(effects)
    writer.close()


def test_events_come_back_as_they_were_recorded(tmp_path: Path) -> None:
    record(tmp_path / "tape.jsonl", events())
    (part,) = tape.read_tape(tmp_path / "tape.jsonl")
    assert part.boot == boot()
    assert [each.event for each in part.events] == events()
    assert [each.at for each in part.events] == [0, 10, 20, 30, 40, 50, 60]


def test_nested_accounts_and_contributions_come_back_equal() -> None:
    contribution = Contribution(
        id=ContributionId(A, FragmentId(0), DIGEST, 9),
        round=1,
        attempt=0,
        base_version=Version(3),
        first_step=2,
        steps=4,
        tokens=32,
        tokens_unmerged=40,
        cursor=72,
        blob=BlobRef(DIGEST, 100),
    )
    account = Account(Version(3), 2, 5, 40, 7, 72, UndecidedAccount(contribution, 900_000))
    event = Resumed(9, 72, (account,), 1, 8)
    assert tape.from_json(json.loads(json.dumps(tape.to_json(event)))) == event


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": "1"}, "StepDone.step"),
        ({"step": True}, "StepDone.step"),
        ({"loss": "low"}, "StepDone.loss"),
        ({"more": 1}, "more"),
        ({"type": "Peer"}, "Peer"),
        ({"type": "dataclass"}, "dataclass"),
    ],
)
def test_a_record_of_another_type_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(TapeError, match=named):
        tape.from_json({**tape.to_json(StepDone(1, 8, 1000, 5.5, 8)), **change})


def test_a_killed_writer_costs_at_most_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    record(path, events())
    path.write_bytes(path.read_bytes() + b'{"kind":"event","t":70,"type":"Ti')
    (part,) = tape.read_tape(path)
    assert len(part.events) == len(events())
    record(path, [snapshot_loaded()], boot("1" * 16))
    assert [len(each.events) for each in tape.read_tape(path)] == [len(events()), 1]
    assert tape.replay(path).divergence is None


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    record(path, events())
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b"{torn\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(TapeError, match=":3:"):
        list(tape.read_tape(path))


@pytest.mark.parametrize(
    "data", [b"\x7fELF\x02\n\x00\x01", b"a text\n", b"[1]\n", b'{"kind":"event"}\n', b"[" * 200_000]
)
def test_a_file_that_is_no_tape_is_refused_at_its_first_line(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tape.jsonl").write_bytes(data)
    with pytest.raises(TapeError, match=r"tape\.jsonl:1: "):
        tape.replay(tmp_path / "tape.jsonl")


@pytest.mark.parametrize("data", [b"", b"\n\n"])
def test_replaying_nothing_is_no_success(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tape.jsonl").write_bytes(data)
    with pytest.raises(TapeError, match="no tape, there is not one record"):
        tape.replay(tmp_path / "tape.jsonl")


def test_only_a_last_line_without_an_end_counts_as_torn(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    record(path, events())
    whole = path.read_bytes()
    last = whole.count(b"\n") + 1
    path.write_bytes(whole + b"{torn\n")
    with pytest.raises(TapeError, match=f":{last}: not a JSON record"):
        tape.replay(path)
    path.write_bytes(whole + b"{torn\n{torn")
    with pytest.raises(TapeError, match=f":{last}: not a JSON record"):
        tape.replay(path)
    path.write_bytes(whole + b"{torn")
    assert tape.replay(path).divergence is None


def test_an_event_that_no_core_can_take_is_named_by_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tape.jsonl"
    record(path, events())
    handle = Peer.handle

    def refuses(self: Peer, event: Event, now: MonoMs) -> list[Effect]:
        assert not isinstance(event, Tick), "never at this time"
        return handle(self, event, now)

    monkeypatch.setattr(Peer, "handle", refuses)
    with pytest.raises(TapeError, match=r"tape\.jsonl:\d+: Tick: no core was given this: AssertionError never at this"):
        tape.replay(path)


def test_replay_of_an_honest_tape_finds_no_difference(tmp_path: Path) -> None:
    record(tmp_path / "tape.jsonl", events())
    result = tape.replay(tmp_path / "tape.jsonl")
    assert result.divergence is None
    assert (result.num_boots, result.num_events) == (1, len(events()))
    assert result.num_effects > 0


@pytest.mark.parametrize(
    ("written", "changed"),
    [('"loss":5.5', '"loss":5.4'), ('"type":"Tick"}\n', '"type":"Tick" }\n'), ('"jitter":0', '"jitter":1')],
)
def test_replay_names_a_change_that_nothing_else_depends_on(tmp_path: Path, written: str, changed: str) -> None:
    path = tmp_path / "tape.jsonl"
    record(path, [StepDone(1, 8, 1000, 5.5, 8), Tick(), *events()])
    as_written = path.read_text()
    assert as_written.count(written) >= 1
    path.write_text(as_written.replace(written, changed, 1))
    (part,) = tape.read_tape(path)
    replayed = [tape.effects_hash(effects) if effects else None for _, effects in tape.replay_boot(part)]
    assert replayed == [each.effects for each in part.events], "the core asks for the same all the same"
    divergence = tape.replay(path).divergence
    assert divergence is not None and "after line 0 is not as it was written" in divergence


def test_a_second_start_is_a_witness_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    record(path, events())
    first = len(path.read_text().splitlines())
    record(path, events(), boot("1" * 16))
    assert tape.replay(path).divergence is None
    lines = path.read_text().splitlines()
    del lines[first + 1]  # an event of the second start, the snapshot
    path.write_text("\n".join(lines) + "\n")
    divergence = tape.replay(path).divergence
    assert divergence is not None and f"after line {first} is not" in divergence


def test_replay_names_the_first_record_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    record(path, events())
    lines = path.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if '"type":"Connected"' in line)
    lines[at] = lines[at].replace(B, "c" * 64)
    path.write_text("\n".join(lines) + "\n")
    divergence = tape.replay(path).divergence
    assert divergence is not None
    assert f":{at + 1}: Connected" in divergence


def test_the_hash_of_effects_depends_on_order_and_content() -> None:
    one, two = Note("a", "b"), Adopt(FragmentId(0), Version(1), None, 0.5)
    hashes = {tape.effects_hash(each) for each in ([one, two], [two, one], [one], [Note("a", "c"), two])}
    assert len(hashes) == 4


def test_what_is_said_to_many_is_hashed_as_if_each_had_been_told_alone() -> None:
    durable, other = Durable(seq=Seq(3), digest=DIGEST), Durable(seq=Seq(4), digest=DIGEST)
    sends = [Send(PeerId(c * 64), BranchId(DIGEST), Term(1), durable, dial=c == "b") for c in "ab"]
    effects: list[Effect] = [*sends, Note("a", "b"), Send(A, BranchId(DIGEST), Term(1), other), *sends]
    naive = json.dumps([tape.to_json(each) for each in effects], sort_keys=True, separators=(",", ":"))
    assert tape.effects_hash(effects) == hashlib.blake2s(naive.encode(), digest_size=8).hexdigest()


def test_a_tape_whose_rules_have_other_keys_says_whose_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    record(path, [Tick()])
    path.write_text(path.read_text().replace('"carry_cap":', '"another":', 1))
    with pytest.raises(TapeError, match="another, carry_cap; a tape is for the version of this program that wrote it"):
        list(tape.read_tape(path))


def test_a_tape_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    record(path, [Tick()])
    path.write_text(path.read_text().replace(f'"version":{tape.TAPE_VERSION}', '"version":99', 1))
    with pytest.raises(TapeError, match="99"):
        list(tape.read_tape(path))


def test_a_full_disk_is_waited_out_and_the_tape_goes_on_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tape.jsonl"
    honest, room = os.write, [10**9]

    def write(handle: int, data: bytes | bytearray) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = honest(handle, bytes(data[: room[0]]))
        room[0] -= written
        return written

    writer = tape.TapeWriter(path, boot())
    monkeypatch.setattr(os, "write", write)
    given = events()
    for number, event in enumerate(given):
        room[0] = (10, 0, 10**9)[number % 3]
        writer.event(event, MonoMs(number))
    room[0] = 10**9
    writer.close()
    (part,) = tape.read_tape(path)
    assert [each.event for each in part.events] == given


def test_a_disk_that_stays_full_ends_the_tape_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(handle: int, data: bytes | bytearray) -> int:
        raise OSError(28, "No space left on device")

    path = tmp_path / "tape.jsonl"
    writer = tape.TapeWriter(path, boot())
    monkeypatch.setattr(record_module, "WAITING_BYTES_MAX", 1000)
    monkeypatch.setattr(os, "write", write)
    for number in range(1000):
        writer.event(Tick(), MonoMs(number))
    writer.close()
    (part,) = tape.read_tape(path)
    assert part.events == []
