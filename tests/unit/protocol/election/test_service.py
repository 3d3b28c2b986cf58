"""A syncer's lease, durable head, roster and hand-over (rules 15 to 23)."""

from __future__ import annotations

from dataclasses import replace

from geo_diloco.manifest import MonoMs, PeerId, Seq, Term
from geo_diloco.protocol.effects import Note
from geo_diloco.protocol.election.ballots import Ack, Append, Ask, Head, Need, Offer, Rank, Refuse, Release, Vote
from geo_diloco.protocol.election.books import ElectionRules
from geo_diloco.protocol.election.polls import (
    DurableReached,
    EntrySealed,
    PollEffect,
    SealOpen,
    SealRoster,
    ServiceBegan,
    ServiceEnded,
)
from geo_diloco.protocol.election.service import ACKERS_MAX, HANDOVER_LEASES, ROSTER_MS
from geo_diloco.protocol.election.tenure import RELEASE_AGAIN_MS, RELEASES
from geo_diloco.protocol.events import EntryLost, HandoverAsked
from tests.support.election_parts import RULES, A, B, Bench, C, Chain, D, E, ballots, boot, founded, offer_of, seat

LEASE_MS = RULES.lease_ms


class Serving:
    """B, elected in term 2 of a roster of three (or as many as named), with its open sealed."""

    def __init__(self, peers: tuple[PeerId, ...] = (A, B, C), *, rules: ElectionRules = RULES) -> None:
        self.chain = Chain(tuple(map(seat, peers)))
        self.chain.open(A, 1)
        self.bench = Bench(B, chain=self.chain, rules=rules)
        self.bench.wait(rules.promise_ms)
        voters = [peer for peer in peers if peer != B]
        for peer in voters:
            self.bench.hear(peer, offer_of(peer), term=1)
        self.bench.wait(1_000)
        for peer in voters:
            vote = Vote(candidate=boot(B), head=self.chain.head.digest, enrolment=seat(peer).enrolment)
            self.bench.hear(peer, vote, term=2)
        assert any(isinstance(effect, SealOpen) for effect in self.bench.effects)
        self.chain.open(B, 2)
        self.sealed()

    def sealed(self) -> list[PollEffect]:
        return self.bench.give(EntrySealed(self.chain.entries[-1]))

    def commit(self) -> list[PollEffect]:
        assert self.bench.machine.begin_append(Term(2), self.bench.now) is None
        self.chain.commits(1)
        return self.sealed()

    def ack(
        self, peer: PeerId, *, head: Head | None = None, sent_at: int | None = None, **facts: object
    ) -> list[PollEffect]:
        mine = seat(peer)
        ack = Ack(
            acked=head or self.chain.head,
            sent_at=self.bench.now if sent_at is None else MonoMs(sent_at),
            enrolment=mine.enrolment,
            host=mine.host,
            address=mine.address,
        )
        before = len(self.bench.effects)
        self.bench.hear(peer, replace(ack, **facts), term=2)  # type: ignore[arg-type]
        return self.bench.effects[before:]

    def why_not(self) -> str | None:
        return self.bench.machine.why_not_append(Term(2), self.bench.now)


def durable(effects: list[PollEffect]) -> list[int]:
    return [effect.seq for effect in effects if isinstance(effect, DurableReached)]


# ---- durable ----------------------------------------------------------------------------------------------------


def test_nothing_is_appended_before_open_is_durable() -> None:
    serving = Serving()
    assert serving.why_not() == "open of term 2 is not durable yet"
    effects = serving.ack(C)
    assert durable(effects) == [2] and ServiceBegan(Term(2)) in effects
    assert serving.why_not() is None


def test_an_ack_of_an_older_terms_entry_makes_nothing_durable() -> None:
    serving = Serving()
    older = Head(Rank(0, Term(1), Seq(1)), serving.chain.entries[1].digest)
    assert durable(serving.ack(C, head=older)) == []
    assert serving.bench.machine.durable_seq is None


