"""What the owner changes while a run goes on: once, in order, and the same for everybody."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.config import changed_manifest
from geo_diloco.errors import ManifestError
from geo_diloco.manifest import BranchId, CodecSpec, RunId, RunManifest, RunRules, StopSpec
from geo_diloco.protocol.amendments import (
    AMENDABLE,
    CODECS,
    SECTIONS,
    AmendmentOrder,
    Changes,
    Stretch,
    amended_at,
    codecs_up,
    rules_at,
    why_not_changes,
)
from geo_diloco.protocol.effects import Effect, Merge, Note, PersistAccounts, Seal
from geo_diloco.protocol.events import AmendmentAsked, Saved
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import Amendment, Commit, Finished
from geo_diloco.protocol.winding import StopRule
from geo_diloco.sim.fakes import RUN
from tests.support.chains import ANN, BEN, FOUNDER, SYNC, ChainBuilder, contribution
from tests.support.single import Learning, Syncing, known, only
from tests.support.standing import Standing, seated_chain

RULES = RunRules(founder=FOUNDER, sync=SYNC)


def asked(syncing: Any, number: int = 1, *, owner: Any = FOUNDER, signed: str = "", **changes: Any) -> AmendmentAsked:
    """The owner's order, for that core's branch."""
    order = AmendmentOrder(
        run=RUN, branch=syncing.core.election.branch, number=number, changes=Changes(**(changes or {"quorum": 2}))
    )
    return AmendmentAsked(order, owner, signed or f"order {number}")


def amendments(effects: list[Effect]) -> list[Amendment]:
    return [seal.entry for seal in only(effects, Seal) if isinstance(seal.entry, Amendment)]


# ---- the rules in force


def test_a_run_prolonged_at_its_end_does_not_end_when_the_next_syncer_takes_over() -> None:
    """Its minutes are counted again from the progress on the chain, which was at its end before it was prolonged."""
    stretch = Stretch(progress=1.0, share=0.25)
    assert stretch.share_at(1.0) == 0.25
    assert Stretch(progress=1.0, share=1.0).share_at(1.0) == 1.0
    assert Stretch(progress=0.5, share=0.2).share_at(1.0) == 1.0


def test_the_rules_in_force_are_the_manifests_with_every_amendment_made() -> None:
    chain = ChainBuilder.opened()
    chain.amendment(1, quorum=2, eta=0.5)
    chain.amendment(2, quorum=3, minutes=4.0, codec_up=CodecSpec(name="int8"))
    ledger = chain.ledger()
    rules = rules_at(RULES, ledger.amended)
    assert (rules.sync.quorum, rules.outer.eta, rules.outer.mu) == (3, 0.5, RULES.outer.mu)
    assert (rules.stop, rules.codec_up.name, rules.codec_down) == (StopSpec(minutes=4.0), "int8", RULES.codec_down)
    assert amended_at(ledger.amended) == {"quorum": 3, "eta": 2, "minutes": 3, "codec_up": 3}
    assert rules_at(RULES, ()) == RULES


def test_only_what_still_decides_something_is_kept() -> None:
    chain = ChainBuilder.opened()
    for number, changes in enumerate([{"quorum": 2}, {"eta": 0.5}, {"quorum": 3}, {"quorum": 1}], 1):
        chain.amendment(number, **changes)
    assert [each.number for each in chain.ledger().amended] == [2, 4]


@given(st.lists(st.dictionaries(st.sampled_from(["quorum", "commits", "tokens"]), st.integers(1, 9), min_size=1)))
def test_what_is_kept_gives_the_same_rules_as_all_of_it(wishes: list[dict[str, int]]) -> None:
    chain, rules = ChainBuilder.opened(), RULES
    for number, changes in enumerate(wishes, 1):
        chain.amendment(number, **changes)
        for section, names in SECTIONS.items():
            values = {name: changes[name] for name in names if name in changes}
            rules = replace(rules, **{section: replace(getattr(rules, section), **values)})
    assert rules_at(RULES, chain.ledger().amended) == rules
    assert len(chain.ledger().amended) <= 4


def test_a_snapshot_carries_them_and_the_next_number() -> None:
    chain = ChainBuilder.opened()
    chain.amendment(1, quorum=2)
    ledger = Ledger()
    ledger.load(chain.snapshot())
    assert ledger.amended == chain.ledger().amended
    assert ledger.why_not(chain.fork(2).amendment(1).entry) == "amendment 1 does not follow 1"
    assert ledger.why_not(chain.fork(2).amendment(2).entry) is None


def test_a_learner_goes_by_them_and_its_checkpoint_does() -> None:
    chain = ChainBuilder.opened()
    learning = Learning(chain.snapshot())
    learning.connect()
    known(learning, chain.amendment(1, codec_up=CodecSpec(name="bf16")))
    assert learning.core.rules.codec_up.name == "bf16"
    known(learning, chain.commit(0))
    (persist,) = only(learning.give(Saved(1, 0, 0)), PersistAccounts)
    assert persist.resume_at.amended == chain.ledger().amended
    assert Learning(persist.resume_at).core.rules == learning.core.rules


def test_work_encoded_before_an_amendment_is_as_good_as_it_was() -> None:
    chain = ChainBuilder.opened()
    chain.amendment(1, codec_up=CodecSpec(name="int8"))
    assert [each.name for each in codecs_up(RULES, chain.ledger().amended)] == ["int8", "int4"]
    assert codecs_up(RULES, ()) == (RULES.codec_up,)


def test_choices_are_in_force_all_at_once_and_what_was_allowed_stays_good() -> None:
    bf16, int8 = CodecSpec(name="bf16"), CodecSpec(name="int8")
    rules = replace(RULES, codec_up_choices=(bf16,))
    chain = ChainBuilder.opened()
    chain.amendment(1, codec_up_choices=(int8,))
    amended = chain.ledger().amended
    assert rules_at(rules, amended).codec_up_choices == (int8,)
    assert codecs_up(rules, amended) == (RULES.codec_up, int8, bf16)
    chain.amendment(2, codec_up_choices=())
    assert rules_at(rules, chain.ledger().amended).codec_up_choices == ()


# ---- what the chain takes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"number": 2}, "amendment 2 does not follow 0"),
        ({"number": 0}, "amendment 0 does not follow 0"),
        ({"owner": ANN}, "ordered by the run's owner"),
        ({"quorum": 0}, "quorum = 0"),
        ({"eta": 0.0}, "eta is above 0"),
        ({"mu": 1.0}, "mu below 1"),
        ({"codec_up": CodecSpec(block=48)}, "power of two"),
    ],
)
def test_an_amendment_that_no_owner_ordered_is_on_nobodys_chain(change: dict[str, Any], reason: str) -> None:
    chain = seated_chain()
    standing = Standing(chain)
    notes = [note.text for note in only(standing.give(chain.amendment(**({"quorum": 2} | change))), Note)]
    assert any(reason in text for text in notes), notes
    assert standing.head.rank.seq == 2


def test_an_amendment_that_comes_again_or_out_of_order_is_refused() -> None:
    chain = ChainBuilder.opened()
    chain.amendment(1)
    assert chain.ledger().why_not(chain.fork(2).amendment(1).entry) == "amendment 1 does not follow 1"
    assert chain.ledger().why_not(chain.fork(2).amendment(3).entry) == "amendment 3 does not follow 1"
    assert chain.ledger().why_not(chain.fork(2).amendment(2).entry) is None
    chain.finished()
    assert chain.ledger().why_not(chain.fork(3).amendment(2).entry) == "the run is finished"


# ---- the syncer


def test_an_order_is_appended_and_in_force_at_once() -> None:
    syncing = Syncing.founding()
    order = asked(syncing, quorum=2, grace=False)
    (entry,) = amendments(syncing.give(order))
    assert (entry.owner, entry.number, entry.changes, entry.order) == (FOUNDER, 1, order.order.changes, "order 1")
    assert syncing.core.rules.sync.quorum == 2 and not syncing.core.rules.sync.grace
    assert syncing.core.status(syncing.now).rules.sync.quorum == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"owner": ANN}, "another key"),
        ({"number": 2}, "it is number 2, and the next amendment of this run is number 1"),
        ({"number": 0}, "the next amendment of this run is number 1"),
        ({"run": RunId("0" * 40)}, "it is for run 000000000000"),
        ({"branch": BranchId("0" * 64)}, "branch 000000000000"),
        ({"changes": Changes()}, "changes nothing"),
        ({"changes": Changes(quorum=0)}, "quorum = 0"),
    ],
)
def test_a_hostile_order_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    syncing = Syncing.founding()
    owner = change.pop("owner", FOUNDER)
    good = asked(syncing, owner=owner)
    order = replace(good, order=replace(good.order, **change))
    assert reason in (syncing.core.why_not_amend(order) or "")
    effects = syncing.give(order)
    assert not only(effects, Seal) and reason in only(effects, Note)[0].text
    assert syncing.core.rules.sync.quorum == 1


def test_an_order_given_twice_is_appended_once() -> None:
    syncing = Syncing.founding()
    syncing.slow = frozenset({Seal})
    assert len(amendments(syncing.give(asked(syncing)))) == 1
    assert syncing.core.why_not_amend(asked(syncing)) == "amendment 1 is being appended already"
    assert amendments(syncing.give(asked(syncing))) == []
    fresh = Syncing.founding()
    fresh.give(asked(fresh))
    assert amendments(fresh.give(asked(fresh))) == []


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=12), st.data())
def test_however_orders_are_delivered_the_numbers_on_the_chain_are_1_2_3(
    deliveries: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Twice, late, out of order, and while an entry is being sealed."""
    syncing = Syncing.founding()
    found: list[Amendment] = []
    for number, quorum in deliveries:
        syncing.slow = frozenset({Seal}) if data.draw(st.booleans()) else frozenset()
        sealing = only(syncing.give(asked(syncing, number, signed=f"{number} {quorum}", quorum=quorum)), Seal)
        found += [seal.entry for seal in sealing if isinstance(seal.entry, Amendment)]
        if syncing.slow:
            for seal in sealing:
                answer = Syncing.answer(syncing, seal)
                assert answer is not None
                syncing.give(answer)
    assert [entry.number for entry in found] == list(range(1, len(found) + 1))
    wanted = 0
    for number, _ in deliveries:
        wanted += number == wanted + 1
    assert len(found) == wanted
    assert syncing.core.rules.sync.quorum == (found[-1].changes.quorum if found else 1)


