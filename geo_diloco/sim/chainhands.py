"""A simulated shell's side of the chain: entries and updates to disk, the fold, fragments from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from geo_diloco.manifest import Digest, Seq, Version
from geo_diloco.protocol.effects import (
    ApplyUpdate,
    Effect,
    FetchEntries,
    FetchFragment,
    KeepEntry,
    Prune,
    SendEntries,
)
from geo_diloco.protocol.events import (
    Applied,
    ApplyFailed,
    EntryArrived,
    EntryStored,
    FragmentReplaced,
    UpdateLost,
)
from geo_diloco.protocol.messages import BlobRef, Commit, FragmentHead
from geo_diloco.sim.fakes import SignedEntry, momentum_after, theta_after

if TYPE_CHECKING:
    from geo_diloco.sim.process import Process

ENTRIES_PER_FETCH = 256


@dataclass(slots=True)
class State:
    """The outer state of one fragment."""

    version: Version
    theta: Digest
    momentum: Digest


class ChainHands:
    """What every peer's shell does."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.outer: list[State] = []
        self.signed: dict[Digest, SignedEntry] = {}
        """Entries that this process has seen, as signed."""
        self._wanted: dict[Digest, set[Digest]] = {}
        """Updates that are being fetched, and the entries that name them."""
        self._line_free_at = 0

    def take_state(self, heads: Sequence[FragmentHead]) -> None:
        self.outer = [State(head.version, head.state_digest, head.momentum_digest) for head in heads]

    def do(self, effect: Effect) -> bool:
        process = self._process
        match effect:
            case FetchEntries():
                self._from_someone(lambda donor: self._take_entries(donor, effect.from_seq))
            case KeepEntry():
                signed = self.signed[effect.digest]
                process.write(lambda: self._kept(signed, effect.update))
            case SendEntries():
                self._send_entries(effect)
            case ApplyUpdate():
                process.on_fold(lambda: self._apply(effect))
            case Prune():
                process.disk.blobs.difference_update(update.digest for update in effect.updates)
            case FetchFragment():
                ms = process.clock.between(process.world.plan.transfer_ms)
                process.clock.after(ms, lambda: self._fetch_fragment(effect))
            case _:
                return False
        return True

    # -- entries --------------------------------------------------------------------------------------------------

    def arrived(self, signed: SignedEntry) -> None:
        """From a link, or from a donor."""
        self.signed.setdefault(signed.digest, signed)
        self._process.handle(EntryArrived(signed.entry, signed.digest, signed.signer))

    def entries_from(self, seq: int) -> list[SignedEntry]:
        """Of the chain that counts here."""
        found: list[SignedEntry] = []
        digest = self._process.core.election.digest_at(Seq(seq))
        while digest is not None and digest in self.signed and len(found) < ENTRIES_PER_FETCH:
            found.append(self.signed[digest])
            digest = self._process.core.election.digest_at(Seq(seq + len(found)))
        return found

    def _from_someone(self, ask: Callable[[Process], bool]) -> None:
        """Ask over HTTP until it works; `ask` answers whether it did."""
        process = self._process

        def attempt() -> None:
            if not process.alive:
                return
            donors = [] if process.frozen else process.world.donors(process)
            if not any(ask(donor) for donor in donors[:1]):
                process.clock.after(process.clock.between((100, 800)), attempt)

        process.clock.after(process.clock.between(process.world.plan.delay_ms), attempt)

    def _take_entries(self, donor: Process, from_seq: int) -> bool:
        while entries := donor.chain.entries_from(from_seq):
            for signed in entries:
                self.arrived(signed)
            from_seq += len(entries)
        return True

    def _send_entries(self, effect: SendEntries) -> None:
        """Records on the link, then updates one after the other."""
        process = self._process
        link = process.links.get(effect.to)
        if link is None or not link.up:
            return
        receiver, after = link.other(process), 0
        for digest in effect.digests:
            signed = self.signed.get(digest)
            if signed is None:
                continue
            link.deliver_entry(process, signed)
            if effect.upload and isinstance(signed.entry, Commit) and signed.entry.update.digest in process.disk.blobs:
                after += process.clock.between(process.world.plan.transfer_ms)
                update = signed.entry.update
                process.clock.after(after + 100, lambda update=update: self._push(receiver, update))  # type: ignore[misc]

    def _push(self, receiver: Process, update: BlobRef) -> None:
        here, world = self._process, self._process.world
        if here.alive and not here.frozen and not receiver.frozen and world.network.can_dial(here.host, receiver.host):
            receiver.chain.update_arrived(update.digest)

    # -- updates --------------------------------------------------------------------------------------------------

    def _kept(self, signed: SignedEntry, update: BlobRef | None) -> None:
        process = self._process
        process.disk.write(signed)
        if update is None or update.digest in process.disk.blobs:
            process.handle(EntryStored(signed.digest))
            return
        fetching = update.digest in self._wanted
        self._wanted.setdefault(update.digest, set()).add(signed.digest)
        if not fetching:
            self._fetch_soon(update)

    def _fetch_soon(self, update: BlobRef) -> None:
        process = self._process
        process.clock.after(self._transfer_ms(), lambda: self._fetch(update))

    def _transfer_ms(self) -> int:
        """Until an update that is asked for now is here."""
        process = self._process
        plan, now = process.host.plan, process.clock.now
        if not plan.download_ms:
            return process.clock.between(process.world.plan.transfer_ms)
        self._line_free_at = max(now + 2 * plan.delay_ms, self._line_free_at) + plan.download_ms
        return self._line_free_at - now

    def _fetch(self, update: BlobRef) -> None:
        process, world = self._process, self._process.world
        if not process.alive or update.digest not in self._wanted:
            return
        mirrors = [] if process.frozen else world.mirrors(process)
        donors = [donor for donor in mirrors if update.digest in donor.disk.blobs]
        if not donors and not any(mirror.core.serves for mirror in mirrors):
            process.clock.after(process.clock.between((100, 800)), lambda: self._fetch(update))
        elif not donors or world.mishap(world.plan.odds.update_lost):
            for digest in sorted(self._wanted.pop(update.digest)):
                process.handle(UpdateLost(digest, "not kept"))
        else:
            self.update_arrived(update.digest)

    def update_arrived(self, update: Digest) -> None:
        """Whole and verified; if nobody here waits for it, it is not taken."""
        process = self._process
        if process.alive and update in self._wanted:
            process.write(lambda: self._update_stored(update))

    def _update_stored(self, update: Digest) -> None:
        self._process.disk.blobs.add(update)
        for digest in sorted(self._wanted.pop(update, ())):
            self._process.handle(EntryStored(digest))

    # -- fold -----------------------------------------------------------------------------------------------------

    def _apply(self, effect: ApplyUpdate) -> None:
        process, state = self._process, self.outer[effect.fragment]
        theta = theta_after(state.theta, effect.update.digest)
        fits = state.version + 1 == effect.version and theta == effect.state_digest
        odds = process.world.plan.odds
        if not fits and not (odds.apply_failed or odds.update_lost):
            raise AssertionError(f"host {process.host.index}: update {effect.version} does not fit {state.version}")
        if not fits or process.world.mishap(odds.apply_failed):
            process.handle(ApplyFailed(effect.fragment, effect.version, "digest differs"))
            return
        assert effect.update.digest in process.disk.blobs, "an update that is not here"
        self.reach(effect.fragment, effect.version, theta, momentum_after(state.momentum, effect.update.digest))
        process.handle(Applied(effect.fragment, effect.version, theta))

    def _fetch_fragment(self, effect: FetchFragment) -> None:
        """From this disk, if it has all that it takes; else from somebody's snapshot."""
        process = self._process
        if not (process.alive and process.disk.holds_up_to(process.core.ledger.head_digest) and self._replace(effect)):
            self._from_someone(lambda donor: self._replace(effect))

    def _replace(self, effect: FetchFragment) -> bool:
        process = self._process
        ledger = process.core.ledger
        if ledger.heads[effect.fragment].version < effect.version:
            return False

        def replaced() -> None:
            head = process.core.ledger.heads[effect.fragment]
            self.outer[effect.fragment].version = Version(-1)  # from wherever it was
            self.reach(effect.fragment, head.version, head.state_digest, head.momentum_digest)
            process.handle(FragmentReplaced(effect.fragment, head.version, head.state_digest))

        process.on_fold(replaced)
        return True

    def reach(self, fragment: int, version: Version, theta: Digest, momentum: Digest, *, own: bool = False) -> None:
        """`own`: as syncer we made it; it need not be durable."""
        state = self.outer[fragment]
        assert version > state.version, f"fragment {fragment} went from {state.version} to {version}"
        state.version, state.theta, state.momentum = version, theta, momentum
        if not own:
            self._process.world.state(self._process, fragment, version, theta)
