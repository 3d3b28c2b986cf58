"""A learner's books: for each fragment, where every token it trained is now.

Trained = merged + in flight + carried + dropped, in integers, per fragment. The books change at three moments only,
all of them inner-step boundaries told by the training thread: a sample (carried becomes in flight), an adoption (in
flight becomes merged, the cap drops a part), a decision (in flight becomes carried again). Parts per million scale
tokens by flooring what is kept; the rest is dropped with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.manifest import FragmentId, Version
from geo_diloco.protocol.effects import (
    TokensDropped,
)
from geo_diloco.protocol.events import (
    FragmentAccount,
    UndecidedAccount,
)
from geo_diloco.protocol.messages import BlobRef, Contribution

PPM = 1_000_000


@dataclass(slots=True)
class Undecided:
    """A sample that is neither merged nor refused."""

    tokens: int
    """Tokens in flight."""
    last_step: int
    scale_ppm: int = PPM
    """Product of the s of the adoptions since sampling."""
    contribution: Contribution | None = None
    """None until it is encoded."""
    uploaded: bool = False


@dataclass(slots=True)
class Account:
    """Books on one fragment. Steps and tokens are the learner's own cumulative counts."""

    fragment: FragmentId
    adopted_version: Version = Version(0)
    first_step: int = 0
    adopted_step: int = 0
    adopted_tokens: int = 0
    unmerged: int = 0
    mark: int = 0
    restored: int = 0
    """Part of `unmerged` that came with the checkpoint this process resumed from."""
    merged: int = 0
    undecided: Undecided | None = None

    def settle(self, tokens: int) -> None:
        """Everything trained up to `tokens` is in the books."""
        self.unmerged += tokens - self.mark
        self.mark = tokens

    def sample(self, step: int, tokens: int) -> Undecided:
        """Carried work becomes work in flight."""
        self.settle(tokens)
        self.undecided = Undecided(tokens=self.unmerged, last_step=step)
        self.unmerged = self.restored = 0
        return self.undecided

    def adopt(self, version: Version, step: int, tokens: int, scale_ppm: int) -> list[TokensDropped]:
        """A version was adopted without this learner's work in flight."""
        self.settle(tokens)
        kept = self.unmerged * scale_ppm // PPM
        dropped = self.unmerged - kept
        self.unmerged = kept
        self.restored = self.restored * scale_ppm // PPM
        if self.undecided is not None:
            self.undecided.scale_ppm = self.undecided.scale_ppm * scale_ppm // PPM
        self._adopted(version, step, tokens)
        if scale_ppm == 0:
            # The paper's overwrite: what is trained from here on starts at this step.
            self.first_step = step
        return [TokensDropped(self.fragment, dropped, "shrunk")] if dropped else []

    def merge(
        self, version: Version, step: int, tokens: int, scale_ppm: int, credited: int | None = None
    ) -> tuple[int, list[TokensDropped]]:
        """A version was adopted that contains the work in flight: how many tokens that was, and what was dropped.
        The syncer counted `credited` of them, which is all unless it found that implausible."""
        assert self.undecided is not None
        in_flight, last_step = self.undecided.tokens, self.undecided.last_step
        merged = in_flight if credited is None else min(credited, in_flight)
        excess = in_flight - merged
        self.undecided = None
        self.merged += merged
        dropped = self.adopt(version, step, tokens, scale_ppm)
        self.first_step = max(self.first_step, last_step)
        return merged, dropped + ([TokensDropped(self.fragment, excess, "implausible")] if excess else [])

    def refuse(self) -> list[TokensDropped]:
        """Work in flight was refused: what the replica still carries of it is carried, the rest is gone."""
        assert self.undecided is not None
        kept = self.undecided.tokens * self.undecided.scale_ppm // PPM
        dropped = self.undecided.tokens - kept
        self.unmerged += kept
        self.undecided = None
        return [TokensDropped(self.fragment, dropped, "shrunk")] if dropped else []

    def restart(self, version: Version, step: int, tokens: int, *, merged: int, last_step: int) -> list[TokensDropped]:
        """The fragment was set to Theta because a commit holds work of an earlier process of ours that this one does
        not remember: `merged` tokens, up to inner step `last_step`. What that work added to the checkpoint was booked
        as crashed and is not; what was trained here since is lost."""
        self.settle(tokens)
        corrections = [
            TokensDropped(self.fragment, self.restored - merged, "crashed"),
            TokensDropped(self.fragment, self.unmerged - self.restored, "restarted"),
        ]
        if self.undecided is not None:
            corrections.append(TokensDropped(self.fragment, self.undecided.tokens, "restarted"))
            self.undecided = None
        self.merged += merged
        self.unmerged = self.restored = 0
        self._adopted(version, step, tokens)
        self.first_step = max(last_step, step)
        return [correction for correction in corrections if correction.tokens]

    def skip_steps(self, steps: int) -> None:
        """Step numbers jump ahead by `steps` that this process did not train: fresh counts must not grow by them."""
        self.adopted_step += steps

    def _adopted(self, version: Version, step: int, tokens: int) -> None:
        self.adopted_version, self.adopted_step, self.adopted_tokens = version, step, tokens

    def contribution_blob(self) -> BlobRef | None:
        if self.undecided is None or self.undecided.contribution is None:
            return None
        return self.undecided.contribution.blob

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def saved(self, tokens: int) -> FragmentAccount:
        """For a checkpoint taken at `tokens`. A sample that is not encoded yet counts as not taken: its work is still
        in the model."""
        self.settle(tokens)
        undecided, unmerged = None, self.unmerged
        if self.undecided is not None:
            if self.undecided.contribution is None:
                unmerged += self.undecided.tokens
            else:
                undecided = UndecidedAccount(self.undecided.contribution, self.undecided.scale_ppm)
        return FragmentAccount(
            adopted_version=self.adopted_version,
            first_step=self.first_step,
            adopted_step=self.adopted_step,
            adopted_tokens=self.adopted_tokens,
            unmerged=unmerged,
            mark=self.mark,
            undecided=undecided,
        )

    @classmethod
    def restored_from(cls, fragment: FragmentId, saved: FragmentAccount) -> Account:
        undecided = None
        if saved.undecided is not None:
            contribution = saved.undecided.contribution
            undecided = Undecided(
                tokens=contribution.tokens_unmerged,
                last_step=contribution.id.last_step,
                scale_ppm=saved.undecided.scale_ppm,
                contribution=contribution,
            )
        return cls(
            fragment=fragment,
            adopted_version=saved.adopted_version,
            first_step=saved.first_step,
            adopted_step=saved.adopted_step,
            adopted_tokens=saved.adopted_tokens,
            unmerged=saved.unmerged,
            mark=saved.mark,
            restored=saved.unmerged,
            undecided=undecided,
        )