def merging(syncing: Syncing, turn: int = 0) -> Merge:
    """A round that is closed and being merged: the learner's work of eight steps."""
    syncing.join()
    round_, first = syncing.asked(), 8 * turn
    claim = contribution(
        base=round_.base, fragment=1, base_version=round_.version, first_step=first, last_step=first + 8
    )
    (merge,) = only(syncing.hand_in(claim), Merge)
    return merge


def test_a_round_that_is_closing_keeps_the_rules_it_closed_with() -> None:
    syncing = Syncing.founding()
    merge = merging(syncing)
    syncing.give(asked(syncing, eta=0.25, mu=0.125, codec_down=CodecSpec(name="bf16")))
    commits = [seal.entry for seal in only(syncing.merged(merge), Seal) if isinstance(seal.entry, Commit)]
    assert [(entry.eta, entry.mu) for entry in commits] == [(merge.eta, merge.mu)] == [(0.7, 0.5)]
    again = merging(syncing, 1)
    assert (again.eta, again.mu, again.codec.name) == (0.25, 0.125, "bf16")


def test_an_open_round_waits_for_the_new_quorum() -> None:
    syncing = Syncing.founding()
    syncing.join(ANN)
    syncing.join(BEN)
    round_ = syncing.asked()
    syncing.give(asked(syncing, quorum=2))
    claims = [
        contribution(peer, base=round_.base, fragment=round_.fragment, base_version=round_.version)
        for peer in (ANN, BEN)
    ]
    assert not only(syncing.hand_in(claims[0]), Merge)
    assert len(only(syncing.hand_in(claims[1]), Merge)) == 1


