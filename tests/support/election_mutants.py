"""The election with one rule broken at a time: what the checkers must find, and the seed that finds it.

Each takes a `pytest.MonkeyPatch` (or anything with its `setattr`) and breaks the real classes until that is undone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from geo_diloco.manifest import MonoMs, Seq, Term
from geo_diloco.protocol.election import elector as elector_module
from geo_diloco.protocol.election import lease, validity
from geo_diloco.protocol.election import service as service_module
from geo_diloco.protocol.election.ballots import Ack, Append, Rank, majority
from geo_diloco.protocol.election.books import Books, ElectionRules
from geo_diloco.protocol.election.candidacy import Candidacy
from geo_diloco.protocol.election.elector import ElectorDuty
from geo_diloco.protocol.election.forks import Forks
from geo_diloco.protocol.election.machine import Election
from geo_diloco.protocol.election.polls import Tell
from geo_diloco.protocol.election.roster import RosterPlan, next_roster
from geo_diloco.protocol.election.service import Service
from geo_diloco.protocol.election.tenure import Tenure
from geo_diloco.protocol.election.voting import Verdict, may_vote
from tests.support.election_plans import swarm_plan
from tests.support.election_run import Violation, run_election

Patch = pytest.MonkeyPatch


def votes_twice_in_a_term(patch: Patch) -> None:
    def lenient(record: Any, **facts: Any) -> Verdict:
        return may_vote(replace(record, voted_for=None), **facts)

    patch.setattr(elector_module, "may_vote", lenient)


def forgets_its_vote_on_restart(patch: Patch) -> None:
    honest = Books.__init__

    def start(self: Any, me: Any, rules: Any, record: Any, jitter: Any) -> None:
        forgetful = None if record is None else replace(record, voted_for=None, term=Term(0))
        honest(self, me, rules, forgetful, jitter)

    patch.setattr(Books, "__init__", start)


def votes_for_a_peer_whatever_its_boot(patch: Patch) -> None:
    def lenient(record: Any, *, candidate: Any, **facts: Any) -> Verdict:
        voted = record.voted_for
        if voted is not None and voted.peer == candidate.peer:
            record = replace(record, voted_for=candidate)
        return may_vote(record, candidate=candidate, **facts)

    patch.setattr(elector_module, "may_vote", lenient)


def takes_the_lease_by_the_wall_clock(patch: Patch) -> None:
    honest = Service._append_to

    def append_to(self: Any, peer: Any, now: Any) -> None:
        honest(self, peer, MonoMs(now + self._books.wall_error))

    def lease_until(self: Any, now: Any) -> Any:
        books, wall = self._books, self._books.wall_error
        if self.opened_at is None:
            return None
        confirmed = lease.confirmed_at(books.forks.roster, self._ackers, books.seat, MonoMs(now + wall))
        return None if confirmed is None else MonoMs(confirmed + books.rules.lease_ms - wall)

    patch.setattr(Service, "_append_to", append_to)
    patch.setattr(Service, "lease_until", lease_until)


def ranks_by_seq_alone(patch: Patch) -> None:
    def bare(rank: Rank) -> Rank:
        return Rank(rank.lineage, Term(0), rank.seq)

    def lenient(record: Any, *, rank: Any, **facts: Any) -> Verdict:
        return may_vote(replace(record, held=bare(record.held)), rank=bare(rank), **facts)

    def count(self: Any, now: Any) -> tuple[int, int]:
        offered = level = 0
        best = self._books.forks.best.rank.seq
        for elector in self._books.forks.best_roster:
            known = self._offers.get(elector.peer)
            if self._books.is_me(elector):
                offered, level = offered + 1, level + 1
            elif known is not None and known.offer.enrolment == elector.enrolment and self._fresh(known, now):
                offered += known.offer.free
                level += known.offer.free and known.offer.held.seq <= best
        return offered, level

    patch.setattr(elector_module, "may_vote", lenient)
    patch.setattr(Candidacy, "_count", count)
    patch.setattr(Candidacy, "_behind", lambda self, offer: offer.held.seq > self._books.forks.best.rank.seq)


def calls_older_terms_durable(patch: Patch) -> None:
    def durable(acked: Any, opened_at: Any, before: Any) -> Any:
        return acked if acked is not None and acked > before else before

    patch.setattr(lease, "durable", durable)


def acks_before_the_blob_is_there(patch: Patch) -> None:
    patch.setattr(ElectorDuty, "may_ack", lambda self: self._books.forks.head)


def asks_without_catching_up(patch: Patch) -> None:
    honest = Candidacy._count

    def count(self: Any, now: Any) -> tuple[int, int]:
        offered, _ = honest(self, now)
        return offered, offered

    patch.setattr(Candidacy, "_count", count)
    patch.setattr(Candidacy, "_behind", lambda self, offer: False)


def lets_its_chain_change_while_it_asks(patch: Patch) -> None:
    honest = Candidacy.won

    def won(self: Any) -> Any:
        votes = honest(self)
        if votes is not None:
            self.asking.head = self._books.forks.best
        return votes

    patch.setattr(Candidacy, "look_frozen", lambda self: None)
    patch.setattr(Candidacy, "won", won)
    patch.setattr(validity, "why_not_elected", lambda entry, opened, roster: None)


def resumes_its_own_term(patch: Patch) -> None:
    honest = Election._started

    def started(self: Any, event: Any, now: Any) -> None:
        honest(self, event, now)
        books = self._books
        opened = books.forks.opened(books.record.branch, books.record.term)
        if opened is not None and opened.syncer == books.me.peer.peer and books.forks.best == books.forks.head:
            self._tenure.service = Service(books, books.record.term, now)
            self._tenure.service.opened_at = Seq(0)

    patch.setattr(Election, "_started", started)


def hears_lower_terms(patch: Patch) -> None:
    honest = Election._heard

    def heard(self: Any, event: Any, now: Any) -> None:
        books = self._books
        if not isinstance(event.ballot, Append | Ack) or event.term >= books.record.term:
            honest(self, event, now)
            return
        term, place = books.record.term, len(books._effects)
        books.record = replace(books.record, term=event.term)
        try:
            honest(self, event, now)
            said = books._effects[place:]
            books._effects[place:] = [replace(e, term=event.term) if isinstance(e, Tell) else e for e in said]
        finally:
            books.record = replace(books.record, term=max(term, books.record.term))

    patch.setattr(Election, "_heard", heard)
    patch.setattr(Books, "_outlived", lambda self, effect: False)


def _two_at_once(facts: Any) -> RosterPlan:
    plan = next_roster(facts)
    if plan.roster is None:
        return plan
    again = next_roster(replace(facts, roster=plan.roster))
    return again if again.roster is not None else plan


def changes_the_roster_by_two(patch: Patch) -> None:
    patch.setattr(service_module, "next_roster", _two_at_once)
    patch.setattr(validity, "why_not_next_roster", lambda old, new, syncer: None)


def changes_the_roster_before_open_is_durable(patch: Patch) -> None:
    def why_not(self: Any, now: Any) -> str | None:
        return None if self.opened_at is not None else "not open yet"

    honest = Service._standbys

    def standbys(self: Any, now: Any) -> Any:
        known = [acker.elector for acker in self._ackers.values()]
        return honest(self, now) or tuple(sorted(known, key=lambda elector: elector.peer))

    patch.setattr(Service, "why_not_roster", why_not)
    patch.setattr(Service, "_standbys", standbys)


def does_not_wait_at_start(patch: Patch) -> None:
    patch.setattr(ElectorDuty, "bind_at_start", lambda self, now: None)


def calls_durable_what_a_minority_has(patch: Patch) -> None:
    def acked(roster: Any, ackers: Any, me: Any, own: Any) -> Any:
        reached = [own if acker is None else acker.acked for acker in lease.seated(roster, ackers, me)]
        needed = max(1, majority(len(roster)) - 1)
        return Seq(sorted(reached, reverse=True)[needed - 1]) if len(reached) >= needed else None

    patch.setattr(lease, "acked_by_majority", acked)


def consumes_work_twice(patch: Patch) -> None:
    patch.setattr(Forks, "why_not_use", lambda self, use, on=None: None)


# ---- beyond the list ---------------------------------------------------------------------------------------------


def breaks_its_promise(patch: Patch) -> None:
    def lenient(record: Any, *, promise: Any, **facts: Any) -> Verdict:
        return may_vote(record, promise=None, **facts)

    patch.setattr(elector_module, "may_vote", lenient)
    patch.setattr(ElectorDuty, "bound", lambda self, now: None)


def speaks_before_the_disk(patch: Patch) -> None:
    honest = Books.flush

    def flush(self: Any) -> Any:
        self._written = 10**9
        return honest(self)

    patch.setattr(Books, "flush", flush)


def promises_less_than_the_lease(patch: Patch) -> None:
    patch.setattr(ElectionRules, "promise_ms", property(lambda self: self.lease_ms * 8 // 10))


def lets_held_sink(patch: Patch) -> None:
    def note_held(self: Any) -> None:
        self._change(replace(self.record, held=self.forks.best.rank))

    patch.setattr(Books, "note_held", note_held)


def appends_after_the_hand_over(patch: Patch) -> None:
    honest = Service.release

    def release(self: Any, to: Any, now: Any) -> None:
        honest(self, to, now)
        self._handover_until = None

    def hand_over(self: Any, now: Any) -> None:
        service = self.service
        to = None if service is None else service.released_to(now)
        if to is not None:
            service.release(to, now)

    patch.setattr(Service, "release", release)
    patch.setattr(Tenure, "hand_over", hand_over)


def counts_an_elector_without_its_disk(patch: Patch) -> None:
    def seated(roster: Any, ackers: Any, me: Any) -> Any:
        return [None if e.peer == me.peer else ackers[e.peer] for e in roster if e.peer in ackers or e.peer == me.peer]

    patch.setattr(lease, "seated", seated)


def serves_on_in_the_branch_it_left(patch: Patch) -> None:
    honest = Tenure.learn_terms

    def learn_terms(self: Any, now: Any) -> None:
        if self.service is None:
            honest(self, now)

    patch.setattr(Tenure, "learn_terms", learn_terms)
    patch.setattr(Election, "check_invariants", lambda self: None)


def stays_in_the_branch_it_can_not_leave_by_entries(patch: Patch) -> None:
    patch.setattr(Tenure, "part", lambda self, reform, now: None)


@dataclass(frozen=True)
class Mutant:
    """A broken rule, the first seed of `swarm_plan` that finds it, and by which checks (a regular expression)."""

    mutate: Callable[[Patch], None]
    seed: int
    finds: str

    @property
    def name(self) -> str:
        return self.mutate.__name__


MUTANTS: tuple[Mutant, ...] = (
    Mutant(votes_twice_in_a_term, 2, "I0"),
    Mutant(forgets_its_vote_on_restart, 2, "I5"),
    Mutant(votes_for_a_peer_whatever_its_boot, 12, "I0"),
    Mutant(takes_the_lease_by_the_wall_clock, 22, "I8"),
    Mutant(ranks_by_seq_alone, 103, "I3"),
    Mutant(calls_older_terms_durable, 3, "R15"),
    Mutant(acks_before_the_blob_is_there, 0, "R0|I6"),
    Mutant(asks_without_catching_up, 67, "I9"),
    Mutant(lets_its_chain_change_while_it_asks, 59, "I12"),
    Mutant(resumes_its_own_term, 0, "I1|ALARM"),
    Mutant(hears_lower_terms, 2, "R4|I8"),
    Mutant(changes_the_roster_by_two, 3, "R21"),
    Mutant(changes_the_roster_before_open_is_durable, 1, "R21"),
    Mutant(does_not_wait_at_start, 14, "I8"),
    Mutant(calls_durable_what_a_minority_has, 0, "I6"),
    Mutant(consumes_work_twice, 0, "I11"),
    Mutant(breaks_its_promise, 6, "I8"),
    Mutant(speaks_before_the_disk, 0, "R0"),
    Mutant(promises_less_than_the_lease, 175, "I8"),
    Mutant(lets_held_sink, 0, "I5"),
    Mutant(appends_after_the_hand_over, 11, "I7"),
    Mutant(counts_an_elector_without_its_disk, 21, "I6"),
    Mutant(serves_on_in_the_branch_it_left, 88, "I10"),
    Mutant(stays_in_the_branch_it_can_not_leave_by_entries, 81, "I10"),
)


def found_by(mutant: Mutant, seed: int) -> str | None:
    """What that seed's run finds with the rule broken; none if nothing."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.mutate(patch)
        try:
            run_election(swarm_plan(seed))
        except Violation as violation:
            return violation.what
    return None


def search(num_seeds: int) -> dict[str, int | None]:
    """The first seed that finds each, by the checks it is meant for."""
    found: dict[str, int | None] = {}
    for mutant in MUTANTS:
        hits = (seed for seed in range(num_seeds) if re.search(mutant.finds, found_by(mutant, seed) or ""))
        found[mutant.name] = next(hits, None)
        print(f"{mutant.name}: {found[mutant.name]}", flush=True)
    return found
