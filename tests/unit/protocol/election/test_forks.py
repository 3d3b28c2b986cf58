"""The tree of entries and its two ends (rules 1, 3, 5, 26, 27)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import Digest, FragmentId, Seq, Term
from geo_diloco.protocol.election.ballots import NO_HEAD, Head, Rank, Root, Use
from geo_diloco.protocol.election.forks import SENT_MAX, Forks
from tests.support.election_parts import OWNER, THREE, A, B, C, Chain, boot


def tree(chain: Chain, *, stored: bool = True) -> Forks:
    forks = Forks(OWNER)
    taken = forks.take(chain.facts())
    assert taken.why_not is None, taken
    for entry in chain.entries if stored else ():
        forks.stored(entry.digest)
    forks.check_invariants()
    return forks


def served(*, num_commits: int = 3) -> Chain:
    chain = Chain()
    chain.open(A, 1)
    chain.commits(num_commits)
    return chain


def use(base: Digest, fragment: int = 0) -> Use:
    return Use(B, FragmentId(fragment), base)


# ---- two ends ---------------------------------------------------------------------------------------------------


def test_the_head_is_the_highest_entry_known_the_best_the_highest_with_all_bytes() -> None:
    chain = served()
    forks = tree(chain, stored=False)
    assert (forks.head, forks.best) == (chain.head, NO_HEAD)
    for entry in chain.entries[:3]:
        forks.stored(entry.digest)
    assert (forks.best.rank.seq, forks.whole.rank.seq) == (2, 2)


def test_an_entry_counts_as_whole_only_with_all_before_it() -> None:
    chain = served()
    forks = tree(chain, stored=False)
    for entry in (chain.entries[0], chain.entries[2], chain.entries[3]):
        forks.stored(entry.digest)
    assert forks.whole.rank.seq == 0
    forks.stored(chain.entries[1].digest)
    assert forks.whole.rank.seq == 3


def test_a_chain_of_a_later_term_wins_over_a_longer_one() -> None:
    old = served(num_commits=9)
    new = Chain()
    new.open(A, 1)
    new.open(B, 2)
    forks = tree(old)
    taken = forks.take(new.facts())
    assert (taken.fork, forks.head) == (1, new.head)
    assert forks.best == old.head, "its bytes are still the best there are here"
    assert forks.whole.rank.seq == 1, "nothing off the chain may be acked"


def test_a_chain_of_lower_rank_is_kept_and_moves_nothing() -> None:
    new = Chain()
    new.open(A, 1)
    old = new.fork()
    new.open(B, 2)
    old.commits(5)
    forks = tree(new)
    taken = forks.take(old.facts())
    assert (taken.fork, forks.head, len(taken.new)) == (None, new.head, 5)


def test_a_repeated_entry_changes_nothing() -> None:
    chain = served()
    assert tree(chain).take(chain.facts()).new == ()


def test_lost_bytes_take_along_what_builds_on_them_until_they_are_back() -> None:
    chain = served()
    forks = tree(chain)
    forks.lost(chain.entries[2].digest)
    assert (forks.best.rank.seq, forks.whole.rank.seq, forks.head) == (1, 1, chain.head)
    forks.stored(chain.entries[2].digest)
    assert forks.best == chain.head


# ---- entries that are refused -------------------------------------------------------------------------------------


def test_an_entry_without_those_before_it_is_a_gap() -> None:
    chain = served()
    taken = Forks(OWNER).take(chain.facts()[1:])
    assert (taken.new, taken.gap, taken.why_not) == ((), True, "entry 1 continues what is not known here")


def test_a_refused_entry_takes_along_only_what_builds_on_it() -> None:
    bad, good = served(num_commits=0), served(num_commits=0)
    bad.add("commit", signer=C)
    bad.commits(1)
    good.commits(2)
    taken = Forks(OWNER).take((*bad.facts(), *good.facts()))
    assert [entry.seq for entry in taken.new] == [0, 1, 2, 3]
    assert taken.why_not == "entry 2 is not signed by the syncer of term 1" and not taken.gap


def test_only_the_founder_founds_and_only_once() -> None:
    stranger = Chain(owner=B)
    assert Forks(OWNER).take(stranger.facts()).why_not is not None
    again = Chain(THREE[:1])
    assert tree(Chain()).take(again.facts()).why_not == "found is the first entry, by the founder"


def test_two_entries_of_one_place_are_an_alarm_and_neither_is_acked() -> None:
    one = served(num_commits=1)
    other = one.fork()
    one.commits(1)
    other.add("commit", uses=(use(other.entries[1].digest),))
    forks = tree(one)
    taken = forks.take(other.facts())
    assert taken.why_not == "ALARM: two entries of term 1, seq 3"
    assert forks.whole.rank.seq == 2
    forks.stored(one.entries[3].digest)
    assert forks.whole.rank.seq == 2, "nor when its bytes come once more"


def test_a_strangers_entry_does_no_harm_to_the_honest_one_in_its_place() -> None:
    chain = served(num_commits=1)
    forged = chain.fork()
    chain.commits(1)
    forged.add("commit", signer=C)
    forks = tree(chain)
    assert "signed" in (forks.take(forged.facts()).why_not or "")
    assert forks.whole == chain.head


def test_asking_whether_an_entry_is_valid_changes_nothing() -> None:
    one = served(num_commits=0)
    other = one.fork()
    one.commits(1)
    other.add("commit", uses=(use(other.entries[1].digest),))
    forks = tree(one)
    assert forks.why_not(other.entries[-1]) == "ALARM: two entries of term 1, seq 2"
    assert forks.whole == one.head


def test_a_term_is_opened_once() -> None:
    one, other = Chain(), Chain()
    one.open(A, 2)
    other.open(B, 2, voters=THREE[1:])
    assert (tree(one).take(other.facts()).why_not or "").startswith("ALARM: term 2 was opened by")


def test_two_reforms_of_one_number_are_an_alarm() -> None:
    one = served()
    other = one.fork()
    for chain, roster in ((one, THREE[:1]), (other, THREE[1:2])):
        chain.add("reform", branch="", term=Term(1), signer=OWNER, roster=roster, lineage=1)
    assert tree(one).take(other.facts()).why_not == "ALARM: two reforms of number 1"


# ---- work once --------------------------------------------------------------------------------------------------


def test_work_is_consumed_once_along_a_chain() -> None:
    chain = served(num_commits=0)
    mine = use(chain.entries[1].digest)
    again = chain.fork()
    chain.add("commit", uses=(mine,))
    forks = tree(chain)
    assert forks.why_not_use(mine) == f"work of {B[:8]} on fragment 0 is consumed already"
    assert forks.why_not_use(use(chain.entries[1].digest, fragment=1)) is None
    assert forks.why_not_use(use(chain.entries[2].digest)) is None
    chain.add("commit", uses=(mine,))
    assert forks.take(chain.facts()).why_not is not None
    again.add("commit", uses=(mine, mine))
    assert Forks(OWNER).take(again.facts()).why_not == "entry 2 consumes the same work twice"


def test_work_consumed_off_the_chain_may_be_consumed_on_it() -> None:
    lost = served(num_commits=0)
    mine = use(lost.entries[1].digest)
    kept = lost.fork()
    lost.add("commit", uses=(mine,))
    kept.open(B, 2)
    forks = tree(lost)
    assert forks.why_not_use(mine) is not None
    forks.take(kept.facts())
    assert forks.why_not_use(mine) is None
    assert forks.why_not_use(mine, lost.head.digest) is not None, "off the chain it is consumed still"


def test_work_on_a_base_off_the_chain_is_refused() -> None:
    lost = served(num_commits=0)
    kept = lost.fork()
    lost.commits(1)
    kept.open(B, 2)
    forks = tree(lost)
    forks.take(kept.facts())
    assert forks.why_not_use(use(lost.head.digest)) == f"base {lost.head.digest[:12]} is off the chain"
    assert forks.why_not_use(use(lost.head.digest), lost.head.digest) is None
    assert forks.why_not_use(use(Digest("nowhere"))) is not None


# ---- beginning late and forgetting ----------------------------------------------------------------------------------


def planted(chain: Chain, at: int) -> Forks:
    entry = chain.entries[at]
    opened = next(each.opened for each in reversed(chain.entries[: at + 1]) if each.opened is not None)
    forks = Forks(OWNER)
    forks.plant(
        Root(
            head=Head(Rank(0, entry.term, entry.seq), entry.digest),
            branch=chain.branch,
            roster=THREE,
            roster_seq=Seq(0),
            opened=opened,
        )
    )
    return forks


def test_a_chain_that_begins_at_a_snapshot_goes_on_from_there() -> None:
    chain = served(num_commits=5)
    forks = planted(chain, 3)
    assert forks.best.rank.seq == 3
    taken = forks.take(chain.facts()[4:])
    assert taken.why_not is None and forks.head == chain.head and forks.roster == THREE
    assert forks.branch == chain.branch and forks.roster_seq == 0


def test_bases_before_the_snapshot_are_believed_in_others_entries_and_never_consumed_by_us() -> None:
    chain = served(num_commits=3)
    old = use(chain.entries[1].digest)
    forks = planted(chain, 3)
    chain.add("commit", uses=(old,))
    assert forks.take(chain.facts()[4:]).why_not is None
    assert forks.why_not_use(use(chain.entries[2].digest)) is not None


def test_the_snapshots_own_entry_is_not_sent_on() -> None:
    chain = served(num_commits=4)
    forks = planted(chain, 3)
    forks.take(chain.facts()[4:])
    assert forks.after(()) == tuple(entry.digest for entry in chain.entries[4:])


def test_forgetting_drops_what_is_old_and_what_forked_off_before() -> None:
    chain = served(num_commits=6)
    dead = chain.fork()
    dead.entries = dead.entries[:3]
    dead.open(C, 2, voters=THREE[1:])
    chain.open(B, 3)
    forks = tree(chain)
    forks.take(dead.facts())
    dropped = forks.forget(Seq(5))
    assert set(dropped) == {entry.digest for entry in (*chain.entries[:5], dead.entries[-1])}
    assert forks.best == forks.head == chain.head
    forks.check_invariants()
    chain.commits(1)
    assert forks.take(chain.facts()[5:]).why_not is None and forks.head == chain.head
    assert forks.forget(Seq(2)) == (), "it is forgotten already"


def test_what_is_not_whole_is_not_forgotten() -> None:
    chain = served(num_commits=6)
    assert tree(chain, stored=False).forget(Seq(5)) == ()


def reformed() -> tuple[Chain, Chain]:
    """A chain and a reform of it, with entries on both sides."""
    old = served(num_commits=4)
    new = old.fork()
    new.entries = new.entries[:4]
    new.add("reform", branch="", term=Term(1), signer=OWNER, roster=THREE, lineage=1)
    new.branch, new.lineage = new.entries[-1].digest, 1  # type: ignore[assignment]
    new.open(B, 2)
    new.commits(6)
    return old, new


def test_a_reform_wins_over_any_term_of_an_earlier_branch() -> None:
    old, new = reformed()
    old.open(C, 77)
    forks = tree(old)
    assert forks.take(new.facts()).fork == 3
    assert forks.head == new.head and forks.head.rank.lineage == 1


def test_what_is_forgotten_is_still_told_to_who_lacks_it() -> None:
    chain = served(num_commits=9)
    forks = tree(chain)
    assert forks.forget(Seq(4)) and forks.forget(Seq(7))
    digests = [entry.digest for entry in chain.entries]
    assert [forks.digest_at(Seq(seq)) for seq in range(-1, 12)] == [None, *digests, None]
    for known in range(len(digests)):
        point = Head(Rank(0, chain.facts()[known].term, Seq(known)), digests[known])
        assert forks.after((point,)) == tuple(digests[known + 1 :])
        assert forks.on_chain(point), "an elector that is far behind acks all the same"
    assert forks.after(()) == tuple(digests)
    assert not forks.on_chain(Head(Rank(0, Term(1), Seq(3)), Digest("f" * 64)))


def test_a_tree_that_began_late_forgets_and_tells_what_it_has() -> None:
    chain = served(num_commits=9)
    forks = planted(chain, 3)
    forks.take(chain.facts()[4:])
    for entry in chain.entries[4:]:
        forks.stored(entry.digest)
    digests = [entry.digest for entry in chain.entries]
    assert forks.forget(Seq(7)) == tuple(digests[3:7])
    assert [forks.digest_at(Seq(seq)) for seq in (3, 4, 6, 7)] == [None, digests[4], digests[6], digests[7]]
    assert forks.after(()) == tuple(digests[4:]), "but for the snapshot's own entry"


def test_a_forgotten_reform_is_still_shown_to_who_can_not_be_fitted_on() -> None:
    old, new = reformed()
    forks = planted(old, 3)
    forks.take(new.facts()[4:])
    for entry in new.entries[4:]:
        forks.stored(entry.digest)
    dropped = forks.forget(Seq(8))
    assert new.entries[4].digest not in dropped, "its bytes are needed on"
    assert forks.after(())[0] == new.entries[4].digest
    assert new.entries[4].digest not in forks.after((Head(Rank(1, Term(2), Seq(8)), new.entries[8].digest),))
    other = tree(old)
    other.forget(Seq(5))
    taken = other.take((new.entries[4], *new.facts()[8:]))
    assert (taken.parted, taken.gap) == (new.entries[4], True)


def test_a_reform_is_shown_first_to_who_continues_nothing_that_we_have() -> None:
    """Or a long chain would never get as far as that."""
    _, new = reformed()
    forks, stranger = tree(new), Head(Rank(0, Term(1), Seq(2)), Digest("f" * 64))
    digests = [entry.digest for entry in new.entries]
    assert forks.after((stranger,)) == (digests[4], *digests[:4], *digests[5:])
    assert forks.after(()) == tuple(digests), "who has nothing yet takes all in order"


def test_a_strangers_reform_parts_nobody() -> None:
    old, new = reformed()
    other = tree(old)
    other.forget(Seq(5))
    assert other.take((replace(new.entries[4], signer=C),)).parted is None


def test_nothing_is_whole_without_a_snapshot_of_the_chain_until_there_is_one() -> None:
    chain = served(num_commits=6)
    forks = tree(chain)
    forks.based_on(chain.entries[3].digest)
    forks.unfounded()
    assert (forks.best, forks.whole) == (NO_HEAD, NO_HEAD)
    chain.commits(1)
    forks.take(chain.facts()[-1:])
    forks.stored(chain.entries[-1].digest)
    assert forks.whole == NO_HEAD
    forks.based_on(chain.entries[5].digest)
    assert forks.best == forks.whole == chain.head, "what is stored after it counts again"


# ---- finding each other ----------------------------------------------------------------------------------------


@given(common=st.integers(0, 40), ours=st.integers(0, 40), theirs=st.integers(0, 40))
def test_points_and_what_comes_after_them_bring_the_whole_of_the_other_chain(
    common: int, ours: int, theirs: int
) -> None:
    mine = served(num_commits=common)
    other = mine.fork()
    mine.open(A, 2, voters=THREE[:2])
    mine.commits(ours)
    other.open(B, 3, voters=THREE[1:])
    other.commits(theirs)
    us, them = tree(mine), tree(other)
    known = {entry.digest: entry for entry in other.entries}
    sent = them.after(us.points())
    assert us.take(tuple(known[digest] for digest in sent)).why_not is None
    assert us.head == other.head
    assert len(sent) <= theirs + ours + 3, "not much more than what was missing"


def test_an_answer_is_bounded() -> None:
    assert len(tree(served(num_commits=SENT_MAX + 10)).after(())) == SENT_MAX


def test_whole_points_name_only_what_is_here_with_all_bytes() -> None:
    chain = served(num_commits=6)
    forks = tree(chain, stored=False)
    for entry in chain.entries[:4]:
        forks.stored(entry.digest)
    assert max(point.rank.seq for point in forks.points(whole=True)) == 3
    assert max(point.rank.seq for point in forks.points()) == 7


def test_who_serves_a_term_is_known_from_its_open() -> None:
    chain = served()
    opened = tree(chain).opened(chain.branch, Term(1))
    assert opened is not None and (opened.syncer, opened.boot) == (A, boot(A).boot)
    assert tree(chain).opened(chain.branch, Term(2)) is None
