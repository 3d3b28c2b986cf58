"""A fleet's rounds, timed by the production core; and read off a tape again, which is as good as having been there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.manifest import MonoMs
from geo_diloco.protocol.effects import Effect
from geo_diloco.protocol.events import Event, Received
from geo_diloco.protocol.messages import Commit, Progress
from geo_diloco.protocol.peer import Peer
from geo_diloco.sim.fakes import SignedEntry
from geo_diloco.sim.goodput.fleet import BLOB_S, CODEC_BITS, SHELL, Fleet, Machine, by_rates, predict
from geo_diloco.sim.goodput.relived import PHASES, Relived, relive
from geo_diloco.sim.goodput.tapes import fleet_from_tape
from geo_diloco.sim.goodput.timing import AHEAD_BYTES, LEARNERS_MAX, STEP_MS_MAX, plan_from_fleet, time_rounds
from geo_diloco.sim.plans import ShellTimes
from geo_diloco.sim.process import Process
from geo_diloco.sim.world import Watch, World
from geo_diloco.tape import Boot, TapeBoot, TapeEvent, TapeWriter

GOOD = Machine(name="good", step_s=0.4, up_mbit=50.0, down_mbit=100.0, fails_every_s=1e12, back_after_s=0.0)
EQUAL = Fleet(machines=(GOOD,) * 4, params=1e6, tokens_per_step=100, interval_steps=24, fragments=8)
MODEL_MBIT = 1e6 * CODEC_BITS["int4"] / 1e6


def speeds(*shares: float) -> Fleet:
    return replace(EQUAL, machines=tuple(replace(GOOD, step_s=0.4 / share) for share in shares))


# ---- what the fleet becomes


def test_each_machine_is_a_learner_with_its_own_times() -> None:
    slow = replace(GOOD, step_s=0.5, held_up=0.5, up_mbit=MODEL_MBIT, down_mbit=2 * MODEL_MBIT, rtt_s=0.1)
    plan = plan_from_fleet(replace(EQUAL, quorum=2), (GOOD, slow), quorum=2, seed=3)
    syncer, _, host = plan.hosts
    assert (syncer.step_ms, syncer.serves) == (0, True)
    assert host.step_ms == 1000, "half of its time is others'"
    assert host.upload_ms == 50 + 5, "half a round trip, both ends' disks"
    assert host.uplink_ms == 125, "an eighth of the model in a second"
    assert host.ahead_ms == round(8e-3 * AHEAD_BYTES / MODEL_MBIT)
    assert (host.download_ms, host.delay_ms, host.elects) == (62, 50, True)
    assert (plan.sync.interval_steps, plan.sync.num_fragments, plan.sync.quorum, plan.seed) == (24, 8, 2, 3)
    assert (plan.times, plan.step_spread) == (SHELL, (-5, 5))


# ---- what comes of it


def test_rounds_are_due_by_the_median_learner_the_slower_of_two() -> None:
    timing = time_rounds(speeds(1.0, 0.8, 0.5, 0.2))
    assert timing.rounds_per_s == pytest.approx(8 / (24 * 0.8), rel=0.03)
    fast, good, half, fifth = timing.joins
    assert fast > 0.95 and good > 0.95
    assert 0.4 < fifth < half < 1.0, "whose step ends late is late, and its work rides with a later round"
    assert timing.fresh[3] < 0.5 * timing.joins[3]
    assert timing.participants == sum(timing.joins)


def test_equal_learners_that_are_not_in_step_are_not_all_in_every_round() -> None:
    timing = time_rounds(EQUAL)
    assert timing.rounds_per_s == pytest.approx(8 / (24 * 0.4), rel=0.02)
    assert 3.2 < timing.participants < 3.95
    everybody = time_rounds(replace(EQUAL, quorum=4))
    assert everybody.participants > 3.95
    assert everybody.rounds_per_s == pytest.approx(timing.rounds_per_s, rel=0.05), "a round waits for less than a step"


def test_a_thin_uplink_holds_nobody_up_unless_the_quorum_needs_it() -> None:
    thin = replace(GOOD, up_mbit=MODEL_MBIT / (3 * 24 * 0.4))  # three times too slow
    fleet = replace(EQUAL, machines=(GOOD, GOOD, GOOD, thin))
    timing = time_rounds(fleet)
    assert timing.rounds_per_s == pytest.approx(8 / (24 * 0.4), rel=0.03)
    assert 0.2 < timing.joins[3] < 0.5 < min(timing.joins[:3])
    assert time_rounds(replace(fleet, quorum=4)).rounds_per_s < 0.5 * timing.rounds_per_s


def test_long_steps_are_run_at_a_scale_that_changes_nothing() -> None:
    """Everything takes longer, round trips and shells, too: else it would be another fleet (the test after this)."""
    long = round(10 * STEP_MS_MAX / 1000 / 0.4)
    slow = replace(GOOD, step_s=0.4 * long, up_mbit=50 / long, down_mbit=100 / long, rtt_s=0.04 * long)
    (d, e), (f, g), (c, h), (m, n) = SHELL.disk, SHELL.fold, SHELL.check, SHELL.merge
    shell = ShellTimes(
        disk=(long * d, long * e), fold=(long * f, long * g), check=(long * c, long * h), merge=(long * m, long * n)
    )
    real, scaled = time_rounds(EQUAL), time_rounds(replace(EQUAL, machines=(slow,) * 4, shell=shell))
    assert scaled.rounds_per_s == pytest.approx(real.rounds_per_s / long, rel=0.02)
    assert scaled.participants == pytest.approx(real.participants, rel=0.1)


def test_what_is_short_beside_a_step_keeps_nobody_out_of_a_round() -> None:
    shell = ShellTimes(disk=(10, 40), fold=(15, 50), check=(5, 30), merge=(45, 100))
    hasty = replace(EQUAL, shell=shell, step_spread=0.1)
    patient = replace(hasty, machines=(replace(GOOD, step_s=20.0),) * 4)
    assert time_rounds(hasty).participants < time_rounds(replace(hasty, shell=SHELL)).participants - 0.1
    assert time_rounds(patient).participants > time_rounds(hasty).participants + 0.2


def test_of_very_many_machines_some_stand_for_all() -> None:
    many = replace(EQUAL, machines=EQUAL.machines * LEARNERS_MAX, quorum=8)
    many = replace(many, machines=(*many.machines[:-4], *(replace(GOOD, step_s=4.0),) * 4))
    timing = time_rounds(many, seeds=(0,))
    assert len(timing.joins) == len(timing.fresh) == 4 * LEARNERS_MAX
    assert timing.participants > 0.6 * len(timing.joins)
    assert max(timing.joins[-4:]) < min(timing.joins[:-4]), "each is told by those that are as fast"


@pytest.mark.parametrize(
    "fleet",
    [
        replace(EQUAL, params=1e15),
        replace(EQUAL, interval_steps=100_000),
        replace(EQUAL, fragments=10_000),
        replace(EQUAL, machines=(replace(GOOD, step_s=1e-3),) * 4),
        replace(EQUAL, machines=(*EQUAL.machines, replace(GOOD, step_s=1e5)), quorum=5),
    ],
)
def test_what_would_take_minutes_is_taken_by_rates(fleet: Fleet) -> None:
    assert time_rounds(fleet) == by_rates(fleet)


def test_a_quorum_that_nobody_can_reach_is_no_round() -> None:
    fleet = replace(EQUAL, quorum=5)
    timing = time_rounds(fleet, seeds=(0,))
    found = predict(fleet, timing, days=0.01, seeds=(0,))
    assert timing.rounds_per_s == found.rounds_per_hour == found.participants == 0.0


def test_the_same_fleet_and_seeds_give_the_same_timing() -> None:
    assert time_rounds(EQUAL, seeds=(7,)) == time_rounds(EQUAL, seeds=(7,))
    assert time_rounds(EQUAL, seeds=(7,)) != time_rounds(EQUAL, seeds=(8,))


def test_a_scale_keeps_the_length_of_phases() -> None:
    long = replace(EQUAL, machines=(replace(GOOD, step_s=10 * STEP_MS_MAX / 1000),) * 4)
    phases = time_rounds(long, seeds=(0,)).phases_ms
    assert phases["sampling"] > STEP_MS_MAX, "half a step of ten times that"
    assert set(phases) == set(PHASES)
    assert SHELL.merge[0] - 10 <= phases["merging"] <= SHELL.merge[1] + 10, "in tens of milliseconds, at this scale"


# ---- read off a tape again


class Told(Peer):
    """A core that knows what it was made of."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        self.facts = facts