def test_an_ack_of_an_entry_off_the_chain_does_not_count() -> None:
    serving = Serving()
    other = Head(Rank(0, Term(2), Seq(2)), serving.chain.entries[0].digest)
    assert durable(serving.ack(C, head=other)) == []


def test_a_majority_of_the_newest_roster_is_needed() -> None:
    serving = Serving((A, B, C, D, E))
    assert durable(serving.ack(C)) == []
    assert durable(serving.ack(PeerId("f" * 64))) == []
    assert durable(serving.ack(D, enrolment="new disk")) == []
    assert durable(serving.ack(D)) == [2]


def test_everything_before_a_durable_entry_is_durable_and_the_head_never_sinks() -> None:
    serving = Serving()
    serving.ack(C)
    for _ in range(3):
        serving.commit()
    assert durable(serving.ack(A)) == [5]
    serving.bench.give(EntryLost(serving.chain.entries[3].digest))
    assert serving.bench.machine.durable_seq == 5
    effects = serving.bench.wait(RULES.heartbeat_ms)
    assert {append.durable_seq for _, append in ballots(effects, Append)} == {5}


def test_the_syncers_own_lost_bytes_do_not_count_and_are_asked_for() -> None:
    serving = Serving()
    serving.ack(C)
    serving.commit()
    serving.bench.give(EntryLost(serving.chain.entries[-1].digest))
    effects = serving.ack(C)
    assert durable(effects) == []
    assert [to for to, _ in ballots(effects, Need)] == [C]
    assert durable(serving.ack(A)) == [3]


def test_the_tail_beyond_the_durable_head_is_bounded() -> None:
    serving = Serving(rules=replace(RULES, tail_max=3))
    serving.ack(C)
    for _ in range(3):
        serving.commit()
    assert serving.why_not() == "electors behind: 3 entries are not durable"
    serving.ack(C)
    assert serving.why_not() is None


def test_one_entry_is_sealed_at_a_time() -> None:
    """Two drafts on one head would be two entries of one place."""
    serving = Serving()
    serving.ack(C)
    for roster in (False, True):
        assert serving.bench.machine.begin_append(Term(2), serving.bench.now) in (None, "an entry is being sealed")
        why_not = serving.bench.machine.begin_append(Term(2), serving.bench.now, roster=roster)
        assert why_not == "an entry is being sealed"
    serving.chain.commits(1)
    serving.sealed()
    assert serving.bench.machine.begin_append(Term(2), serving.bench.now) is None


def test_an_entry_that_is_dropped_makes_room_for_the_next() -> None:
    serving = Serving()
    serving.ack(C)
    assert serving.bench.machine.begin_append(Term(2), serving.bench.now) is None
    serving.bench.machine.drop_append(Term(1))
    assert serving.bench.machine.begin_append(Term(2), serving.bench.now) == "an entry is being sealed"
    serving.bench.machine.drop_append(Term(2))
    assert serving.bench.machine.begin_append(Term(2), serving.bench.now) is None


# ---- lease ------------------------------------------------------------------------------------------------------


def test_a_lease_runs_from_the_sending_time_of_the_acked_heartbeat() -> None:
    serving = Serving()
    sent_at = serving.bench.now
    serving.bench.wait(500)
    serving.ack(C, sent_at=sent_at)
    assert serving.bench.machine.lease_until(serving.bench.now) == sent_at + LEASE_MS
    serving.bench.wait(LEASE_MS - 501)
    assert serving.why_not() is None
    serving.bench.wait(1)
    assert serving.why_not() == "no lease for 0.0 s: a majority of 3 electors does not answer"
    assert serving.bench.machine.begin_append(Term(2), serving.bench.now) is not None


def test_without_a_lease_for_as_long_again_it_becomes_a_peer() -> None:
    serving = Serving()
    serving.ack(C)
    serving.bench.wait(2 * LEASE_MS - 1)
    assert serving.bench.role == "syncer"
    effects = serving.bench.wait(1)
    assert ServiceEnded(Term(2), "no lease for 15.0 s") in effects
    assert serving.why_not() == "not syncer of term 2"