def test_a_round_that_waits_for_more_than_the_new_quorum_closes_with_the_amendment() -> None:
    """Nothing else may happen that has it looked at."""
    syncing = Syncing.founding(replace(SYNC, quorum=2, grace=False))
    syncing.join(ANN)
    syncing.join(BEN)
    round_ = syncing.asked()
    claim = contribution(base=round_.base, fragment=round_.fragment, base_version=round_.version)
    assert not only(syncing.hand_in(claim), Merge)
    assert len(only(syncing.give(asked(syncing, quorum=1)), Merge)) == 1


def test_the_next_term_goes_by_what_the_chain_says() -> None:
    chain = seated_chain()
    chain.amendment(1, quorum=2)
    standing = Standing(chain)
    standing.elected()
    assert standing.core.serves and standing.core.rules.sync.quorum == 2
    (entry,) = amendments(standing.give(asked(standing, 2, eta=0.5)))
    assert entry.number == 2
    assert standing.core.status(standing.now).rules.outer.eta == 0.7, "not durable yet"  # type: ignore[arg-type]
    standing.ack()
    assert standing.core.status(standing.now).rules.outer.eta == 0.5  # type: ignore[arg-type]


def test_a_peer_that_does_not_serve_says_so() -> None:
    standing = Standing(seated_chain())
    assert standing.core.why_not_amend(asked(standing)) == "this peer is not the syncer now"
    assert not only(standing.give(asked(standing)), Seal)


# ---- the stop rule


def test_a_stop_rule_that_is_reached_already_ends_the_run() -> None:
    syncing = Syncing.founding(stop=StopSpec(commits=100))
    syncing.merged(merging(syncing))
    effects = syncing.give(asked(syncing, commits=1))
    assert [type(seal.entry) for seal in only(effects, Seal)] == [Amendment, Finished]
    late = asked(syncing, 2, commits=100)
    assert syncing.core.why_not_amend(late) == "the run is finished (1 commits made) and can't be amended any more"
    assert not only(syncing.give(late), Seal)


