"""The outer state moves only by steps whose digests agree, and a staged step is not seen before its commit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from geo_diloco.errors import DigestMismatch, FrameError, LocalProtocolError
from geo_diloco.manifest import CodecSpec, Digest, FragmentId, PeerId, RunManifest, SyncSpec, Version
from geo_diloco.numerics import codec
from geo_diloco.numerics.fragments import Layout, TensorSpec, fragment_digest
from geo_diloco.protocol.effects import ApplyUpdate, Merge, MergeInput
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.merger import MergeError, MergeOutcome, OuterState

N = 96
P0 = FragmentId(0)
A, B = PeerId("a" * 64), PeerId("b" * 64)
LAYOUT = Layout((TensorSpec("w", (8, 12), "float32", 0, 0, N, False),))
MANIFEST = RunManifest(sync=SyncSpec(num_fragments=1), codec_up=CodecSpec(name="none"))


def state(**more: bool | int) -> OuterState:
    outer = OuterState(LAYOUT, **{"with_momentum": True, "with_residual": True, **more})  # type: ignore[arg-type]
    outer.start_fragment(P0, torch.arange(N, dtype=torch.float32) / N)
    return outer


class Blobs:
    """Contributions by a made-up digest."""

    def __init__(self, *deltas: torch.Tensor) -> None:
        self.frames: dict[BlobRef, bytes] = {}
        for number, delta in enumerate(deltas):
            frame = codec.encode(delta, CodecSpec(name="none"), layout_digest=LAYOUT.digest, fragment=P0)
            self.frames[BlobRef(Digest(f"{number:064x}"), len(frame))] = frame

    def read(self, blob: BlobRef) -> bytes:
        return self.frames[blob]

    def order(self, version: int = 1, base: int = 0, codec: CodecSpec = MANIFEST.codec_down) -> Merge:
        inputs = tuple(
            MergeInput(peer, blob, Version(base), 1.0) for peer, blob in zip((A, B), self.frames, strict=False)
        )
        return Merge(P0, 1, 0, Version(version), inputs, 0.7, 0.5, codec)


def some_blobs() -> Blobs:
    generator = torch.Generator().manual_seed(0)
    return Blobs(*(torch.randn(N, generator=generator) for _ in range(2)))


def update_of(outcome: MergeOutcome, version: int = 1) -> ApplyUpdate:
    blob = BlobRef(Digest("f" * 64), len(outcome.frame))
    return ApplyUpdate(P0, Version(version), blob, outcome.state_digest, outcome.momentum_digest, 0.7, 0.5)


def test_a_staged_step_is_not_visible_before_its_commit() -> None:
    outer = state()
    before = outer.theta(P0).clone()
    outcome = outer.merge(some_blobs().order(), some_blobs().read, MANIFEST)
    assert torch.equal(outer.theta(P0), before) and outer.version(P0) == 0
    outer.commit(P0, Version(1))
    assert fragment_digest(outer.theta(P0)) == outcome.state_digest and outer.version(P0) == 1


def test_a_follower_reaches_the_same_bits_from_the_frame_alone() -> None:
    syncer, follower, learner = state(), state(with_residual=False), state(with_momentum=False, with_residual=False)
    for version in (1, 2, 3):
        outcome = syncer.merge(some_blobs().order(version, version - 1), some_blobs().read, MANIFEST)
        syncer.commit(P0, Version(version))
        for each in (follower, learner):
            each.apply(update_of(outcome, version), outcome.frame)
    assert torch.equal(syncer.theta(P0), follower.theta(P0)) and torch.equal(syncer.theta(P0), learner.theta(P0))
    assert torch.equal(syncer.momentum(P0), follower.momentum(P0))


def test_a_theta_that_somebody_keeps_is_never_written_to_though_commits_reuse_memory() -> None:
    """The new Theta takes the room of the residual that is used up: at a commit no vector is made."""
    outer, kept = state(), []
    for version in range(1, 6):
        residual_N = outer._fragments[P0].residual_N
        outcome = outer.merge(some_blobs().order(version, version - 1), some_blobs().read, MANIFEST)
        outer.commit(P0, Version(version))
        kept.append((outer.theta(P0), outcome.state_digest))
        assert residual_N is None or outer.theta(P0) is residual_N
    assert [fragment_digest(theta_N) for theta_N, _ in kept] == [digest for _, digest in kept]


@pytest.mark.parametrize("field", ["state_digest", "momentum_digest"])
def test_an_update_with_another_digest_changes_nothing(field: str) -> None:
    follower = state()
    outcome = state().merge(some_blobs().order(), some_blobs().read, MANIFEST)
    before = follower.theta(P0).clone()
    with pytest.raises(DigestMismatch):
        follower.apply(dataclasses.replace(update_of(outcome), **{field: Digest("0" * 64)}), outcome.frame)
    assert torch.equal(follower.theta(P0), before) and follower.version(P0) == 0


def test_an_update_that_comes_twice_is_harmless_and_one_that_skips_a_version_is_refused() -> None:
    follower = state()
    outcome = state().merge(some_blobs().order(), some_blobs().read, MANIFEST)
    first = follower.apply(update_of(outcome), outcome.frame)
    assert torch.equal(follower.apply(update_of(outcome), outcome.frame), first)
    with pytest.raises(LocalProtocolError, match="version"):
        follower.apply(update_of(outcome, 3), outcome.frame)


def test_a_truncated_frame_changes_nothing() -> None:
    follower = state()
    outcome = state().merge(some_blobs().order(), some_blobs().read, MANIFEST)
    with pytest.raises(FrameError):
        follower.apply(update_of(outcome), outcome.frame[:-3])
    assert follower.version(P0) == 0


def test_a_bad_contribution_names_its_peer_and_nothing_is_staged() -> None:
    outer, blobs = state(), some_blobs()
    second = list(blobs.frames)[1]
    blobs.frames[second] = blobs.frames[second][:10]
    with pytest.raises(MergeError) as caught:
        outer.merge(blobs.order(), blobs.read, MANIFEST)
    assert caught.value.culprit == B
    with pytest.raises(LocalProtocolError):
        outer.commit(P0, Version(1))


def test_a_merge_tried_again_gives_the_same_bits() -> None:
    outer = state()
    one = outer.merge(some_blobs().order(), some_blobs().read, MANIFEST)
    assert outer.merge(some_blobs().order(), some_blobs().read, MANIFEST) == one


def test_a_merge_with_a_portion_of_the_work_is_that_portion_of_a_step() -> None:
    exact, blobs = CodecSpec(name="none"), some_blobs()
    moved = []
    for portion in (1.0, 0.25):
        outer = state()
        before = outer.theta(P0)
        outer.merge(dataclasses.replace(blobs.order(codec=exact), portion=portion), blobs.read, MANIFEST)
        outer.commit(P0, Version(1))
        moved.append(outer.theta(P0) - before)
    assert torch.allclose(0.25 * moved[0], moved[1], atol=1e-6) and moved[1].norm() > 0.1


def test_the_manifests_rules_of_merging_are_gone_by() -> None:
    """Of two tensors, the second an embedding: each rule makes something else of the same deltas."""
    layout = Layout(
        (TensorSpec("w", (48,), "float32", 0, 0, 48, False), TensorSpec("z", (48,), "float32", 0, 48, 48, True))
    )
    first, second = torch.ones(N), torch.cat([torch.full((48,), -3.0), torch.ones(48) * 2])
    first[::2] = 4.0
    seen = set()
    for merge, embeddings in (("rda", "mean"), ("rda", "rda"), ("rda-fragment", "rda"), ("mean", "mean")):
        outer, frames = OuterState(layout, with_momentum=True, with_residual=True), {}
        outer.start_fragment(P0, torch.zeros(N))
        for number, delta in enumerate((first, second)):
            frame = codec.encode(delta, CodecSpec(name="none"), layout_digest=layout.digest, fragment=P0)
            frames[BlobRef(Digest(f"{number:064x}"), len(frame))] = frame
        inputs = tuple(MergeInput(peer, blob, Version(0), 1.0) for peer, blob in zip((A, B), frames, strict=True))
        sync = dataclasses.replace(MANIFEST.sync, merge=merge, merge_embeddings=embeddings)
        order = Merge(P0, 1, 0, Version(1), inputs, 0.7, 0.5, CodecSpec(name="none"))
        seen.add(outer.merge(order, frames.__getitem__, dataclasses.replace(MANIFEST, sync=sync)).state_digest)
    assert len(seen) == 4


def test_rbar_is_the_plain_mean_of_norms_and_rho_of_a_repeated_update_is_one() -> None:
    outer, blobs = state(), Blobs(torch.full((N,), 3.0), torch.full((N,), 1.0))
    first = outer.merge(blobs.order(), blobs.read, MANIFEST)
    assert first.rbar == pytest.approx(2.0 * N**0.5) and first.rho is None
    outer.commit(P0, Version(1))
    assert outer.merge(blobs.order(2, 1), blobs.read, MANIFEST).rho == pytest.approx(1.0, abs=1e-4)


def test_late_work_in_the_papers_form_is_measured_against_theta_now() -> None:
    exact = CodecSpec(name="none")
    paper = dataclasses.replace(MANIFEST, sync=SyncSpec(num_fragments=1, late_form="paper", merge="mean"))
    outer, blobs = state(updates_kept=4), Blobs(torch.ones(N))
    outer.merge(blobs.order(codec=exact), blobs.read, paper)
    before = outer.theta(P0)
    outer.commit(P0, Version(1))
    moved = outer.theta(P0) - before
    fresh = state(updates_kept=4)
    fresh.merge(blobs.order(codec=exact), blobs.read, paper)
    fresh.commit(P0, Version(1))
    fresh.merge(blobs.order(2, 1, exact), blobs.read, paper)
    fresh.commit(P0, Version(2))
    outer.merge(blobs.order(2, 0, exact), blobs.read, paper)
    outer.commit(P0, Version(2))
    # g differs by the drift, and Nesterov's first use of it has weight eta * (1 + mu).
    assert torch.allclose(fresh.theta(P0) - outer.theta(P0), 0.7 * 1.5 * moved, atol=1e-5)


def test_a_base_that_is_forgotten_leaves_that_contribution_out() -> None:
    paper = dataclasses.replace(MANIFEST, sync=SyncSpec(num_fragments=1, late_form="paper"))
    outer, blobs = state(updates_kept=1), Blobs(torch.ones(N))
    for version in (1, 2):
        outer.merge(blobs.order(version, version - 1), blobs.read, paper)
        outer.commit(P0, Version(version))
    with pytest.raises(MergeError) as caught:
        outer.merge(blobs.order(3, 0), blobs.read, paper)
    assert caught.value.culprit == A


def test_a_snapshot_of_other_bits_is_refused() -> None:
    outer = state()
    theta, momentum = outer.fragment_bytes(P0)
    digests = {"state_digest": fragment_digest(outer.theta(P0)), "momentum_digest": fragment_digest(outer.momentum(P0))}
    other = state()
    other.load_fragment(P0, Version(4), theta=theta, momentum=momentum, **digests)
    assert other.version(P0) == 4
    with pytest.raises(DigestMismatch):
        other.load_fragment(P0, Version(5), theta=b"\0" * len(theta), momentum=momentum, **digests)
    assert other.version(P0) == 4


def test_two_that_stood_at_one_place_go_on_apart() -> None:
    """A commit changes momentum in place: it must be nobody else's."""
    blobs, one, other = some_blobs(), state(), state()
    other.begin_at(P0, one)
    before = one.momentum(P0).clone()
    other.merge(blobs.order(), blobs.read, MANIFEST)
    other.commit(P0, Version(1))
    assert torch.equal(one.momentum(P0), before)
    assert not torch.equal(other.momentum(P0), before)