def test_after_a_pause_the_lease_is_looked_at_before_anything_else() -> None:
    serving = Serving()
    serving.ack(C)
    serving.bench.now = MonoMs(serving.bench.now + 3 * LEASE_MS)
    effects = serving.ack(C)
    assert any(isinstance(effect, ServiceEnded) for effect in effects) and durable(effects) == []


def test_an_elected_syncer_that_nobody_acks_gives_up() -> None:
    serving = Serving()
    serving.bench.wait(LEASE_MS)
    assert serving.bench.role == "peer"


def test_an_echo_from_the_future_lengthens_no_lease() -> None:
    serving = Serving()
    serving.ack(C, sent_at=serving.bench.now + 10**6)
    assert serving.bench.machine.lease_until(serving.bench.now) == serving.bench.now + LEASE_MS


def test_an_older_echo_shortens_no_lease() -> None:
    serving = Serving()
    serving.ack(C)
    until = serving.bench.machine.lease_until(serving.bench.now)
    serving.ack(C, sent_at=1)
    assert serving.bench.machine.lease_until(serving.bench.now) == until


def test_electors_hear_a_heartbeat_five_times_a_lease() -> None:
    serving = Serving()
    serving.ack(C)
    effects = serving.bench.wait(LEASE_MS)
    assert [to for to, _ in ballots(effects, Append)].count(A) == 5


def test_whoever_offers_to_a_syncer_hears_its_chain() -> None:
    serving = Serving()
    [(to, append)] = ballots(list(serving.bench.hear(D, offer_of(D), term=2)), Append)
    assert (to, append.head) == (D, serving.chain.head)


# ---- other terms ------------------------------------------------------------------------------------------------


def test_hearing_a_higher_term_from_an_elector_it_stops_and_asks_at_once_in_a_higher_one() -> None:
    serving = Serving()
    serving.ack(C)
    before = len(serving.bench.effects)
    serving.bench.hear(C, Refuse(reason="term", detail="", term=Term(7)), term=7)
    effects = serving.bench.effects[before:]
    assert any(isinstance(effect, ServiceEnded) for effect in effects)
    assert serving.bench.role == "candidate" and serving.bench.machine.record.term == 8
    assert {to for to, _ in ballots(effects, Ask)} == {A, C}


def test_without_its_lease_it_only_stops() -> None:
    serving = Serving()
    serving.ack(C)
    serving.bench.wait(LEASE_MS)
    serving.bench.hear(C, Refuse(reason="term", detail="", term=Term(7)), term=7)
    assert serving.bench.role == "peer" and serving.bench.machine.record.term == 7


def test_a_higher_term_of_a_stranger_changes_nothing() -> None:
    serving = Serving()
    serving.ack(C)
    serving.bench.hear(D, Refuse(reason="term", detail="", term=Term(7)), term=7)
    assert serving.bench.role == "syncer" and serving.bench.machine.record.term == 2


def test_who_asks_while_the_lease_holds_is_refused_and_ends_nothing() -> None:
    serving = Serving()
    serving.ack(C)
    [(_, refuse)] = ballots(list(serving.bench.hear(C, Ask(head=serving.chain.head), term=3)), Refuse)
    assert refuse.detail == "no vote: I serve term 2"
    assert serving.bench.role == "syncer"


def test_who_asks_when_the_lease_is_over_ends_the_service() -> None:
    serving = Serving()
    serving.ack(C)
    serving.bench.wait(LEASE_MS)
    serving.bench.hear(C, Ask(head=serving.chain.head), term=3)
    assert serving.bench.role == "peer" and serving.bench.machine.record.term == 3


def test_an_entry_sealed_too_late_is_nobodys_and_named_in_a_note() -> None:
    serving = Serving()
    serving.ack(C)
    assert serving.bench.machine.begin_append(Term(2), serving.bench.now) is None
    serving.chain.commits(1)
    serving.bench.hear(C, Refuse(reason="term", detail="", term=Term(7)), term=7)
    head = serving.bench.machine.head
    effects = serving.sealed()
    assert [effect.text for effect in effects if isinstance(effect, Note)] == [
        "entry 3 of term 2 came too late and is dropped"
    ]
    assert serving.bench.machine.head == head


