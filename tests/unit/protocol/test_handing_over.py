"""A syncer that leaves, or is asked to: somebody else takes the term after, or it serves on."""

from __future__ import annotations

from geo_diloco.manifest import Digest, MonoMs, Seq, Term
from geo_diloco.protocol.effects import Effect, Merge, Note, ReadyToLeave, Seal, SeekSyncer
from geo_diloco.protocol.election.ballots import Ack, Append, Ask, Head, Rank, Refuse, Release
from geo_diloco.protocol.events import HandoverAsked, StopRequested
from geo_diloco.protocol.messages import Commit, Contribution, Goodbye, RoundOpen
from geo_diloco.protocol.peer import LEAVE_MS
from tests.support.chains import ANN, BEN, CYD, FOUNDER, FOUNDER_BOOT, contribution
from tests.support.single import BOOT, Syncing, hello, merged, only, said
from tests.support.standing import LEASE_MS, Standing, seated_chain

ASKED = HandoverAsked(None)
STOP = StopRequested("SIGTERM")


def serving() -> Standing:
    standing = Standing(seated_chain())
    standing.elected()
    assert standing.core.serves
    return standing


def answer(standing: Standing) -> Contribution:
    standing.join(ANN)
    asked = standing.asked()
    return contribution(ANN, base=asked.base, fragment=asked.fragment, base_version=asked.version)


def behind(standing: Standing) -> None:
    """The founder is here and could serve, but has not the newest entries."""
    standing.ack(FOUNDER, Head(Rank(0, Term(1), Seq(1)), standing.core.election.digest_at(Seq(1)) or Digest("")))


def releases(effects: list[Effect]) -> set[str]:
    return {release.to for release in said(effects, Release)}


def test_a_syncer_that_is_asked_to_hands_over_to_who_has_everything() -> None:
    standing = serving()
    standing.join(ANN)
    effects = standing.give(ASKED) + standing.pass_time(1)
    assert releases(effects) == {CYD}
    assert said(effects, Release, FOUNDER) != [], "every elector's promise is its own again"
    assert [refuse.reason for refuse in said(effects, Refuse, ANN)] == ["not_serving"]
    assert not standing.core.serves and SeekSyncer(None, "") in effects


def test_it_never_appends_in_that_term_again() -> None:
    standing = serving()
    standing.give(ASKED)
    standing.pass_time(1)
    assert only(standing.keep_lease(5_000), Seal) == []
    assert said(standing.hear(hello(), ANN), Refuse)[0].reason == "not_serving"


def test_what_is_being_merged_is_committed_and_durable_first() -> None:
    standing = serving()
    standing.slow = frozenset({Merge})
    (merge,) = only(standing.hand_in(answer(standing)), Merge)
    effects = standing.give(ASKED) + standing.pass_time(1_000) + standing.ack()
    assert releases(effects) == set()
    effects = standing.give(merged(merge)) + standing.pass_time(1)
    assert any(isinstance(seal.entry, Commit) for seal in only(effects, Seal)) and releases(effects) == set()
    assert releases(standing.ack() + standing.pass_time(1)) == {CYD}


def test_while_it_hands_over_no_round_is_opened() -> None:
    standing = serving()
    standing.join(ANN)
    behind(standing)
    effects = standing.give(HandoverAsked(FOUNDER))
    effects += standing.keep_lease(2_000)
    assert said(effects, RoundOpen) == [] and standing.core.serves


def test_a_hand_over_that_nobody_takes_is_given_up_and_rounds_are_opened_again() -> None:
    standing = serving()
    standing.join(ANN)
    behind(standing)
    effects = standing.give(HandoverAsked(FOUNDER))
    for _ in range(2 * LEASE_MS // 1_000 - 1):
        effects += standing.keep_lease(1_000) + standing.join(ANN)
        behind(standing)
    assert said(effects, RoundOpen) == [] and standing.core.serves
    for _ in range(3):
        effects += standing.keep_lease(1_000) + standing.join(ANN)
    assert "given up: it took too long" in {note.text for note in only(effects, Note)}
    assert releases(effects) == set() and standing.core.serves
    assert said(effects, RoundOpen) != []


def test_a_hand_over_to_nobody_does_not_begin() -> None:
    """Commits would wait for it."""
    standing = serving()
    standing.join(ANN)
    standing.give(HandoverAsked(FOUNDER))
    assert said(standing.keep_lease(1_000), RoundOpen) != []


def test_who_does_not_serve_has_nothing_to_hand_over() -> None:
    standing = Standing(seated_chain())
    (note,) = only(standing.give(ASKED), Note)
    assert note.text == "this peer is not syncer"


# ---- leaving


def test_a_syncer_that_leaves_hands_over_first() -> None:
    standing = serving()
    effects = standing.give(STOP)
    assert releases(effects) == {CYD}
    assert only(effects, ReadyToLeave) == [ReadyToLeave()]
    said_at = next(i for i, effect in enumerate(effects) if effect in only(effects, ReadyToLeave))
    assert said_at == len(effects) - 1


def test_a_syncer_that_leaves_waits_for_what_is_not_durable_yet_but_not_for_long() -> None:
    standing = serving()
    standing.hand_in(answer(standing))
    effects = standing.give(STOP)
    assert only(effects, ReadyToLeave) == [] and releases(effects) == set()
    assert standing.core.deadline is not None and standing.core.deadline <= standing.now + LEAVE_MS
    assert only(standing.pass_time(LEAVE_MS), ReadyToLeave) == [ReadyToLeave()]


def test_a_syncer_without_anybody_to_hand_over_to_leaves_at_once() -> None:
    syncing = Syncing.founding()
    assert only(syncing.give(STOP), ReadyToLeave) == [ReadyToLeave()]


def test_a_syncer_says_goodbye_to_nobody() -> None:
    standing = serving()
    standing.join(ANN)
    assert said(standing.give(STOP), Goodbye) == []


# ---- taking over


def test_whoever_is_released_to_asks_without_delay() -> None:
    """Bound to its syncer until then, though just started."""
    standing = Standing(seated_chain())
    append = Append(head=standing.head, durable_seq=Seq(2), sent_at=MonoMs(0))
    assert said(standing.hear(append, FOUNDER, FOUNDER_BOOT), Ack, FOUNDER) != []
    assert said(standing.offer(), Ask) == []
    assert said(standing.hear(Release(to=BEN), FOUNDER, FOUNDER_BOOT), Ask, CYD) != []


def test_a_release_of_anybody_but_its_syncer_unbinds_nobody() -> None:
    standing = Standing(seated_chain())
    standing.hear(Append(head=standing.head, durable_seq=Seq(2), sent_at=MonoMs(0)), FOUNDER, FOUNDER_BOOT)
    standing.offer()
    effects = standing.hear(Release(to=BEN), CYD) + standing.hear(Release(to=BEN), FOUNDER, BOOT)
    assert said(effects + standing.pass_time(2_000), Ask) == []