class Taping(Watch):
    """What the syncer's process was given, and which commits it sealed."""

    def __init__(self) -> None:
        self.events: list[TapeEvent] = []
        self.commits: list[Commit] = []

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        if process.host.index == 0:
            self.events.append(TapeEvent(len(self.events) + 2, process.mono(), event))

    def sealed(self, process: Process, signed: SignedEntry) -> None:
        if isinstance(signed.entry, Commit):
            self.commits.append(signed.entry)


def run_of(fleet: Fleet, *, seconds: int) -> tuple[Taping, Boot]:
    world = World(plan_from_fleet(fleet, fleet.machines, quorum=fleet.quorum, seed=1), Told)
    taping = Taping()
    world.watches = (taping,)
    world.begin()
    process = world.hosts[0].process
    assert process is not None and isinstance(process.core, Told)
    world.clock.run(1000 * seconds)
    facts = process.core.facts
    return taping, Boot(**facts)


def test_what_a_syncer_s_core_did_is_known_from_its_tape() -> None:
    fleet = replace(EQUAL, machines=(GOOD, replace(GOOD, rtt_s=0.2), replace(GOOD, step_s=0.8)))
    taping, boot = run_of(fleet, seconds=120)
    lived = relive(TapeBoot(1, boot, taping.events))
    asked_for = [commit for _, commit in lived.commits]
    assert asked_for[: len(taping.commits)] == taping.commits
    assert len(asked_for) <= len(taping.commits) + 1, "one may be being sealed"
    assert lived.participants == pytest.approx(sum(len(each.participants) for each in asked_for) / len(asked_for))
    near, far = (lived.rtt_s(world_peer) for world_peer in (peer_of(taping, 1), peer_of(taping, 2)))
    assert near is not None and far is not None
    assert near == pytest.approx(0.04, abs=0.02) and far == pytest.approx(0.2, abs=0.02)
    shell = lived.shell()
    assert shell.check == pytest.approx(SHELL.check, abs=1), "nearly all of it"
    assert SHELL.merge[0] <= shell.merge[0] <= shell.merge[1] <= SHELL.merge[1] + 10, "some had to wait for another"
    half = lived.between(lived.commits[0][0], lived.commits[len(lived.commits) // 2][0])
    assert half.commits == lived.commits[: len(half.commits)] and len(half.commits) < len(lived.commits)
    assert (Relived().participants, Relived().shell(), Relived().rtt_s(boot.peer)) == (None, SHELL, None)


def test_phases_of_a_round_take_what_machines_and_shell_take() -> None:
    taping, boot = run_of(EQUAL, seconds=60)
    phases = relive(TapeBoot(1, boot, taping.events)).medians()
    assert set(phases) == set(PHASES)
    assert 40 < phases["sampling"] < 440, "a round trip and up to a step"
    assert SHELL.fold[0] <= phases["encoding"] <= SHELL.fold[1]
    line_ms = 1000 * MODEL_MBIT / GOOD.up_mbit / EQUAL.fragments
    assert phases["uploading"] == pytest.approx(line_ms + 1000 * BLOB_S, abs=2)
    assert SHELL.check[0] <= phases["checking"] <= SHELL.check[1]
    assert phases["sampling"] < phases["closing"] < 800
    assert SHELL.merge[0] <= phases["merging"] <= SHELL.merge[1]
    assert SHELL.disk[0] <= phases["sealing"] <= SHELL.disk[1] + 5
    assert phases["spreading"] > 80, "the update goes to the electors, and their word comes back"


def test_learners_tell_how_long_each_step_took() -> None:
    taping, _ = run_of(EQUAL, seconds=60)
    told = {
        each.event.message.step_time_us
        for each in taping.events
        if isinstance(each.event, Received) and isinstance(each.event.message, Progress)
    }
    assert len(told) > 10 and 1000 * 380 <= min(told) < max(told) <= 1000 * 420


def peer_of(taping: Taping, host: int) -> Any:
    from geo_diloco.sim.fakes import fake_peer

    return fake_peer(f"host {host}")


def test_the_first_half_of_a_run_foretells_the_second(tmp_path: Path) -> None:
    fleet = replace(speeds(1.0, 0.8, 0.5, 0.2), params=800.0)  # as many as the simulator's fragments have elements
    taping, boot = run_of(fleet, seconds=240)
    writer = TapeWriter(tmp_path / "tape.jsonl", boot)
    for each in taping.events:
        writer.event(each.event, MonoMs(each.at))
    writer.close()
    found, actual = fleet_from_tape(tmp_path / "tape.jsonl", hold_out=0.5)
    assert [machine.pace_s for machine in sorted(found.machines, key=lambda each: each.step_s)] == pytest.approx(
        [0.4, 0.5, 0.8, 2.0], rel=0.03
    )
    assert actual.hours == pytest.approx(0.5 * (taping.events[-1].at - taping.events[0].at) / 3.6e6, rel=0.15)
    timing = time_rounds(found)
    assert timing.rounds_per_s * 3600 == pytest.approx(actual.rounds_per_hour, rel=0.05)
    assert actual.participants is not None
    assert timing.participants == pytest.approx(actual.participants, rel=0.1)
    whole, all_of_it = fleet_from_tape(tmp_path / "tape.jsonl")
    begins_late = all_of_it.hours / 2 - actual.hours
    assert 0 <= begins_late < 2 / actual.rounds_per_hour, "with the first merge after the half"
    assert len(whole.machines) == 4