# ---- roster -----------------------------------------------------------------------------------------------------


def planned(effects: list[PollEffect]) -> list[tuple[PeerId, ...]]:
    return [tuple(e.peer for e in effect.roster) for effect in effects if isinstance(effect, SealRoster)]


def with_standbys(serving: Serving, *peers: PeerId, ms: int = 4 * RULES.heartbeat_ms) -> list[PollEffect]:
    """Time passes while electors and standbys ack."""
    effects: list[PollEffect] = []
    for _ in range(ms // 1_000):
        for peer in (A, C, *peers):
            effects += serving.ack(peer)
        effects += serving.bench.wait(1_000)
    return effects


def test_a_syncer_alone_takes_two_standbys_that_ack_from_disk_at_once() -> None:
    bench, chain = founded()
    bench.wait(ROSTER_MS)
    assert (
        bench.machine.status(bench.now).roster_plan
        == "alone: two more peers, learners too, come in together, and none are here"
    )
    serving = Serving.__new__(Serving)
    serving.bench, serving.chain = bench, chain
    effects: list[PollEffect] = []
    for _ in range(10):
        for peer in (C, D):
            mine = seat(peer)
            ack = Ack(acked=chain.head, sent_at=bench.now, enrolment=mine.enrolment, host=mine.host, address="")
            bench.hear(peer, ack, term=1)
        effects += bench.wait(1_000)
    assert planned(effects) == [(A, C, D)]


def test_a_roster_waits_until_the_last_one_is_durable() -> None:
    serving = Serving(rules=replace(RULES, electors_wanted=5))
    assert planned(with_standbys(serving, D, E)) == [(A, B, C, D)]
    assert serving.bench.machine.begin_append(Term(2), serving.bench.now, roster=True) is None
    serving.chain.add("roster", roster=tuple(map(seat, (A, B, C, D))))
    serving.sealed()
    old = Head(Rank(0, Term(2), Seq(2)), serving.chain.entries[2].digest)
    for _ in range(5):
        for peer in (A, C, D, E):
            serving.ack(peer, head=old)
        assert planned(serving.bench.wait(ROSTER_MS)) == []
    assert serving.bench.machine.status(serving.bench.now).roster_plan == "the last roster is not durable yet"
    assert planned(with_standbys(serving, D, E)) == [(A, B, C, D, E)]


def test_a_roster_takes_effect_when_it_is_appended() -> None:
    serving = Serving(rules=replace(RULES, electors_wanted=5))
    with_standbys(serving, D, E)
    serving.bench.machine.begin_append(Term(2), serving.bench.now, roster=True)
    serving.chain.add("roster", roster=tuple(map(seat, (A, B, C, D))))
    serving.sealed()
    assert durable(serving.ack(A)) == [], "two of four is no majority"
    assert durable(serving.ack(D)) == [3]


def test_a_standby_that_is_behind_is_not_added() -> None:
    serving = Serving(rules=replace(RULES, electors_wanted=5))
    with_standbys(serving)
    behind = Head(Rank(0, Term(2), Seq(1)), serving.chain.entries[1].digest)
    for _ in range(5):
        for peer in (D, E):
            serving.ack(peer, head=behind)
        assert planned(with_standbys(serving, ms=1_000)) == []


def test_a_standby_whose_ack_is_older_than_a_lease_is_none() -> None:
    serving = Serving(rules=replace(RULES, electors_wanted=5))
    for peer in (C, D, E):
        serving.ack(peer)
    service = serving.bench.machine._tenure.service
    assert service is not None
    later = MonoMs(serving.bench.now + LEASE_MS)
    assert {each.peer for each in service.roster_facts(MonoMs(later - 1)).standbys} == {C, D, E}
    assert service.roster_facts(later).standbys == ()


def test_a_roster_draft_that_is_refused_is_planned_anew() -> None:
    serving = Serving(rules=replace(RULES, electors_wanted=5))
    assert planned(with_standbys(serving, D, E))
    assert planned(with_standbys(serving, D, E)) == [], "one is under way"
    serving.bench.wait(LEASE_MS)
    assert serving.bench.machine.begin_append(Term(2), serving.bench.now, roster=True) is not None
    assert planned(with_standbys(serving, D, E)) == [(A, B, C, D)]


def test_a_silent_elector_is_replaced() -> None:
    serving = Serving(rules=replace(RULES, silent_ms=20_000))
    effects: list[PollEffect] = []
    for _ in range(30):
        for peer in (C, D):
            effects += serving.ack(peer)
        effects += serving.bench.wait(1_000)
    assert planned(effects) == [(A, B, C, D)]


def test_strangers_are_remembered_up_to_a_bound_and_push_out_no_elector() -> None:
    serving = Serving()
    serving.ack(C)
    for number in range(2 * ACKERS_MAX):
        stranger = PeerId(f"{number:064d}")
        serving.bench.hear(stranger, offer_of(stranger), term=2)
    service = serving.bench.machine._tenure.service
    assert service is not None and len(service._ackers) == ACKERS_MAX and C in service._ackers


# ---- hand-over --------------------------------------------------------------------------------------------------


def test_a_hand_over_waits_until_all_is_durable_and_there_then_releases_everybody() -> None:
    serving = Serving()
    serving.ack(C)
    serving.commit()
    serving.bench.give(HandoverAsked(None))
    assert serving.why_not() == "handing over"
    before = len(serving.bench.effects)
    serving.ack(A)
    effects = serving.bench.effects[before:]
    releases = ballots(effects, Release)
    assert {to for to, _ in releases} == {A, C} and {release.to for _, release in releases} == {A}
    assert serving.bench.role == "peer"
    assert serving.bench.machine.begin_append(Term(2), serving.bench.now) is not None


def test_a_release_is_said_again_until_a_later_term_is_heard_of() -> None:
    serving = Serving()
    for peer in (A, C):
        serving.ack(peer)
    serving.bench.give(HandoverAsked(A))
    repeated = ballots(serving.bench.wait(RELEASE_AGAIN_MS), Release)
    assert {to for to, _ in repeated} == {A, C} and {release.to for _, release in repeated} == {A}
    assert ballots(list(serving.bench.hear(A, Ask(head=serving.chain.head), term=3)), Vote)
    assert ballots(serving.bench.wait(RELEASES * RELEASE_AGAIN_MS), Release) == []


def test_a_release_is_not_said_without_end() -> None:
    serving = Serving()
    for peer in (A, C):
        serving.ack(peer)
    before = len(serving.bench.effects)
    serving.bench.give(HandoverAsked(A))
    serving.bench.wait(10 * RELEASES * RELEASE_AGAIN_MS)
    releases = ballots(serving.bench.effects[before:], Release)
    assert [to for to, _ in releases].count(C) == RELEASES


def test_a_hand_over_waits_for_an_entry_that_is_being_sealed() -> None:
    serving = Serving()
    serving.ack(C)
    serving.ack(A)
    assert serving.bench.machine.begin_append(Term(2), serving.bench.now) is None
    serving.bench.give(HandoverAsked(None))
    assert serving.bench.role == "syncer"
    serving.chain.commits(1)
    serving.sealed()
    assert serving.bench.role == "syncer"
    serving.ack(C)
    assert serving.bench.role == "peer"


def test_a_hand_over_to_one_peer_waits_for_that_one() -> None:
    serving = Serving()
    serving.ack(C)
    serving.ack(A)
    serving.commit()
    serving.bench.give(HandoverAsked(A))
    serving.ack(C)
    assert serving.bench.role == "syncer"
    serving.ack(A)
    assert serving.bench.role == "peer"


def test_a_hand_over_to_nobody_is_refused_at_once() -> None:
    serving = Serving()
    serving.ack(C, address="")
    serving.ack(A, address="")
    effects = serving.bench.give(HandoverAsked(None))
    assert [effect.text for effect in effects if isinstance(effect, Note)] == [
        "refused: nobody heard from of late that could serve"
    ]
    assert serving.why_not() is None
    effects = serving.bench.give(HandoverAsked(D))
    assert "not heard from" in next(effect.text for effect in effects if isinstance(effect, Note))


def test_a_hand_over_that_takes_too_long_is_given_up() -> None:
    serving = Serving()
    serving.ack(C)
    serving.ack(A)
    serving.commit()
    serving.bench.give(HandoverAsked(A))
    for _ in range(HANDOVER_LEASES * LEASE_MS // 1_000):
        serving.ack(C)
        serving.bench.wait(1_000)
    assert serving.bench.role == "syncer" and serving.why_not() is None


def test_released_electors_offer_to_the_target_and_it_asks_without_delay() -> None:
    chain = Chain()
    chain.open(A, 1)
    elector, target = Bench(B, chain=chain), Bench(C, chain=chain)
    for bench in (elector, target):
        bench.wait(RULES.promise_ms)
        bench.hear(A, Append(head=chain.head, durable_seq=Seq(1), sent_at=MonoMs(1)), term=1)
        bench.hear(A, Release(to=C), term=1)
        bench.hear(A, Release(to=C), term=1)
    made = ballots([effect for effect in elector.said if isinstance(effect.ballot, Offer)][-2:], Offer)
    assert made[0][0] == C and made[0][1].free
    asked = ballots(list(target.hear(B, made[0][1], term=1)), Ask)
    assert {to for to, _ in asked} == {A, B}


def test_a_release_by_anybody_but_the_syncer_followed_frees_nobody() -> None:
    chain = Chain()
    chain.open(A, 1)
    bench = Bench(B, chain=chain)
    bench.hear(A, Append(head=chain.head, durable_seq=Seq(1), sent_at=MonoMs(1)), term=1)
    bench.hear(C, Release(to=C), term=1)
    bench.hear(A, Release(to=C), term=1, start=2)
    assert bench.machine.status(bench.now).follows == A


# ---- for people -------------------------------------------------------------------------------------------------


def test_a_syncer_knows_which_electors_are_here_and_who_could_take_over() -> None:
    serving = Serving()
    bench = serving.bench
    serving.ack(A, address="")
    serving.ack(D)
    bench.wait(2_000)
    status = bench.machine.status(bench.now)
    seen = {each.elector.peer: (each.here, each.heard_ms) for each in status.seats}
    assert seen == {A: (True, 2_000), B: (True, 0), C: (False, None)}
    assert [each.elector.peer for each in status.standbys] == [D], "A only dials out"
    bench.wait(LEASE_MS)
    status = bench.machine.status(bench.now)
    assert {each.elector.peer: each.here for each in status.seats} == {A: False, B: True, C: False}
    assert status.standbys == (), "D was not heard of for a lease"


def test_who_follows_knows_its_syncer_is_here_and_who_follows_nobody_those_who_offer() -> None:
    chain = Chain((seat(A), seat(B), seat(C)))
    chain.open(A, 1)
    bench = Bench(B, chain=chain)
    bench.hear(A, Append(head=chain.head, durable_seq=Seq(0), sent_at=MonoMs(0)), term=1)
    here = {each.elector.peer: each.here for each in bench.machine.status(bench.now).seats}
    assert here == {A: True, B: True, C: False}
    bench.wait(RULES.promise_ms)
    bench.hear(C, offer_of(C), term=1)
    bench.wait(1_000)
    status = bench.machine.status(bench.now)
    assert {each.elector.peer: (each.here, each.heard_ms) for each in status.seats} == {
        A: (False, None),
        B: (True, 0),
        C: (True, 1_000),
    }
    assert [each.elector.peer for each in status.standbys] == [B, C]