def test_a_run_that_is_about_to_end_can_be_prolonged() -> None:
    syncing = Syncing.founding(stop=StopSpec(commits=1))
    merge = merging(syncing)
    syncing.slow = frozenset({Seal})
    (commit,) = only(syncing.merged(merge), Seal)
    syncing.give(asked(syncing, commits=5))
    syncing.slow = frozenset()
    answer = syncing.answer(commit)
    assert answer is not None
    effects = syncing.give(answer)
    assert [type(seal.entry) for seal in only(effects, Seal)] == [Amendment]
    assert syncing.core.ledger.finished is None


def commit_progress(syncing: Syncing, turn: int) -> float:
    commits = [each.entry for each in only(syncing.merged(merging(syncing, turn)), Seal)]
    return next(entry.progress for entry in commits if isinstance(entry, Commit))


def test_progress_goes_on_from_where_it_stands_to_1_at_the_new_end() -> None:
    syncing = Syncing.founding(stop=StopSpec(commits=2))
    seen = [commit_progress(syncing, 0)]
    syncing.give(asked(syncing, commits=5))
    assert syncing.core.ledger.amended[0].stretch == Stretch(progress=0.5, share=0.2)
    seen += [commit_progress(syncing, turn) for turn in (1, 2, 3, 4)]
    assert seen == pytest.approx([0.5, 0.625, 0.75, 0.875, 1.0])


@given(st.floats(0, 1), st.floats(0, 1), st.lists(st.floats(0, 1), max_size=5))
def test_progress_never_goes_back_nor_beyond_1(progress_then: float, share_then: float, shares: list[float]) -> None:
    stretch = Stretch(progress=progress_then, share=share_then)
    found = [stretch.progress_at(share) for share in sorted([share_then, *shares])]
    assert found == sorted(found) and found[0] >= progress_then and found[-1] <= 1
    assert stretch.progress_at(1.0) == 1.0
    for share in shares:
        if share >= share_then and progress_then < 0.99 and share_then < 0.99:
            assert stretch.share_at(stretch.progress_at(share)) == pytest.approx(share, abs=1e-6)


def test_a_later_term_knows_how_many_of_the_new_minutes_are_over() -> None:
    ledger = ChainBuilder.opened().ledger()
    ledger.progress = 0.75
    rule = StopRule(replace(RULES, stop=StopSpec(minutes=20)), Stretch(progress=0.5, share=0.25))
    rule.begin(ledger, 0)  # type: ignore[arg-type]
    assert rule.deadline == pytest.approx(20 * 60_000 * (1 - 0.625))


# ---- ranges


RANGES: list[tuple[str, Any]] = [
    ("commits", -1), ("tokens", -1), ("minutes", -0.5), ("minutes", 1e8), ("eta", 0.0), ("eta", 10.5), ("mu", -0.1),
    ("mu", 1.0), ("quorum", 0), ("quorum", 1025), ("grace_gamma", -0.1), ("grace_gamma", 1.1),
    ("codec_up", CodecSpec(block=8)), ("codec_down", CodecSpec(block=100)), ("codec_up", CodecSpec(block=8192)),
    ("quorum", 1), ("quorum", 1024), ("eta", 10.0), ("mu", 0.0), ("grace_gamma", 1.0), ("commits", 0), ("grace", False),
    ("codec_up", CodecSpec(name="none", block=4096)), ("codec_up_choices", ()),
    ("codec_up_choices", (CodecSpec(block=16), CodecSpec(block=48))), ("codec_up_choices", (CodecSpec(),) * 8),
    ("codec_up_choices", (CodecSpec(),) * 9),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), RANGES)
def test_the_core_and_the_manifest_allow_the_same(name: str, value: Any) -> None:
    section = next((section for section, names in SECTIONS.items() if name in names), name)
    written = [dataclasses.asdict(each) for each in value] if isinstance(value, tuple) else None
    changes: dict[str, Any] = {section: {name: value}}
    if section == name:
        changes = {name: dataclasses.asdict(value) if written is None else written}
    base = RunManifest(model=replace(RunManifest().model, config={"model_type": "llama"}))
    try:
        changed_manifest(base, changes, source="here")
        allowed = True
    except ManifestError:
        allowed = False
    assert (why_not_changes(Changes(**{name: value})) is None) == allowed


def test_what_can_be_amended_is_what_the_readme_says() -> None:
    assert set(AMENDABLE) == {name for names in SECTIONS.values() for name in names} | set(CODECS)
