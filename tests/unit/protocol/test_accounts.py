"""A learner's books: no token appears or vanishes, whatever happens in whatever order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from geo_diloco.manifest import FragmentId, Version
from geo_diloco.protocol.accounts import PPM, Account
from geo_diloco.protocol.effects import TokensDropped
from geo_diloco.protocol.messages import BlobRef, Contribution, ContributionId
from geo_diloco.sim.fakes import fake_digest, fake_peer

P = FragmentId(0)


def encoded(account: Account) -> Contribution:
    """The account's sample as a contribution."""
    undecided = account.undecided
    assert undecided is not None
    return Contribution(
        id=ContributionId(fake_peer("me"), P, fake_digest(account.adopted_version), undecided.last_step),
        round=1,
        attempt=1,
        base_version=account.adopted_version,
        first_step=account.first_step,
        steps=1,
        tokens=1,
        tokens_unmerged=undecided.tokens,
        cursor=0,
        blob=BlobRef(fake_digest("blob", undecided.last_step), 50),
    )


def test_a_merged_sample_leaves_what_was_trained_since_carried() -> None:
    account = Account(P)
    account.sample(step=4, tokens=400)
    merged, dropped = account.merge(Version(1), step=6, tokens=600, scale_ppm=PPM)
    assert (merged, dropped, account.unmerged, account.first_step) == (400, [], 200, 4)
    assert (account.adopted_step, account.adopted_tokens) == (6, 600)


def test_adoption_without_participation_keeps_all_work_and_its_range() -> None:
    account = Account(P)
    assert account.adopt(Version(1), step=5, tokens=500, scale_ppm=PPM) == []
    assert (account.unmerged, account.first_step, account.adopted_step) == (500, 0, 5)


def test_the_cap_drops_the_part_it_cuts_and_says_so() -> None:
    account = Account(P)
    assert account.adopt(Version(1), step=3, tokens=333, scale_ppm=250_000) == [TokensDropped(P, 250, "shrunk")]
    assert account.unmerged == 83


def test_tokens_in_flight_stay_whole_until_refused_and_then_carry_what_the_caps_left() -> None:
    account = Account(P)
    account.sample(step=4, tokens=400)
    account.adopt(Version(1), step=5, tokens=400, scale_ppm=500_000)
    account.adopt(Version(2), step=6, tokens=400, scale_ppm=500_000)
    assert account.undecided is not None and account.undecided.tokens == 400
    assert account.refuse() == [TokensDropped(P, 300, "shrunk")]
    assert account.unmerged == 100


def test_overwriting_drops_the_carry_and_starts_the_next_range_there() -> None:
    account = Account(P)
    account.sample(step=4, tokens=400)
    assert account.adopt(Version(1), step=6, tokens=600, scale_ppm=0) == [TokensDropped(P, 200, "shrunk")]
    account.merge(Version(2), step=9, tokens=900, scale_ppm=0)
    assert (account.unmerged, account.first_step) == (0, 9)
    account.sample(step=12, tokens=1_200)
    account.adopt(Version(3), step=14, tokens=1_400, scale_ppm=0)
    account.refuse()
    assert account.first_step == 14


def test_a_merged_sample_never_moves_the_range_back() -> None:
    account = Account(P, first_step=7)
    account.sample(step=5, tokens=0)
    account.merge(Version(1), step=5, tokens=0, scale_ppm=PPM)
    assert account.first_step == 7


def test_step_numbers_that_are_skipped_are_not_fresh_steps() -> None:
    account = Account(P)
    account.skip_steps(30)
    assert account.adopted_step == 30


def test_a_checkpoint_counts_an_unencoded_sample_as_not_taken() -> None:
    account = Account(P)
    account.sample(step=4, tokens=400)
    saved = account.saved(tokens=500)
    assert (saved.undecided, saved.unmerged, saved.mark) == (None, 500, 500)


def test_a_checkpoint_remembers_an_encoded_sample_and_its_scale() -> None:
    account = Account(P)
    undecided = account.sample(step=4, tokens=400)
    undecided.contribution = encoded(account)
    account.adopt(Version(1), step=5, tokens=500, scale_ppm=400_000)
    again = Account.restored_from(P, account.saved(tokens=500))
    assert again.undecided is not None
    assert (again.undecided.tokens, again.undecided.last_step, again.undecided.scale_ppm) == (400, 4, 400_000)
    assert (again.unmerged, again.restored, again.first_step) == (40, 40, 0)
    assert again.contribution_blob() == account.contribution_blob()


