"""The simulators' clock: what was asked for happens in time, and in the order asked for where times are equal."""

from __future__ import annotations

from geo_diloco.sim.clock import Clockwork


def test_actions_happen_in_time_and_ties_in_the_order_asked_for() -> None:
    clock, seen = Clockwork(0), list[tuple[int, str]]()
    for when, name in ((20, "c"), (10, "a"), (20, "d"), (10, "b")):
        clock.at(when, lambda name=name: seen.append((clock.now, name)))
    clock.run(100)
    assert seen == [(10, "a"), (10, "b"), (20, "c"), (20, "d")]
    assert clock.is_idle


def test_what_is_asked_for_in_the_past_happens_now_and_after_what_was_there() -> None:
    clock, seen = Clockwork(0), list[str]()
    clock.at(10, lambda: clock.at(3, lambda: seen.append("late")))
    clock.at(10, lambda: seen.append("there"))
    clock.run(10)
    assert (seen, clock.now) == (["there", "late"], 10)


def test_a_run_ends_at_its_time_or_when_it_is_enough_and_can_go_on() -> None:
    clock, seen = Clockwork(0), list[int]()
    for when in (10, 20, 30):
        clock.at(when, lambda: seen.append(clock.now))
    clock.run(20)
    assert (seen, clock.now) == ([10, 20], 20)
    clock.after(5, lambda: seen.append(clock.now))
    clock.run(100, lambda: len(seen) == 3)
    assert (seen, clock.is_idle) == ([10, 20, 25], False)


def test_chance_comes_from_the_seed() -> None:
    def draws(seed: int) -> list[int]:
        clock = Clockwork(seed)
        return [clock.between((0, 9)) for _ in range(20)]

    assert draws(1) == draws(1) != draws(2)
    assert set(draws(1)) <= set(range(10))
