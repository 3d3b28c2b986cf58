"""Joining, staying and leaving, on an overlay that fails as told. The real DHT is in test_dht.py."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest

from geo_diloco.errors import DirectoryError, LocalProtocolError
from geo_diloco.manifest import BootId, PeerId, RunId, Seq, Term
from geo_diloco.runtime import directory as rules
from geo_diloco.runtime.directory import DirectoryRules, Found, Greeting, silence_text
from geo_diloco.runtime.records import EXPIRES_S, PeerRecord

RUN = RunId("ab" * 20)
PEER = PeerId("a" * 64)
ONE, TWO = "/ip4/192.0.2.1/tcp/1/p2p/Qm1", "/ip4/192.0.2.2/tcp/1/p2p/Qm2"
RECORD = PeerRecord(
    run=RUN,
    peer=PEER,
    roles=("learner",),
    address="",
    term=Term(1),
    boot=BootId("0f"),
    head_seq=Seq(0),
    wire_version=1,
)
FINE = Greeting(sees_us=True, clock_s=0.0)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RETRY_S", (0.0, 0.0))


async def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("never")


class FakeOverlay:
    """Answers each `greet` from a script per address; the last answer is repeated."""

    def __init__(self, **answers: Sequence[Greeting | Exception]) -> None:
        self.answers = {ONE: list(answers.get("one", [FINE])), TWO: list(answers.get("two", [FINE]))}
        self.is_alive = False
        self.visible_maddrs = ["/ip4/127.0.0.1/tcp/7/p2p/QmMe"]
        self.contacts: set[str] = set()
        self.opened: list[bool] = []
        self.is_client = False
        self.now = 1000.0
        self.stored: list[tuple[float, bytes]] = []
        self.open_problem = ""
        self.closed = False

    @property
    def num_contacts(self) -> int:
        return len(self.contacts)

    def last_words(self) -> str:
        return "panic"

    def time(self) -> float:
        return self.now

    def shift_time(self, seconds: float) -> None:
        self.now += seconds

    async def open(self, *, as_client: bool) -> None:
        if self.open_problem:
            raise DirectoryError(self.open_problem)
        self.contacts.clear()
        self.opened.append(as_client)
        self.is_alive, self.is_client = True, as_client

    async def become_client(self) -> None:
        self.contacts.clear()
        self.is_client = True

    async def greet(self, maddr: str) -> Greeting:
        script = self.answers[maddr]
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, Exception):
            raise answer
        self.contacts.add(maddr)
        return answer

    async def settle(self) -> None:
        pass

    async def store(self, key: str, body: bytes, expiration: float, *, subkey: str) -> bool:
        self.stored.append((expiration, body))
        return True

    async def get(self, key: str) -> list[Found]:
        return [Found(subkey=PEER, body=body, expiration=expiration) for expiration, body in self.stored[-1:]]

    async def wait_ended(self) -> None:
        await wait_until(lambda: not self.is_alive)

    async def close(self) -> None:
        self.is_alive, self.closed = False, True


def directory_on(overlay: FakeOverlay, *bootstraps: str, told: list[str] | None = None) -> DirectoryRules:
    return DirectoryRules(
        overlay, bootstraps=bootstraps, peer=PEER, as_client=False, on_status=(told if told is not None else []).append
    )


def test_a_bootstrap_that_came_back_is_greeted_again_though_others_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = FakeOverlay(one=[FINE, ConnectionRefusedError(111, "Connection refused"), FINE])

    async def scenario() -> None:
        directory = directory_on(overlay, ONE, TWO)
        await directory.join()
        overlay.contacts.remove(ONE)  # it was killed, and has forgotten everybody
        await directory.publish(RUN, RECORD)
        assert ONE not in overlay.contacts, "not asked again so soon"
        monkeypatch.setattr(rules, "REMIND_S", 0.0)
        await directory.publish(RUN, RECORD)
        await directory.publish(RUN, RECORD)
        assert ONE in overlay.contacts

    asyncio.run(scenario())


def test_dead_bootstraps_are_tried_until_one_answers_and_each_reason_is_told_once() -> None:
    refused, silent = ConnectionRefusedError(111, "Connection refused"), TimeoutError()
    overlay = FakeOverlay(one=[refused] * 3 + [DirectoryError("wrong identity")] * 2 + [FINE], two=[silent])
    told: list[str] = []
    asyncio.run(directory_on(overlay, ONE, TWO, told=told).join())
    assert told == [
        f"no bootstrap answers, trying again: {ONE}: connection refused; {TWO}: no answer",
        f"no bootstrap answers, trying again: {ONE}: wrong identity; {TWO}: no answer",
        f"joined through 1 of 2 bootstraps; {TWO}: no answer",
    ]
    assert overlay.opened == [False]


def test_a_bootstrap_that_libp2p_no_longer_dials_is_dialled_by_a_fresh_p2pd_at_once() -> None:
    overlay, told = FakeOverlay(one=[DirectoryError("failed to dial: dial backoff"), FINE]), []
    asyncio.run(directory_on(overlay, ONE, told=told).join())
    assert overlay.opened == [False, False]
    assert told == ["joined through 1 of 1 bootstraps"]


def test_a_peer_that_nobody_can_call_joins_as_a_client() -> None:
    overlay = FakeOverlay(one=[dataclasses.replace(FINE, sees_us=False)])
    directory = directory_on(overlay, ONE)
    asyncio.run(directory.join())
    assert overlay.is_client and directory.is_client and directory.num_contacts == 1
    assert directory.visible_maddrs == []


def test_one_bootstrap_that_calls_back_is_enough_to_be_a_full_participant() -> None:
    overlay = FakeOverlay(one=[dataclasses.replace(FINE, sees_us=False)])
    asyncio.run(directory_on(overlay, ONE, TWO).join())
    assert not overlay.is_client


@pytest.mark.parametrize(("difference", "side"), [(120.0, "behind"), (-120.0, "ahead of")])
def test_a_wrong_clock_is_corrected_and_told(difference: float, side: str) -> None:
    overlay, told = FakeOverlay(one=[dataclasses.replace(FINE, clock_s=difference)]), []
    directory = directory_on(overlay, ONE, told=told)
    asyncio.run(directory.join())
    assert overlay.now == 1000.0 + difference
    assert f"clock is 120 s {side} the directory's" in told[0]


@pytest.mark.parametrize("lie", [math.nan, math.inf, -1e18])
def test_a_bootstrap_that_lies_about_the_time_is_not_used(lie: float) -> None:
    overlay, told = FakeOverlay(one=[dataclasses.replace(FINE, clock_s=lie)]), []
    asyncio.run(directory_on(overlay, ONE, TWO, told=told).join())
    assert overlay.now == 1000.0
    assert told == [f"joined through 1 of 2 bootstraps; {ONE}: its clock makes no sense"]


def test_a_small_difference_of_clocks_is_left_alone() -> None:
    overlay = FakeOverlay(one=[dataclasses.replace(FINE, clock_s=0.9)])
    asyncio.run(directory_on(overlay, ONE).join())
    assert overlay.now == 1000.0


def test_an_own_record_only_ever_lives_longer_even_if_the_clock_goes_back() -> None:
    overlay = FakeOverlay()
    directory = directory_on(overlay, ONE)

    async def scenario() -> None:
        await directory.join()
        assert await directory.publish(RUN, RECORD)
        overlay.now -= 30
        assert await directory.publish(RUN, RECORD)

    asyncio.run(scenario())
    first, second = (expiration for expiration, _ in overlay.stored)
    assert first == 1000.0 + EXPIRES_S and second > first


def test_a_record_that_nobody_else_took_is_not_called_published() -> None:
    overlay = FakeOverlay(one=[FINE, TimeoutError()])
    told: list[str] = []
    directory = directory_on(overlay, ONE, told=told)

    async def scenario() -> None:
        await directory.join()
        overlay.contacts.clear()
        assert not await directory.publish(RUN, RECORD)

    asyncio.run(scenario())
    assert told[-1] == f"no bootstrap answers, trying again: {ONE}: no answer"


def test_lost_contacts_are_sought_again_before_the_next_question() -> None:
    overlay = FakeOverlay()
    directory = directory_on(overlay, ONE, TWO)

    async def scenario() -> None:
        await directory.join()
        overlay.contacts.clear()
        await directory.find(RUN)

    asyncio.run(scenario())
    assert overlay.contacts == {ONE, TWO}


def test_an_ended_p2pd_is_started_again_and_said_so() -> None:
    overlay, told = FakeOverlay(), []
    directory = directory_on(overlay, ONE, told=told)

    async def scenario() -> None:
        await directory.join()
        overlay.is_alive = False
        assert await directory.publish(RUN, RECORD)

    asyncio.run(scenario())
    assert overlay.opened == [False, False] and overlay.contacts == {ONE}
    assert "p2pd ended and is started again: panic" in told


def test_a_bootstrap_outlives_its_p2pd_even_if_the_first_new_start_fails() -> None:
    overlay, told = FakeOverlay(), []
    directory = directory_on(overlay, told=told)

    async def scenario() -> None:
        await directory.join()
        keeper = asyncio.create_task(directory.keep_alive())
        overlay.is_alive, overlay.open_problem = False, "port in use"
        await wait_until(lambda: "port in use" in told)
        overlay.open_problem = ""
        await wait_until(lambda: overlay.is_alive)
        keeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeper

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_leaving_replaces_the_record_by_a_tombstone_and_closes_once() -> None:
    overlay = FakeOverlay()
    directory = directory_on(overlay, ONE)

    async def scenario() -> None:
        await directory.join()
        await directory.publish(RUN, RECORD)
        assert await directory.find(RUN) == [RECORD]
        await directory.close()
        await directory.close()
        with pytest.raises(DirectoryError, match="closed"):
            await directory.publish(RUN, RECORD)

    asyncio.run(scenario())
    assert overlay.closed and len(overlay.stored) == 2
    assert b'"roles":[]' in overlay.stored[1][1] and overlay.stored[1][0] > overlay.stored[0][0]


@pytest.mark.parametrize("change", [{"peer": PeerId("b" * 64)}, {"run": RunId("cd" * 20)}])
def test_publishing_for_another_peer_or_run_is_our_own_bug(change: dict[str, str]) -> None:
    directory = directory_on(FakeOverlay(), ONE)
    with pytest.raises(LocalProtocolError):
        asyncio.run(directory.publish(RUN, dataclasses.replace(RECORD, **change)))


# ---- while no bootstrap answers ----------------------------------------------------------------------------------

GONE = ConnectionRefusedError(111, "Connection refused")


def test_where_no_bootstrap_answers_another_peer_lets_it_in_and_it_says_so() -> None:
    overlay, told = FakeOverlay(one=[GONE]), []

    async def scenario() -> None:
        directory = directory_on(overlay, ONE, told=told)
        await directory.begin()
        await directory.wait_tried()
        assert directory.silent_since == 1000.0 and not overlay.contacts
        directory.learn([TWO])
        await directory.wait_joined()
        assert await directory.publish(RUN, RECORD)

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert overlay.contacts == {TWO}
    assert told == [
        f"no bootstrap answers, trying again: {ONE}: connection refused",
        f"joined through 1 other peers; {ONE}: connection refused",
        silence_text(1000.0),
    ]


def test_what_is_learned_ends_the_pause_between_two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RETRY_S", (1000.0, 1000.0))

    async def scenario() -> None:
        directory = directory_on(FakeOverlay(one=[GONE]), ONE)
        await directory.begin()
        await directory.wait_tried()
        directory.learn([TWO])
        await directory.wait_joined()

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_one_that_answers_is_not_held_up_by_one_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "OTHERS_S", 0.01)

    class HalfSilent(FakeOverlay):
        async def greet(self, maddr: str) -> Greeting:
            if maddr == ONE:
                await asyncio.Event().wait()
            return await super().greet(maddr)

    overlay, told = HalfSilent(), []
    directory = directory_on(overlay, ONE, told=told)
    directory.learn([TWO])
    asyncio.run(asyncio.wait_for(directory.join(), 10))
    assert overlay.contacts == {TWO}
    assert told == ["joined through 1 other peers"] and directory.silent_since is None, "it was not waited for"


def test_that_no_bootstrap_answers_is_said_once_and_that_one_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "REMIND_S", 0.0)
    late = dataclasses.replace(FINE, clock_s=100.0)
    overlay, told = FakeOverlay(one=[FINE, GONE, GONE, GONE, late]), []

    async def scenario() -> None:
        directory = directory_on(overlay, ONE, told=told)
        await directory.join()
        overlay.contacts.add("another peer")
        overlay.now = 2000.0
        for _ in range(3):
            await directory.publish(RUN, RECORD)
            assert directory.silent_since == 2000.0
        await directory.publish(RUN, RECORD)
        assert directory.silent_since is None

    asyncio.run(scenario())
    assert told == [
        "joined through 1 of 1 bootstraps",
        silence_text(2000.0),
        "this machine's clock is 100 s behind the directory's; its records allow for it",
        "a bootstrap answers again",
    ]


def test_a_bootstraps_clock_counts_before_that_of_other_peers() -> None:
    fast = dataclasses.replace(FINE, clock_s=500.0)
    overlay = FakeOverlay(two=[fast])
    directory = directory_on(overlay, ONE)
    directory.learn([TWO])
    asyncio.run(directory.join())
    assert overlay.contacts == {ONE, TWO} and overlay.now == 1000.0


def test_a_run_that_has_lost_everybody_says_that_new_peers_need_a_contact() -> None:
    overlay, told = FakeOverlay(one=[FINE, GONE]), []

    async def scenario() -> None:
        directory = directory_on(overlay, ONE, told=told)
        await directory.join()
        overlay.contacts.clear()
        for _ in range(3):
            await directory.find(RUN)

    asyncio.run(scenario())
    assert told[1:] == [silence_text(1000.0), f"no bootstrap answers, trying again: {ONE}: connection refused"]


def test_only_others_are_learned_and_only_so_many() -> None:
    directory = directory_on(FakeOverlay(), ONE)
    directory.learn([ONE, "/ip4/192.0.2.9/tcp/1/p2p/QmMe", *(f"/ip4/192.0.2.3/tcp/{n}/p2p/Qm{n}" for n in range(50))])
    assert len(directory._others) == rules.OTHERS_MAX
    assert directory._others[0] == "/ip4/192.0.2.3/tcp/0/p2p/Qm0", "neither a bootstrap nor this peer itself"


def test_leaving_while_joining_ends_the_attempts() -> None:
    overlay = FakeOverlay(one=[GONE])

    async def scenario() -> None:
        directory = directory_on(overlay, ONE)
        await directory.begin()
        await directory.wait_tried()
        await directory.close()
        assert directory._joining is not None and directory._joining.done()

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert overlay.closed