def test_a_restart_books_what_an_earlier_process_handed_in() -> None:
    saved = Account(P)
    saved.adopt(Version(1), step=5, tokens=500, scale_ppm=PPM)
    account = Account.restored_from(P, saved.saved(tokens=500))
    corrections = account.restart(Version(2), step=9, tokens=900, merged=800, last_step=8)
    assert corrections == [TokensDropped(P, -300, "crashed"), TokensDropped(P, 400, "restarted")]
    assert (account.unmerged, account.restored, account.first_step, account.adopted_version) == (0, 0, 9, 2)


class TokensBalance(RuleBasedStateMachine):
    """trained = merged + in flight + carried + dropped, over samples, adoptions, crashes and what comes after."""

    @initialize()
    def begin(self) -> None:
        self.account = Account(P)
        self.step = self.tokens = self.version = 0
        self.lost = self.merged = self.dropped = 0
        self.checkpoint: tuple[object, ...] | None = None
        self.handed_in_since: tuple[int, int] | None = None
        """(tokens, last step) of a contribution that the checkpoint does not know."""

    def drop(self, dropped: list[TokensDropped]) -> None:
        assert all(each.reason in ("shrunk", "restarted", "crashed") for each in dropped)
        self.dropped += sum(each.tokens for each in dropped)

    @rule(tokens=st.integers(1, 5_000))
    def train(self, tokens: int) -> None:
        self.step += 1
        self.tokens += tokens

    @precondition(lambda self: self.account.undecided is None and self.step > self.account.adopted_step)
    @rule(is_encoded=st.booleans())
    def sample(self, is_encoded: bool) -> None:
        undecided = self.account.sample(self.step, self.tokens)
        if is_encoded:
            undecided.contribution = encoded(self.account)
            self.handed_in_since = (undecided.tokens, undecided.last_step)

    @rule(scale_ppm=st.sampled_from((0, 1, 333_333, 999_999, PPM)))
    def adopt(self, scale_ppm: int) -> None:
        self.version += 1
        self.drop(self.account.adopt(Version(self.version), self.step, self.tokens, scale_ppm))

    @precondition(lambda self: self.account.undecided is not None and self.account.undecided.contribution is not None)
    @rule(scale_ppm=st.sampled_from((0, 700_001, PPM)))
    def merge(self, scale_ppm: int) -> None:
        self.version += 1
        merged, dropped = self.account.merge(Version(self.version), self.step, self.tokens, scale_ppm)
        self.merged += merged
        self.drop(dropped)

    @precondition(lambda self: self.account.undecided is not None and self.account.undecided.contribution is not None)
    @rule()
    def refuse(self) -> None:
        self.drop(self.account.refuse())

    @rule()
    def save(self) -> None:
        account = self.account.saved(self.tokens)
        self.checkpoint = (account, self.step, self.tokens, self.merged, self.dropped)
        self.handed_in_since = None

    @precondition(lambda self: self.checkpoint is not None)
    @rule(was_merged=st.booleans())
    def crash_and_resume(self, was_merged: bool) -> None:
        assert self.checkpoint is not None
        account, step, tokens, merged, dropped = self.checkpoint
        lost = self.tokens - tokens  # type: ignore[operator]
        self.lost += lost
        self.account = Account.restored_from(P, account)  # type: ignore[arg-type]
        self.step, self.tokens, self.merged = step, tokens, merged  # type: ignore[assignment]
        self.dropped = dropped + lost  # type: ignore[operator]
        self.checkpoint = (account, step, tokens, merged, self.dropped)
        if was_merged and self.handed_in_since is not None:
            handed_in, last_step = self.handed_in_since
            self.version += 1
            corrections = self.account.restart(
                Version(self.version), self.step, self.tokens, merged=handed_in, last_step=last_step
            )
            self.merged += handed_in
            self.drop(corrections)
            self.checkpoint = None
        self.handed_in_since = None

    @invariant()
    def balanced(self) -> None:
        if not hasattr(self, "account"):
            return
        account = self.account
        in_flight = 0 if account.undecided is None else account.undecided.tokens
        carried = account.unmerged + self.tokens - account.mark
        assert in_flight >= 0 and carried >= 0 and account.unmerged >= account.restored >= 0
        assert self.tokens + self.lost == self.merged + in_flight + carried + self.dropped


TestTokensBalance = TokensBalance.TestCase
TestTokensBalance.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_saving_changes_nothing() -> None:
    account = Account(P)
    undecided = account.sample(step=4, tokens=400)
    undecided.contribution = encoded(account)
    before = replace(account)
    account.saved(tokens=400)
    assert account == before
