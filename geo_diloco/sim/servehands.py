"""A simulated shell's side of serving: seals, contributions that come in, merges, measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_diloco.manifest import FragmentId, PeerId
from geo_diloco.protocol.effects import (
    AcceptBlob,
    Announce,
    CheckContribution,
    Effect,
    Evaluate,
    ForgetBlob,
    Merge,
    Seal,
)
from geo_diloco.protocol.events import (
    BlobArrived,
    ContributionChecked,
    Evaluated,
    Merged,
    MergeFailed,
    Sealed,
    SnapshotLoaded,
)
from geo_diloco.protocol.messages import BlobRef, Commit
from geo_diloco.sim.fakes import SignedEntry, fake_cosine, fake_digest, momentum_after, theta_after

if TYPE_CHECKING:
    from geo_diloco.sim.process import Process


class ServeHands:
    """What a syncer's shell does."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.accepted: dict[BlobRef, PeerId] = {}
        self.arrived: set[BlobRef] = set()
        self._merge_free_at = 0
        self._sealed: dict[int, SignedEntry] = {}
        self._snapshot: SnapshotLoaded | None = None

    def do(self, effect: Effect) -> bool:
        process = self._process
        clock = process.clock
        match effect:
            case Seal():
                signed = SignedEntry(effect.entry, fake_digest(process.boot, effect.entry), process.peer)
                process.write(lambda: self._on_disk(signed))
            case Announce():
                signed = self._sealed[effect.seq]
                for peer in sorted(process.links):
                    process.links[peer].deliver_entry(process, signed)
            case AcceptBlob():
                self.accepted[effect.blob] = effect.peer
                if effect.blob in self.arrived:
                    process.handle_after(0, BlobArrived(effect.blob))
            case ForgetBlob():
                if effect.blob in self.accepted or effect.blob in self.arrived:
                    self.accepted.pop(effect.blob, None)
                    self.arrived.discard(effect.blob)
                elif process.learn is not None:
                    return False
            case CheckContribution():
                ok = effect.blob.digest not in process.world.bad_blobs
                checked = ContributionChecked(effect.id, ok, "" if ok else "NaN scale", 1.0 if ok else 0.0)
                process.handle_after(clock.between(process.world.plan.times.check), checked)
            case Merge():
                self._merge_free_at = max(clock.now, self._merge_free_at) + clock.between(
                    process.world.plan.times.merge
                )
                clock.at(self._merge_free_at, lambda: self._merge(effect) if process.alive else None)
            case Evaluate():
                loss = None if clock.random.random() < 0.1 else 1.0 + clock.random.random()
                process.handle_after(clock.between((50, 1_500)), Evaluated(effect.seq, loss))
            case _:
                return False
        return True

    def _on_disk(self, signed: SignedEntry) -> None:
        """A process that dies now has the entry on disk and told nobody."""
        process, entry = self._process, signed.entry
        process.disk.write(signed)
        process.chain.signed[signed.digest] = signed
        self._sealed[entry.header.seq] = signed
        process.world.sealed(process, signed)
        if isinstance(entry, Commit):
            process.chain.reach(entry.fragment, entry.version, entry.state_digest, entry.momentum_digest, own=True)
        process.handle_after(process.clock.between((0, 5)), Sealed(entry.header.term, entry.header.seq, signed.digest))

    def _merge(self, effect: Merge) -> None:
        process, world = self._process, self._process.world
        state = process.chain.outer[effect.fragment]
        assert effect.inputs and list(effect.inputs) == sorted(effect.inputs, key=lambda each: each.peer)
        if not process.core.serves:
            return
        assert effect.version == state.version + 1, "a merge that nobody can commit"
        assert all(each.blob in self.arrived for each in effect.inputs), "bytes that are not here"
        if world.mishap(world.plan.odds.merge_failed):
            culprit = process.clock.random.choice([None, effect.inputs[0].peer])
            process.handle(MergeFailed(effect.fragment, effect.round, effect.attempt, "disk full", culprit))
            return
        update = fake_digest("update", state.theta, effect.inputs, effect.eta, effect.mu)
        process.disk.blobs.add(update)
        merged = Merged(
            fragment=FragmentId(effect.fragment),
            round=effect.round,
            attempt=effect.attempt,
            update=BlobRef(update, 1_000),
            state_digest=theta_after(state.theta, update),
            momentum_digest=momentum_after(state.momentum, update),
            rbar=1.0,
            rho=None if effect.version == 1 else fake_cosine(update),
        )
        process.handle(merged)

    # -- what others reach over HTTP ------------------------------------------------------------------------------

    def upload_ended(self, blob: BlobRef) -> bool:
        """Every piece is here; false if the blob isn't announced."""
        if blob not in self.accepted:
            return False
        self.arrived.add(blob)
        self._process.handle_after(0, BlobArrived(blob))
        return True

    def snapshot_now(self) -> SnapshotLoaded | None:
        """A durable one: of now if the outer state stands still, else the last one that was asked for."""
        process = self._process
        ledger = process.core.state_ledger()
        if ledger is not None and 1 <= ledger.seq <= process.core.ledger.seq:
            self._snapshot = process.snapshot_from(ledger)
        return self._snapshot
