"""The outer state (Theta and momentum) and the two ways it moves: a merge of our own, or an update of somebody's.

It stands apart because it is the one place where the run's state lives as tensors, and because it belongs to one
thread, the worker thread of `runtime/driver.py`: nothing here locks, and nothing here waits. (`check` alone may be
called from any thread: it reads a Theta, and nothing else.) A merge is *staged*: its update waits beside the visible
state until its commit is signed and on disk, so a process that dies in between has lost nothing that anybody saw. A
visible Theta is never changed in place; whoever holds one may keep it.

Memory beyond what is held (Theta, b, r and the last update of every fragment): while merging the running sum and one
decoded contribution; while staged the update and the residual it leaves, in the same room. At the commit the new Theta
takes the room of the residual that went into it.

Formulas: `numerics/README.md`, sections on merge and outer step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from geo_diloco.errors import BlobError, DigestMismatch, FrameError, LocalProtocolError, NonFiniteFrame
from geo_diloco.manifest import CodecSpec, Digest, FragmentId, LateForm, PeerId, RunManifest, Version
from geo_diloco.numerics import codec
from geo_diloco.numerics.fragments import Layout, bytes_from_vector, fragment_digest, vector_from_bytes
from geo_diloco.numerics.gate import check_contribution, cosine, length_max
from geo_diloco.numerics.merge import StreamingMerge, outer_gradient, quick_norm
from geo_diloco.numerics.outer import apply_update, foresee_update, outer_update, residual_after
from geo_diloco.protocol.effects import (
    ApplyUpdate,
    CheckContribution,
    Merge,
    MergeInput,
)
from geo_diloco.protocol.events import ContributionChecked, Merged
from geo_diloco.protocol.messages import BlobRef

ReadBlob = Callable[[BlobRef], bytes]


class MergeError(Exception):
    """A merge that can't be done. `culprit` is the peer whose contribution is to be left out, if one is."""

    def __init__(self, reason: str, culprit: PeerId | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.culprit = culprit


@dataclass(frozen=True, kw_only=True)
class MergeOutcome:
    """A staged outer step. `frame` is the encoded update, the only thing that travels."""

    frame: bytes
    state_digest: Digest
    momentum_digest: Digest
    rbar: float
    """Plain mean of the participants' L2 norms."""
    rho: float | None
    """Cosine with the fragment's last update; none for its first."""
    num_degenerate: int
    """Tensors whose directions cancelled."""

    def answer(self, order: Merge, update: BlobRef) -> Merged:
        """For the core, once the frame is held as `update`."""
        return Merged(
            fragment=order.fragment,
            round=order.round,
            attempt=order.attempt,
            update=update,
            state_digest=self.state_digest,
            momentum_digest=self.momentum_digest,
            rbar=self.rbar,
            rho=self.rho,
        )


@dataclass
class _Fragment:
    version: Version
    theta_N: Tensor
    momentum_N: Tensor | None
    residual_N: Tensor | None = None
    last_update_N: Tensor | None = None
    recent: deque[tuple[int, Tensor]] | None = None
    """(version made, u_hat) of the newest updates; kept only where late work is measured against them."""
    length_max: float | None = None
    """Of a delta, beside this Theta; known once a contribution was checked."""


@dataclass
class _Staged:
    version: Version
    residual_N: Tensor
    update_N: Tensor
    eta: float
    mu: float


class OuterState:
    """Theta per fragment, and where held momentum. Confined to one thread."""

    def __init__(self, layout: Layout, *, with_momentum: bool, with_residual: bool, updates_kept: int = 0) -> None:
        self.layout = layout
        self.with_momentum = with_momentum
        self.with_residual = with_residual
        self._updates_kept = updates_kept
        self._digest = layout.digest
        self._fragments: dict[FragmentId, _Fragment] = {}
        self._staged: dict[FragmentId, _Staged] = {}

    def theta(self, fragment: FragmentId) -> Tensor:
        """The visible Theta_p, float32; shared, not to be changed."""
        return self._held(fragment).theta_N

    def momentum(self, fragment: FragmentId) -> Tensor:
        """b_p, good until the next commit."""
        momentum = self._held(fragment).momentum_N
        if momentum is None:
            raise LocalProtocolError(f"momentum of fragment {fragment} is not held here")
        return momentum

    def version(self, fragment: FragmentId) -> Version:
        return self._held(fragment).version

    def _held(self, fragment: FragmentId) -> _Fragment:
        held = self._fragments.get(fragment)
        if held is None:
            raise LocalProtocolError(f"fragment {fragment} is not loaded")
        return held

    # ---- loading

    def start_fragment(self, fragment: FragmentId, theta_N: Tensor) -> None:
        """Theta_0: version 0, momentum zero."""
        momentum_N = torch.zeros_like(theta_N) if self.with_momentum else None
        self._put(fragment, _Fragment(Version(0), theta_N, momentum_N))

    def load_fragment(
        self,
        fragment: FragmentId,
        version: Version,
        *,
        theta: bytes,
        momentum: bytes | None,
        state_digest: Digest,
        momentum_digest: Digest,
    ) -> Tensor:
        """Take a fragment from snapshot bytes. Raises BlobError on a wrong length, DigestMismatch on other bits."""
        num_elements = self.layout.num_elements[fragment]
        theta_N = vector_from_bytes(theta, num_elements=num_elements)
        _require(theta_N, state_digest, f"Theta of fragment {fragment} at version {version}")
        momentum_N = None
        if self.with_momentum:
            if momentum is None:
                raise BlobError(f"the snapshot has no momentum for fragment {fragment}")
            momentum_N = vector_from_bytes(momentum, num_elements=num_elements)
            _require(momentum_N, momentum_digest, f"momentum of fragment {fragment} at version {version}")
        self._put(fragment, _Fragment(version, theta_N, momentum_N))
        return theta_N

    def begin_at(self, fragment: FragmentId, other: OuterState) -> None:
        """Stand where another one stands, as if it had been followed here: what its merges lost stays its own, and
        momentum is copied, because a commit changes it in place."""
        held = other._held(fragment)
        momentum_N = None if held.momentum_N is None else held.momentum_N.clone()
        self._put(fragment, _Fragment(held.version, held.theta_N, momentum_N))
        recent = self._held(fragment).recent
        if recent is not None:
            recent.extend(held.recent or ())

    def _put(self, fragment: FragmentId, held: _Fragment) -> None:
        if self._updates_kept:
            held.recent = deque(maxlen=self._updates_kept)
        self._fragments[fragment] = held
        self._staged.pop(fragment, None)

    def fragment_bytes(self, fragment: FragmentId) -> tuple[bytes, bytes]:
        """Theta_p and momentum_p as a snapshot holds them (momentum empty where it isn't held)."""
        held = self._held(fragment)
        momentum = b"" if held.momentum_N is None else bytes_from_vector(held.momentum_N)
        return bytes_from_vector(held.theta_N), momentum

    # ---- following

    def apply(self, update: ApplyUpdate, frame: bytes) -> Tensor:
        """Fold a commit's update in and return the new Theta_p. Nothing changes unless every held digest agrees.

        Raises FrameError for a bad frame, DigestMismatch for other bits, LocalProtocolError for a gap in versions.
        """
        held = self._held(update.fragment)
        if update.version == held.version:
            _require(held.theta_N, update.state_digest, f"fragment {update.fragment} version {update.version}")
            return held.theta_N
        if update.version != held.version + 1:
            raise LocalProtocolError(
                f"fragment {update.fragment} is at version {held.version}, the update makes {update.version}"
            )
        update_N = self._decode(frame, update.fragment)
        theta_N, momentum_N = apply_update(held.theta_N, held.momentum_N, update_N, eta=update.eta, mu=update.mu)
        _require(theta_N, update.state_digest, f"fragment {update.fragment} after version {update.version}")
        if momentum_N is not None:
            _require(momentum_N, update.momentum_digest, f"momentum of {update.fragment} after {update.version}")
        self._advance(update.fragment, _Fragment(update.version, theta_N, momentum_N, None, update_N, held.recent))
        return theta_N

    def _decode(self, frame: bytes, fragment: FragmentId, *, out: Tensor | None = None) -> Tensor:
        return codec.decode(
            frame,
            num_elements=self.layout.num_elements[fragment],
            layout_digest=self._digest,
            fragment=fragment,
            out=out,
        )

    def _advance(self, fragment: FragmentId, new: _Fragment) -> None:
        if new.recent is not None and new.last_update_N is not None:
            new.recent.append((new.version, new.last_update_N))
        if not (self.with_residual or self._updates_kept):
            new.last_update_N = None
        self._fragments[fragment] = new
        self._staged.pop(fragment, None)

    # ---- merging

    def check(self, effect: CheckContribution, frame: bytes, codecs: tuple[CodecSpec, ...]) -> ContributionChecked:
        """Whether that contribution's frame, encoded in one of these ways, can be merged as things stand. For any
        thread; takes the memory of a chunk."""
        fragment = effect.id.fragment
        held = self._held(fragment)
        longest = held.length_max
        if longest is None:  # two threads may find it at once, and the same
            longest = held.length_max = length_max(held.theta_N)
        result = check_contribution(
            frame,
            num_elements=self.layout.num_elements[fragment],
            layout_digest=self._digest,
            fragment=fragment,
            specs=codecs,
            length_max=longest,
        )
        return ContributionChecked(effect.id, result.ok, result.reason, result.norm if result.ok else 0.0)

    def merge(self, order: Merge, read: ReadBlob, manifest: RunManifest) -> MergeOutcome:
        """Merge, outer step, encoding; the result is staged. Raises MergeError and changes nothing if it can't be done.

        Memory is O(fragment): contributions are decoded one at a time, in the order given.
        """
        held = self._held(order.fragment)
        if order.version != held.version + 1:
            raise MergeError(f"fragment {order.fragment} is at version {held.version}, not {order.version - 1}")
        momentum_N = self.momentum(order.fragment)
        sync = manifest.sync
        merging = StreamingMerge(self.layout, order.fragment, sync.merge, embeddings=sync.merge_embeddings)
        room_N = torch.empty_like(held.theta_N)
        norms = [self._add(merging, order, each, read, sync.late_form, room_N) for each in order.inputs]
        longest = max(zip(norms, order.inputs, strict=True), key=lambda pair: pair[0])[1].peer if norms else None
        merged = merging.result(portion=order.portion)
        update_N = outer_update(
            merged.gradient, momentum_N, held.residual_N, eta=order.eta, mu=order.mu, out=merged.gradient
        )
        try:
            frame = codec.encode(update_N, order.codec, layout_digest=self._digest, fragment=order.fragment)
        except NonFiniteFrame as exc:
            raise MergeError("the outer step is not finite", longest) from exc
        update_hat_N = self._decode(frame, order.fragment, out=room_N)
        foreseen = foresee_update(held.theta_N, momentum_N, update_hat_N, eta=order.eta, mu=order.mu)
        if not foreseen.is_finite:
            raise MergeError("the outer step is not finite", longest)
        residual_N = residual_after(update_N, update_hat_N, out=update_N)
        self._staged[order.fragment] = _Staged(order.version, residual_N, update_hat_N, order.eta, order.mu)
        return MergeOutcome(
            frame=frame,
            state_digest=foreseen.state_digest,
            momentum_digest=foreseen.momentum_digest,
            rbar=sum(norms) / len(norms) if norms else 0.0,
            rho=None if held.last_update_N is None else cosine(update_hat_N, held.last_update_N),
            num_degenerate=merged.num_degenerate,
        )

    def _add(
        self,
        merging: StreamingMerge,
        order: Merge,
        each: MergeInput,
        read: ReadBlob,
        late_form: LateForm,
        room_N: Tensor,
    ) -> float:
        """One contribution into the merge, decoded into `room_N`; the L2 norm of its delta.

        Whether its codec was agreed is known since `check`.
        """
        fragment = order.fragment
        try:
            frame = read(each.blob)
            delta_N = self._decode(frame, fragment, out=room_N)
        except (FrameError, BlobError) as exc:
            raise MergeError(f"contribution of {each.peer[:8]}: {exc}", each.peer) from exc
        if each.scale != 1.0:
            delta_N.mul_(each.scale)
        try:
            if late_form == "base-relative":
                return merging.add_delta(delta_N, each.weight)
            drift_N = self._drift(each, order)
            merging.add(outer_gradient(delta_N, form="paper", drift=drift_N), each.weight)
        except NonFiniteFrame as exc:
            raise MergeError(f"contribution of {each.peer[:8]}: {exc}", each.peer) from exc
        return quick_norm(delta_N)

    def _drift(self, each: MergeInput, order: Merge) -> Tensor:
        """Theta_now - Theta_base: minus the updates in between. Only the syncer needs it, so its rounding is free."""
        held = self._held(order.fragment)
        drift_N = torch.zeros_like(held.theta_N)
        wanted = range(each.base_version + 1, order.version)
        recent = dict(held.recent or ())
        for version in wanted:
            if version not in recent:
                raise MergeError(f"the base of {each.peer[:8]} is no longer known", each.peer)
            drift_N = drift_N - recent[version]
        return drift_N

    def is_staged(self, fragment: FragmentId, version: Version) -> bool:
        staged = self._staged.get(fragment)
        return staged is not None and staged.version == version

    def commit(self, fragment: FragmentId, version: Version) -> None:
        """The staged step's commit is on disk: make it the visible state."""
        staged = self._staged.get(fragment)
        if staged is None or staged.version != version:
            raise LocalProtocolError(f"no staged step makes version {version} of fragment {fragment}")
        held = self._held(fragment)
        theta_N, momentum_N = apply_update(
            held.theta_N,
            held.momentum_N,
            staged.update_N,
            eta=staged.eta,
            mu=staged.mu,
            theta_out=held.residual_N,  # it is in `staged.update_N`, and nobody else had it
            momentum_out=held.momentum_N,
        )
        self._advance(
            fragment, _Fragment(version, theta_N, momentum_N, staged.residual_N, staged.update_N, held.recent)
        )


def _require(vector_N: Tensor, wanted: Digest, what: str) -> None:
    digest = fragment_digest(vector_N)
    if digest != wanted:
        raise DigestMismatch(f"{what}: digest {digest[:12]}, the commit says {wanted[:12]}")
