"""Fleets: availability by hand, thin lines, hours, advice with its reason; a fleet read off a syncer's tape."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from geo_diloco.errors import TapeError
from geo_diloco.manifest import BootId, BranchId, Digest, FragmentId, MonoMs, PeerId, RunId, RunRules, SyncSpec, Term
from geo_diloco.protocol.events import Connected, Disconnected, Event, FoundRun, Merged, Received
from geo_diloco.protocol.messages import BlobRef, Hello, Message, Progress, Sampled
from geo_diloco.protocol.seat import HelloFacts
from geo_diloco.sim.goodput.fleet import (
    CODEC_BITS,
    SHELL,
    Fleet,
    FleetOutcome,
    Machine,
    Timing,
    advise,
    by_rates,
    predict,
    with_machines,
)
from geo_diloco.sim.goodput.tapes import fleet_from_tape
from geo_diloco.tape import Boot, TapeWriter

GOOD = Machine(name="good", step_s=1.0, up_mbit=100.0, down_mbit=1e6, fails_every_s=1e12, back_after_s=0.0)
SMALL = Fleet(machines=(GOOD,) * 4, params=1e6, tokens_per_step=100)


def foretold(fleet: Fleet, *, days: float, seeds: tuple[int, ...]) -> FleetOutcome:
    """With rounds as rates alone allow them: so what is left is who is on."""
    return predict(fleet, by_rates(fleet), days=days, seeds=seeds)


def test_machines_that_never_fail_train_all_the_time() -> None:
    found = foretold(SMALL, days=1.0, seeds=(0,))
    assert (found.goodput, found.uptime, found.quorum_time, found.in_merges) == (1.0, 1.0, 1.0, 1.0)
    assert found.tokens_per_hour == pytest.approx(4 * 3600 * 100)
    assert found.rounds_per_hour == pytest.approx(3600), "24 fragments in 24 steps of a second"
    assert (found.participants, found.training, found.five_percent) == (4.0, 4.0, 4)


def test_one_machine_is_there_mtbf_of_mtbf_plus_repair() -> None:
    failing = replace(GOOD, fails_every_s=30_000.0, back_after_s=10_000.0)
    found = foretold(replace(SMALL, machines=(failing,) * 20), days=60.0, seeds=(0, 1))
    assert found.goodput == pytest.approx(0.75, abs=0.01)
    slow_line = replace(failing, down_mbit=32.0 / 3000)  # an hour less a quarter of a minute for Theta
    rejoining = foretold(replace(SMALL, machines=(slow_line,) * 20), days=60.0, seeds=(0, 1))
    assert rejoining.goodput < 0.75 * 0.93, "of each 30,000 s between failures 3,000 go into fetching Theta"


def test_hours_may_run_over_midnight() -> None:
    night = replace(GOOD, on_from=22.0, on_until=6.0)
    found = foretold(replace(SMALL, machines=(night, GOOD), quorum=2), days=3.0, seeds=(0,))
    assert found.quorum_time == pytest.approx(8 / 24)
    assert found.training == pytest.approx(1 + 8 / 24)
    assert found.goodput == pytest.approx(1.0), "who is off is not asked to train"
    assert found.rounds_per_hour == pytest.approx(3600 * 8 / 24)


def test_a_thin_line_is_in_fewer_merges_and_holds_nobody_up() -> None:
    up_s = 1e6 * CODEC_BITS["int4"] / 1e6  # the model once, at a Mbit/s
    thin = replace(GOOD, up_mbit=up_s / 96)  # four times H steps
    found = foretold(replace(SMALL, machines=(GOOD, GOOD, GOOD, thin)), days=0.1, seeds=(0,))
    assert found.participants == pytest.approx(3.25)
    assert found.rounds_per_hour == pytest.approx(3600)
    waits = foretold(replace(SMALL, machines=(GOOD, GOOD, GOOD, thin), quorum=4), days=0.1, seeds=(0,))
    assert waits.rounds_per_hour == pytest.approx(900), "K of all waits for the thinnest line"


def test_the_slower_of_two_medians_sets_the_pace_as_in_the_core() -> None:
    paces = [replace(GOOD, step_s=step_s) for step_s in (1.0, 1.25, 2.0, 5.0)]
    assert by_rates(replace(SMALL, machines=tuple(paces))).rounds_per_s == pytest.approx(0.5)
    assert by_rates(replace(SMALL, machines=tuple(paces[:3]))).rounds_per_s == pytest.approx(0.8)


def test_rounds_as_they_were_timed_are_told_for_as_long_as_machines_are_on() -> None:
    half_the_day = replace(GOOD, on_from=6.0, on_until=18.0)
    fleet = replace(SMALL, machines=(GOOD, half_the_day), quorum=2)
    timing = Timing(rounds_per_s=0.5, joins=(0.9, 0.6), fresh=(0.8, 0.2))
    found = predict(fleet, timing, days=1.0, seeds=(0,))
    assert found.rounds_per_hour == pytest.approx(900), "half of the schedule's, half of the time"
    assert found.participants == pytest.approx(1.5)
    assert found.in_merges == pytest.approx((0.8 + 0.2) * 12 / (24 + 12)), "alone nobody is in a merge, as K is 2"


def test_a_machine_that_others_use_is_that_much_slower() -> None:
    half = replace(GOOD, held_up=0.5)
    found = foretold(replace(SMALL, machines=(half,) * 4), days=0.1, seeds=(0,))
    assert found.goodput == pytest.approx(0.5)
    assert found.rounds_per_hour == pytest.approx(1800)
    assert found.tokens_per_hour == pytest.approx(2 * 3600 * 100)


def test_volunteers_add_tokens() -> None:
    before = foretold(SMALL, days=1.0, seeds=(0,))
    after = foretold(with_machines(SMALL, [replace(GOOD, step_s=2.0)] * 2), days=1.0, seeds=(0,))
    assert after.tokens_per_hour == pytest.approx(1.25 * before.tokens_per_hour)


def test_advice_follows_lines_and_those_who_are_there() -> None:
    line_s = 1e6 * CODEC_BITS["int4"] / 1e6
    thin = replace(SMALL, machines=(replace(GOOD, name="thin", up_mbit=line_s / 40),) * 4)
    rules = {each.rule: each for each in advise(thin, foretold(thin, days=0.1, seeds=(0,)))}
    assert (rules["K"].value, rules["H"].value, rules["codec"].value) == ("2", "96", "int4")
    assert "thin" in rules["H"].reason and "40 s" in rules["H"].reason
    rich = {each.rule: each.value for each in advise(SMALL, foretold(SMALL, days=0.1, seeds=(0,)))}
    assert (rich["H"], rich["codec"]) == ("8", "bf16")
    one_thin = replace(SMALL, machines=(GOOD,) * 19 + (replace(GOOD, up_mbit=0.001),))
    assert {a.rule: a.value for a in advise(one_thin, foretold(one_thin, days=0.1, seeds=(0,)))}["codec"] == "bf16"


def test_time_that_is_looked_at_in_pieces_is_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = replace(GOOD, fails_every_s=9000.0, back_after_s=9000.0)
    fleet = replace(SMALL, machines=(failing, replace(failing, step_s=3.0, up_mbit=0.1)), quorum=2)
    timing = by_rates(fleet)
    whole = predict(fleet, timing, days=3.0, seeds=(1, 2))
    monkeypatch.setattr("geo_diloco.sim.goodput.fleet.CELLS_AT_ONCE", 2 * 77)
    pieces = predict(fleet, timing, days=3.0, seeds=(1, 2))
    assert asdict(pieces) == pytest.approx(asdict(whole), rel=1e-9)
    assert 0.5 < whole.uptime < 1.0 and whole.quorum_time < whole.uptime


def test_the_same_seed_gives_the_same_fleet() -> None:
    failing = replace(SMALL, machines=(replace(GOOD, fails_every_s=5000.0, back_after_s=2000.0),) * 3)
    assert foretold(failing, days=2.0, seeds=(5,)) == foretold(failing, days=2.0, seeds=(5,))
    assert foretold(failing, days=2.0, seeds=(5,)) != foretold(failing, days=2.0, seeds=(6,))


# ---- from a tape ------------------------------------------------------------------------------------------------

PEERS = (PeerId("a" * 64), PeerId("b" * 64))


def received(sender: PeerId, message: Message) -> Event:
    return Received(sender=sender, branch=BranchId("0" * 64), term=Term(1), boot=BootId("c" * 16), message=message)


def progress(step: int) -> Progress:
    return Progress(
        step=step, tokens=10 * step, step_time_us=7, upload_bytes_per_s=1_000_000, loss=None, cursor=10 * step
    )


def merged(fragment: int, number: int) -> Merged:
    blob = BlobRef(Digest("d" * 64), 100)
    digest = Digest("e" * 64)
    return Merged(FragmentId(fragment), number, 0, blob, digest, digest, 1.0, None)


def events() -> list[tuple[int, Event]]:
    """A hundred seconds of two learners, steps of half a second; the second is away from 40 s to 60 s."""
    hello = Hello(
        wire_version=3, layout_digest=Digest("f" * 64), trains=True, host="desk", software="", address="", step=0,
        tokens=0, head_seq=0, undecided=(), proof="",
    )  # fmt: skip
    found = FoundRun(("e" * 64,) * 2, ("e" * 64,) * 2, (300, 700), Digest("f" * 64))
    script: list[tuple[int, Event]] = [(0, found)]
    for peer in PEERS:
        script += [(0, Connected(peer)), (1, received(peer, hello))]
    script += [(40_000, Disconnected(PEERS[1], "gone")), (60_000, Connected(PEERS[1]))]
    for second in range(1, 101):
        script.append((1000 * second, received(PEERS[0], progress(2 * second))))
        if not 40 <= second <= 60:
            script.append((1000 * second, received(PEERS[1], progress(2 * (second - 20 * (second > 60))))))
    for number in range(10):
        at = 10_000 * number + 500
        script += [(at, received(PEERS[0], Sampled(round=number, fragment=FragmentId(number % 2), attempt=0)))]
        script += [(at + 250, merged(number % 2, number))]
    return sorted(script, key=lambda each: each[0])


def tape(tmp_path: Path, script: list[tuple[int, Event]]) -> Path:
    boot = Boot(
        peer=PeerId("c" * 64),
        boot=BootId("c" * 16),
        role="follower",
        run=RunId("1" * 40),
        layout_digest=Digest("f" * 64),
        hello=HelloFacts(host="here", software="", address=""),
        rules=RunRules(sync=SyncSpec(interval_steps=12, num_fragments=2), tokens_per_step=10),
    )
    writer = TapeWriter(tmp_path / "tape.jsonl", boot)
    for at, event in script:
        writer.event(event, MonoMs(at))
    writer.close()
    return tmp_path / "tape.jsonl"


def test_a_fleet_is_read_off_a_syncer_s_tape(tmp_path: Path) -> None:
    fleet, actual = fleet_from_tape(tape(tmp_path, events()))
    assert (fleet.params, fleet.tokens_per_step, fleet.interval_steps, fleet.fragments) == (1000.0, 10, 12, 2)
    assert (fleet.shell, actual.participants) == (SHELL, None), "no core was ever given this"
    first, second = fleet.machines
    assert first.name == "desk aaaaaaaa"
    assert first.step_s == second.step_s == 0.5, "counted, not as told"
    assert first.up_mbit == 8.0
    assert first.fails_every_s > 1e6
    assert first.held_up == pytest.approx(0.0, abs=0.01)
    assert (second.fails_every_s, second.back_after_s) == (80.0, 20.0)
    assert actual.rounds_per_hour == pytest.approx(9 / 90 * 3600)
    assert actual.goodput == pytest.approx(1.0, abs=0.02)
    assert foretold(fleet, days=0.5, seeds=(0,)).rounds_per_hour == pytest.approx(1200, rel=0.01)


def test_what_a_learner_did_not_train_while_it_was_there_is_no_step_time(tmp_path: Path) -> None:
    """Half of the time its steps stand still: somebody else used the machine."""
    script = []
    for at, event in events():
        if isinstance(event, Received) and event.sender == PEERS[0] and isinstance(event.message, Progress):
            second = at // 1000
            event = received(PEERS[0], progress(min(2 * second, 100) if second < 80 else 2 * second - 60))
        script.append((at, event))
    fleet, actual = fleet_from_tape(tape(tmp_path, script))
    assert fleet.machines[0].step_s == 0.5
    assert fleet.machines[0].held_up == pytest.approx(0.3, abs=0.01)
    assert actual.goodput == pytest.approx(0.84, abs=0.02)
    assert foretold(fleet, days=0.5, seeds=(0,)).goodput == pytest.approx(0.75, abs=0.03), "and the second fails"


def odd(name: str, script: list[tuple[int, Event]]) -> list[tuple[int, Event]]:
    """What no run writes."""
    if name == "time that goes back":
        return [(100_000 - at, event) for at, event in script]
    if name == "no parameters":
        found = FoundRun(("e" * 64,) * 2, ("e" * 64,) * 2, (0, 0), Digest("f" * 64))
        return [(at, found if isinstance(event, FoundRun) else event) for at, event in script]
    return [
        (at, replace(event, message=replace(event.message, step=event.message.step * 10**30)))
        if isinstance(event, Received) and isinstance(event.message, Progress)
        else (at, event)
        for at, event in script
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("time that goes back", "holds what no run writes: a time before the one above it"),
        ("no parameters", "holds what no run writes: a fragment without parameters"),
        ("steps without end", "holds what no run writes: desk aaaaaaaa with a step time of"),
    ],
)
def test_a_tape_that_no_run_can_have_written_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(TapeError, match=said):
        fleet_from_tape(tape(tmp_path, odd(name, events())))


@pytest.mark.parametrize("key", ["interval_steps", "num_fragments", "quorum", "rounds_in_flight_max"])
def test_rules_that_no_run_has_are_refused(tmp_path: Path, key: str) -> None:
    path = tape(tmp_path, events())
    boot, *rest = path.read_text().splitlines(keepends=True)
    record = json.loads(boot)
    record["rules"]["sync"][key] = 0
    path.write_text("".join([json.dumps(record) + "\n", *rest]))
    with pytest.raises(TapeError, match=f"holds what no run writes: {key} = 0"):
        fleet_from_tape(path)


def test_a_tape_of_two_peers_is_refused(tmp_path: Path) -> None:
    path = tape(tmp_path, events())
    mine = path.read_text()
    path.write_text(mine + mine.replace("c" * 64, "9" * 64))
    with pytest.raises(TapeError, match=r"of 2 peers \(99999999, cccccccc\); wanted is that of one"):
        fleet_from_tape(path)


def test_a_name_is_on_one_line_whatever_a_machine_calls_itself(tmp_path: Path) -> None:
    script = [
        (at, replace(event, message=replace(event.message, host="a\x1b[31m\nb")))
        if isinstance(event, Received) and isinstance(event.message, Hello)
        else (at, event)
        for at, event in events()
    ]
    assert fleet_from_tape(tape(tmp_path, script))[0].machines[0].name == "a?[31m?b aaaaaaaa"


def test_a_tape_without_a_merge_or_a_learner_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="no merge is on this tape"):
        fleet_from_tape(tape(tmp_path, [each for each in events() if not isinstance(each[1], Merged)]))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(TapeError, match="no learner told its step time"):
        fleet_from_tape(tape(other, [each for each in events() if isinstance(each[1], Merged)]))
