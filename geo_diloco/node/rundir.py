"""A peer's folder: what lies where, and that only one process at a time has it.

A founder's folder is the run; a learner's is one of several slots, so that four learners on one machine are four
peers with four identities. The lock is the kernel's: it is gone with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from geo_diloco.config import manifest_from_bytes, state_root
from geo_diloco.errors import ManifestError, RemoteProtocolError, RunDirError
from geo_diloco.manifest import PeerId, RunId, RunManifest, run_id_from_bytes
from geo_diloco.node.doubles import Presence
from geo_diloco.protocol.messages import Snapshot
from geo_diloco.runtime.disk import remove_drafts
from geo_diloco.runtime.wire import Signed, open_snapshot

SLOTS_MAX = 256


@dataclass
class RunDir:
    """A folder that this process holds. `release` lets go of it."""

    root: Path
    _lock_fd: int = field(default=-1, repr=False)
    _presence: Presence | None = field(default=None, repr=False)

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def key(self) -> Path:
        return self.root / "key.pem"

    @property
    def identity_key(self) -> Path:
        """Of a peer that did not found the run."""
        return self.root / "identity.key"

    @property
    def chain(self) -> Path:
        return self.root / "chain.jsonl"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def joined(self) -> Path:
        """The snapshot this peer joined with, as signed; its blobs are kept, so that a replay has a beginning."""
        return self.root / "joined.json"

    @property
    def joining(self) -> Path:
        """The snapshot that this peer is fetching, as signed; gone once it has joined."""
        return self.root / "joining.json"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def tape(self) -> Path:
        return self.root / "tape.jsonl"

    @property
    def log(self) -> Path:
        return self.root / "log.jsonl"

    @property
    def layout(self) -> Path:
        return self.root / "layout.json"

    @property
    def token(self) -> Path:
        return self.root / "token"

    @property
    def invite(self) -> Path:
        return self.root / "invite.txt"

    @property
    def ports(self) -> Path:
        """Where this peer listened last."""
        return self.root / "ports.json"

    @property
    def addresses(self) -> Path:
        """What was said about addresses when the run was founded, for the next start."""
        return self.root / "addresses.json"

    @property
    def contacts(self) -> Path:
        """Where other peers could be reached lately."""
        return self.root / "contacts.json"

    @property
    def quota(self) -> Path:
        """Bulk of today."""
        return self.root / "quota.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def vote(self) -> Path:
        """What this disk has voted, which must never be forgotten, nor be in any copy of the folder."""
        return self.root / "vote.json"

    @property
    def directory(self) -> Path:
        """p2pd's own files."""
        return self.root / "dht"

    def num_bytes(self) -> int:
        """What this peer's own files take on the disk, as far as that can be read. May take long."""
        parts = (self.chain, self.tape, self.log, self.blobs, self.state, self.checkpoint)
        return sum(_num_bytes(part) for part in parts)

    def appear_as(self, peer: PeerId) -> None:
        """Before it goes on the air: this process, and no other one here, is that peer until `release`. Raises
        RunDirError if another is it, which has a copy of this folder, or the original."""
        if self._presence is None:
            self._presence = Presence(peer, self.root)

    def release(self) -> None:
        if self._presence is not None:
            self._presence.end()
            self._presence = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def read_manifest(run_dir: RunDir) -> RunManifest:
    """The manifest of a run directory. Raises RunDirError if there is none."""
    try:
        return manifest_from_bytes(run_dir.manifest.read_bytes())
    except OSError as exc:
        raise RunDirError(f"{run_dir.root} is not a run directory: no manifest.json") from exc
    except ManifestError as exc:
        raise RunDirError(f"{run_dir.manifest}: {exc}") from exc


def _num_bytes(path: Path) -> int:
    try:
        if not path.is_dir():
            return path.stat().st_size
        return sum(_num_bytes(each) for each in path.iterdir())
    except OSError:  # gone meanwhile, or never there
        return 0


def joined_snapshot(run_dir: RunDir) -> Snapshot | None:
    """What this peer joined with; it was checked then."""
    try:
        return open_snapshot(Signed.from_line(run_dir.joined.read_bytes()))
    except (OSError, RemoteProtocolError):
        return None


def disk_failure(root: Path, failure: OSError) -> RunDirError:
    """What the operating system said about a peer's folder, for the person whose folder it is."""
    reason = failure.strerror or str(failure) or type(failure).__name__
    where = f" ({failure.filename})" if failure.filename and str(failure.filename) != str(root) else ""
    is_full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "free some space and go on" if is_full else "see that it can be written"
    return RunDirError(f"run directory {root}: {reason.lower()}{where}; {hint}, or give another --run-dir")


@contextlib.contextmanager
def disk_failures(root: Path) -> Iterator[None]:
    """OSError becomes RunDirError, except what is a network's."""
    try:
        yield
    except (TimeoutError, ConnectionError):
        raise
    except OSError as exc:
        raise disk_failure(root, exc) from exc


def default_root(run: RunId) -> Path:
    return state_root() / "runs" / run


def hold(root: Path) -> RunDir:
    """Create the folder if need be and hold it. Raises RunDirError if another process does, or it can't be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise RunDirError(f"run directory {root}: {exc.strerror or exc}; give a folder you can write to") from exc
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(handle)
        if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            reason = exc.strerror or str(exc)
            raise RunDirError(f"run directory {root} can't be locked: {reason}; give a folder on another disk") from exc
        raise RunDirError(f"run directory {root} is in use by another process; wait for its end, or end it") from exc
    run_dir = RunDir(root, handle)
    for folder in (root, run_dir.state):
        with contextlib.suppress(OSError):
            remove_drafts(folder)
    return run_dir


def check_is_members(folder: RunDir, run: RunId) -> None:
    """Nothing of another peer's may be written over: what a founder's folder holds is the run itself."""
    if folder.key.exists():
        raise RunDirError(f"{folder.root} is a founder's folder; give this peer one of its own")
    try:
        held = run_id_from_bytes(folder.manifest.read_bytes())
    except FileNotFoundError:
        return
    except OSError as exc:
        raise disk_failure(folder.root, exc) from exc
    if held != run:
        raise RunDirError(f"{folder.root} holds run {held[:12]}, the invite is for {run[:12]}; give another --run-dir")


def hold_slot(run: RunId, run_dir: Path | None) -> RunDir:
    """A learner's or follower's folder: the one asked for, or the run's first free slot among this user's state.

    Raises RunDirError if it is in use, or is the folder of a founder or of another run.
    """
    if run_dir is not None:
        check_is_members(RunDir(run_dir), run)
        return hold(run_dir)
    for number in range(1, SLOTS_MAX + 1):
        try:
            return hold(default_root(run) / f"peer-{number}")
        except RunDirError:
            if number == SLOTS_MAX:
                raise
    raise AssertionError("unreachable")
