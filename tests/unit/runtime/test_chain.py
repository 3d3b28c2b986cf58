"""The log of the chain, what counts in it, and the proof of who serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from geo_diloco.errors import LocalProtocolError, RemoteProtocolError, RunDirError
from geo_diloco.manifest import BootId, BranchId, Digest, MonoMs, RunId, Seq, Term
from geo_diloco.protocol.amendments import UNSTRETCHED, Amended, AmendmentOrder, Changes
from geo_diloco.protocol.election.ballots import Append, Elector, Head, PeerBoot, Rank, SignedVote, Vote
from geo_diloco.protocol.messages import (
    BlobRef,
    EntryHeader,
    Envelope,
    Found,
    Message,
    Open,
    Record,
    Reform,
    RosterChange,
)
from geo_diloco.runtime.chain import ChainCopy, counting_chain
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.proof import check_entry, check_snapshot, read_proof
from geo_diloco.runtime.store import ChainStore
from geo_diloco.runtime.wire import Signed, open_entry, seal_amendment, seal_entry, seal_envelope, seal_snapshot

from .samples import BOOT, D1, D2, RUN, commit, snapshot

EVERYBODY = FOUNDER, SECOND, THIRD, LIAR, OTHER = tuple(Identity.generate() for _ in range(5))
BOOTS = {identity.peer_id: BootId(f"{number:016x}") for number, identity in enumerate(EVERYBODY)}


def seat(identity: Identity) -> Elector:
    return Elector(identity.peer_id, "ab", "machine", "127.0.0.1:1")


class Chain:
    """Entries that follow each other, each signed by whom the test says."""

    def __init__(self) -> None:
        self.entries: list[Signed] = []
        self.branch = BranchId("")

    def header(self, term: int) -> EntryHeader:
        prev = self.entries[-1].digest if self.entries else ""
        return EntryHeader(run=RUN, branch=self.branch, term=Term(term), seq=Seq(len(self.entries)), prev=prev)  # type: ignore[arg-type]

    def add(self, entry: Found | Open | RosterChange | Record | Reform, by: Identity) -> Chain:
        self.entries.append(seal_entry(entry, by))
        self.branch = self.branch or BranchId(self.entries[0].digest)
        return self

    def found(self, by: Identity = FOUNDER) -> Chain:
        found = Found(
            header=self.header(1),
            boot=BOOTS[by.peer_id],
            state_digests=(D1,),
            momentum_digests=(D2,),
            layout_digest=D1,
            num_elements=(1,),
            roster=(seat(by),),
        )
        return self.add(found, by)

    def open(self, term: int, by: Identity, voters: tuple[Identity, ...]) -> Chain:
        head = self.entries[-1].digest
        votes = tuple(self.vote(term, by, head, voter) for voter in voters)
        opened = Open(header=self.header(term), syncer=by.peer_id, boot=BOOTS[by.peer_id], address="a:1", votes=votes)
        return self.add(opened, by)

    def vote(self, term: int, candidate: Identity, head: Digest, voter: Identity) -> SignedVote:
        whom = PeerBoot(candidate.peer_id, BOOTS[candidate.peer_id])
        said = Vote(candidate=whom, head=head, enrolment="ab")
        return SignedVote(voter.peer_id, "ab", Term(term), whom, head, self.envelope(term, voter, candidate, said))

    def envelope(self, term: int, sender: Identity, to: Identity, message: Message) -> str:
        made = Envelope(
            run=RUN,
            branch=self.branch,
            term=Term(term),
            boot=BOOTS[sender.peer_id],
            sender=sender.peer_id,
            to=to.peer_id,
            nonce="n",
            number=1,
            message=message,
        )
        return seal_envelope(made, sender)

    def roster(self, term: int, by: Identity, *electors: Identity) -> Chain:
        change = RosterChange(header=self.header(term), roster=tuple(seat(each) for each in electors))
        return self.add(change, by)

    def record(self, term: int, by: Identity) -> Chain:
        return self.add(Record(header=self.header(term), measured_seq=Seq(0), heldout_loss=1.0), by)


def handed_over() -> Chain:
    """The founder takes two more electors, and the second is elected by itself and the third."""
    chain = Chain().found().open(1, FOUNDER, (FOUNDER,)).roster(1, FOUNDER, FOUNDER, SECOND, THIRD)
    return chain.open(2, SECOND, (SECOND, THIRD))


def reformed(lineage: int = 1, by: Identity | None = None, *electors: Identity) -> Chain:
    """After `handed_over` the founder goes on with the third alone, which is elected again."""
    chain = handed_over()
    roster = tuple(seat(each) for each in electors or (THIRD,))
    chain.add(Reform(header=chain.header(1), lineage=lineage, roster=roster), by or FOUNDER)
    chain.branch = BranchId(chain.entries[-1].digest)
    return chain.open(2, THIRD, (THIRD,))


def proof(chain: Chain) -> list[Signed]:
    return [signed for signed in chain.entries if open_entry(signed).kind in ("found", "open", "roster", "reform")]


# ---- proof


def test_a_proof_shows_who_was_made_syncer_by_whom() -> None:
    authority = read_proof(proof(handed_over().record(2, SECOND)), run=RUN, founder=FOUNDER.peer_id)
    assert authority.term == 2 and authority.opened[Term(2)].syncer == SECOND.peer_id
    assert authority.roster_at(Seq(1)) == (0, (seat(FOUNDER),))
    assert authority.roster_at(Seq(3)) == (2, (seat(FOUNDER), seat(SECOND), seat(THIRD)))


def test_a_proof_goes_on_in_the_branch_that_the_owner_reformed() -> None:
    chain = reformed()
    authority = read_proof(proof(chain), run=RUN, founder=FOUNDER.peer_id)
    assert (authority.lineage, authority.branch, authority.term) == (1, chain.branch, 2)
    assert {term: opened.syncer for term, opened in authority.opened.items()} == {2: THIRD.peer_id}
    seq, roster = authority.roster_at(Seq(5))
    honest = replace(
        snapshot(),
        branch=chain.branch,
        lineage=1,
        term=Term(2),
        seq=Seq(5),
        roster=roster,
        roster_seq=seq,
        opened=authority.opened[Term(2)],
    )
    check_snapshot(seal_snapshot(honest, THIRD), honest, authority)
    for lie in (replace(honest, lineage=0), replace(honest, branch=handed_over().branch)):
        with pytest.raises(RemoteProtocolError):
            check_snapshot(seal_snapshot(lie, THIRD), lie, authority)


def test_what_counts_of_a_log_is_the_branch_of_the_latest_reform() -> None:
    chain = reformed()
    longer = handed_over().record(2, SECOND).record(2, SECOND).record(2, SECOND)
    log = {signed.digest: open_entry(signed) for signed in (*longer.entries, *chain.entries)}
    assert [digest for digest, _ in counting_chain(log.items())] == [signed.digest for signed in chain.entries]


def test_an_entry_is_of_this_run_if_whoever_served_its_term_signed_it() -> None:
    chain = handed_over().record(2, SECOND)
    authority = read_proof(proof(chain), run=RUN, founder=FOUNDER.peer_id)
    assert authority.seq == 3
    for signed in (chain.entries[0], chain.entries[1], chain.entries[-1]):
        check_entry(signed, open_entry(signed), authority)
    lies = (
        handed_over().record(2, LIAR),
        handed_over().record(2, FOUNDER),
        handed_over().record(3, LIAR),
        Chain().found(LIAR),
        reformed(1, LIAR),
    )
    for lie in (*(each.entries[-1] for each in lies), reformed().entries[4]):
        with pytest.raises(RemoteProtocolError, match="not proven"):
            check_entry(lie, open_entry(lie), authority)
    later = reformed()
    authority = read_proof(proof(later), run=RUN, founder=FOUNDER.peer_id)
    for signed in later.entries[4:]:
        check_entry(signed, open_entry(signed), authority)
    with pytest.raises(RemoteProtocolError, match="did not sign"):
        check_entry(chain.entries[-1], open_entry(chain.entries[-1]), authority)


WRONG: dict[str, Callable[[], list[Signed]]] = {
    "nothing": lambda: [],
    "a reform by a syncer": lambda: reformed(1, SECOND).entries,
    "a reform of no number": lambda: reformed(0).entries,
    "votes of who is elector no more": lambda: reformed(1, FOUNDER, SECOND).entries,
    "another founder": lambda: Chain().found(LIAR).entries,
    "a minority": lambda: handed_over().open(3, LIAR, (SECOND,)).entries,
    "votes of strangers": lambda: handed_over().open(3, LIAR, (LIAR, OTHER)).entries,
    "a term twice": lambda: handed_over().open(2, THIRD, (FOUNDER, THIRD)).entries,
    "a roster by another": lambda: handed_over().roster(2, LIAR, LIAR).entries,
    "a roster of a leap": lambda: handed_over().roster(2, SECOND, SECOND).entries,
    "out of order": lambda: [handed_over().entries[0], *handed_over().entries[2:]],
    "not of a proof": lambda: handed_over().record(2, SECOND).entries,
    "the end first": lambda: list(reversed(handed_over().entries)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_proven_is_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError):
        read_proof(WRONG[name](), run=RUN, founder=FOUNDER.peer_id)


def test_a_proof_of_another_run_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="of this run"):
        read_proof(handed_over().entries, run=RunId("9" * 40), founder=FOUNDER.peer_id)


def test_a_snapshot_is_believed_if_the_syncer_of_its_term_signed_it() -> None:
    chain = handed_over()
    authority = read_proof(chain.entries, run=RUN, founder=FOUNDER.peer_id)
    seq, roster = authority.roster_at(Seq(3))
    honest = replace(
        snapshot(),
        branch=chain.branch,
        term=Term(2),
        roster=roster,
        roster_seq=seq,
        opened=authority.opened[Term(2)],
    )
    check_snapshot(seal_snapshot(honest, SECOND), honest, authority)
    for lie, signer in (
        (honest, FOUNDER),
        (replace(honest, term=Term(3)), SECOND),
        (replace(honest, term=Term(1)), SECOND),
        (replace(honest, branch=BranchId("9" * 64)), SECOND),
        (replace(honest, roster=roster[:1]), SECOND),
        (replace(honest, opened=authority.opened[Term(1)]), SECOND),
        (replace(honest, theta=()), SECOND),
    ):
        with pytest.raises(RemoteProtocolError):
            check_snapshot(seal_snapshot(lie, signer), lie, authority)


def test_a_snapshot_shows_the_owners_amendments_and_no_others() -> None:
    chain = handed_over()
    authority = read_proof(chain.entries, run=RUN, founder=FOUNDER.peer_id)
    seq, roster = authority.roster_at(Seq(3))
    plain = replace(
        snapshot(),
        branch=chain.branch,
        term=Term(2),
        roster=roster,
        roster_seq=seq,
        opened=authority.opened[Term(2)],
    )
    first, second = amended(FOUNDER, 1, chain.branch), amended(FOUNDER, 2, chain.branch)
    honest = replace(plain, amended=(first, second))
    check_snapshot(seal_snapshot(honest, SECOND), honest, authority)
    for lie in ((amended(SECOND, 1, chain.branch),), (second, first), (first, first), (replace(first, seq=Seq(9)),)):
        shown = replace(plain, amended=lie)
        with pytest.raises(RemoteProtocolError, match="did not order"):
            check_snapshot(seal_snapshot(shown, SECOND), shown, authority)


def amended(owner: Identity, number: int, branch: BranchId) -> Amended:
    changes = Changes(quorum=number)
    order = AmendmentOrder(run=RUN, branch=branch, number=number, changes=changes)
    return Amended(
        seq=Seq(number),
        branch=branch,
        owner=owner.peer_id,
        number=number,
        changes=changes,
        stretch=UNSTRETCHED,
        order=seal_amendment(order, owner),
    )


# ---- votes in `open`


def test_a_vote_that_its_elector_did_not_give_is_refused() -> None:
    chain = handed_over()
    opened = open_entry(chain.entries[-1])
    assert isinstance(opened, Open)
    head = chain.entries[-2].digest
    vote = chain.vote(2, SECOND, head, THIRD)
    heartbeat = Append(head=Head(Rank(0, Term(2), Seq(2)), head), durable_seq=Seq(2), sent_at=MonoMs(1))
    for forged in (
        replace(vote, evidence=""),
        replace(vote, evidence="{}"),
        replace(vote, elector=FOUNDER.peer_id),
        replace(vote, term=Term(3)),
        replace(vote, head=D1),
        replace(vote, enrolment="cd"),
        replace(vote, candidate=PeerBoot(SECOND.peer_id, BOOT)),
        replace(vote, evidence=chain.envelope(2, THIRD, SECOND, heartbeat)),
    ):
        with pytest.raises(RemoteProtocolError):
            open_entry(seal_entry(replace(opened, votes=(forged,)), SECOND))
    own = replace(chain.vote(2, SECOND, head, SECOND), evidence="")
    assert open_entry(seal_entry(replace(opened, votes=(own, vote)), SECOND))
    with pytest.raises(RemoteProtocolError, match="8 votes"):
        open_entry(seal_entry(replace(opened, votes=(vote,) * 8), SECOND))


# ---- the log


def test_of_a_log_with_forks_the_path_to_the_highest_term_counts() -> None:
    common = handed_over()
    longer = Chain()
    longer.entries, longer.branch = list(common.entries), common.branch
    longer.record(2, SECOND).record(2, SECOND).record(2, SECOND)
    newer = Chain()
    newer.entries, newer.branch = list(common.entries), common.branch
    newer.open(3, THIRD, (THIRD, FOUNDER))
    log = [*longer.entries, newer.entries[-1]]
    counted = counting_chain((signed.digest, open_entry(signed)) for signed in log)
    assert [digest for digest, _ in counted] == [signed.digest for signed in newer.entries]
    assert counting_chain([]) == []


def test_what_is_kept_is_found_at_once_and_on_disk_when_written(tmp_path: Path) -> None:
    entries = handed_over().entries

    async def scenario() -> None:
        chain = ChainCopy(ChainStore(tmp_path / "chain.jsonl"), run=RUN)
        for signed in entries:
            chain.arrives(signed, chain.verify(signed))
            assert not chain.knows(signed.digest)
            assert chain.take(signed.digest) and not chain.take(signed.digest)
            assert chain.signed(signed.digest) == signed and not chain.is_written(signed.digest)
            await chain.write(signed.digest, sync=True)
            assert chain.is_written(signed.digest)
        with pytest.raises(LocalProtocolError):
            chain.take(D1)
        chain.close()

    asyncio.run(scenario())
    again = ChainCopy(ChainStore(tmp_path / "chain.jsonl"), run=RUN)
    assert [signed for signed, _ in again.load()] == entries
    again.close()
    other = ChainCopy(ChainStore(tmp_path / "chain.jsonl"), run=RunId("9" * 40))
    with pytest.raises(RunDirError, match="can't be used"):
        other.load()
    other.close()


def test_what_memory_let_go_of_is_read_from_the_disk_and_never_taken_twice(tmp_path: Path) -> None:
    entries = handed_over().entries
    path = tmp_path / "chain.jsonl"

    async def scenario() -> None:
        chain = ChainCopy(ChainStore(path), run=RUN)
        for signed in entries:
            await chain.append(signed, chain.verify(signed))
        pending = handed_over().record(2, SECOND).entries[-1]
        chain.arrives(pending, chain.verify(pending))
        chain.take(pending.digest)
        chain.let_go([signed.digest for signed in [*entries[:3], pending]], [])
        assert [signed for signed, _ in chain.entries()] == [entries[3], pending], "what is not written yet stays"
        assert chain.num_entries == len(entries) + 1
        for signed in entries:
            assert chain.knows(signed.digest) and not chain.take(signed.digest) and chain.is_written(signed.digest)
            assert chain.signed(signed.digest) == signed and chain.entry(signed.digest) == open_entry(signed)
        text = path.read_bytes()
        path.write_bytes(text.replace(b'"kind', b'"kinb', 1))
        assert chain.signed(entries[0].digest) is None and chain.entry(entries[0].digest) is None
        path.write_bytes(text[:10])
        assert chain.signed(entries[1].digest) is None, "a disk that lost it does not end anybody"
        chain.close()

    asyncio.run(scenario())


def test_of_updates_the_needed_and_the_newest_that_fit_are_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        chain = ChainCopy(ChainStore(tmp_path / "chain.jsonl"), run=RUN)
        updates = [BlobRef(Digest(f"{seq:064x}"), 100) for seq in range(6)]
        for seq, update in enumerate(updates):
            made = commit(FOUNDER.peer_id, header=replace(Chain().header(1), seq=Seq(seq)), update=update)
            await chain.append(seal_entry(made, FOUNDER), made)
        assert chain.newest_updates(0, after=Seq(3)) == {updates[4].digest, updates[5].digest}
        assert chain.newest_updates(350, after=Seq(4)) == {each.digest for each in updates[3:]}
        assert chain.newest_updates(10_000, after=Seq(99)) == {each.digest for each in updates}
        chain.let_go([], updates[:5])
        assert list(chain.updates) == [updates[5].digest]
        chain.close()

    asyncio.run(scenario())
