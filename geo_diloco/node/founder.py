"""A peer that others can reach as its owner sees it, from the owner's thread, and the founder among them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from geo_diloco.config import PeerConfig
from geo_diloco.manifest import RunManifest
from geo_diloco.node.addresses import as_before
from geo_diloco.node.founding import NodeParts, discard_if_never_founded, prepare_founder
from geo_diloco.node.inviting import FounderInfo
from geo_diloco.node.reachable import ReachableNode
from geo_diloco.node.rundir import disk_failures
from geo_diloco.node.thread import NodeThread
from geo_diloco.runtime.dht import load_library

__all__ = ["Founder", "FounderInfo", "Reachable"]


LEAVE_S = 30.0
"""What it does then is bounded by less; only what can't be bounded, such as a disk, takes longer."""


class Reachable:
    """A founder or a standby, on its way up, on the air or gone; a context manager."""

    _node: ReachableNode

    def __init__(self, thread: NodeThread) -> None:
        self._thread = thread
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def failure(self) -> BaseException | None:
        """What ended the peer, if something did."""
        return self._node.failure

    @property
    def is_finished(self) -> bool:
        return self._node.finished.is_set()

    @property
    def serves(self) -> bool:
        """Whether it is the run's syncer now."""
        return self._node.station.core.serves

    @property
    def num_connected(self) -> int:
        """Peers with a control connection."""
        return self._node.num_connected

    def wait_finished(self, timeout_s: float | None = None) -> bool:
        """Until the run is finished; False if time is up first. Raises what ended the peer, if something did."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_finished:
            if self.failure is not None:
                raise self.failure
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def status(self) -> dict[str, Any]:
        """As `GET /v1/status`."""

        async def ask() -> dict[str, Any]:
            return self._node.status()

        return self._thread.wait(ask(), timeout_s=10.0)

    def close(self) -> None:
        """Leave. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            node = getattr(self, "_node", None)
            if node is not None:
                self._thread.wait(node.leave("closed by its owner"), timeout_s=LEAVE_S, doing="leave in good order")
        finally:
            self._thread.stop()
            self._let_go()

    def _let_go(self) -> None:
        """Of the folder."""


class Founder(Reachable):
    """A run founded (or resumed) by this process. Safe from the caller's thread."""

    def __init__(
        self,
        source: Path | RunManifest,
        config: PeerConfig,
        *,
        quiet: bool = True,
        check: Callable[[], None] = lambda: None,
        preparing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`check` is called while starting, which may wait for bootstraps for ever; what it raises ends the start.
        `preparing` is entered while the model is built, when nothing has to be undone yet."""
        with preparing():
            load_library()
            self._parts = prepare_founder(source, config, quiet=quiet)
        super().__init__(NodeThread("geo_diloco founder"))
        try:
            with disk_failures(self._parts.run_dir.root):
                config = as_before(self._parts.run_dir, config)
                self._node = self._thread.wait(_make(self._parts, config), check=check)
                self.info = self._thread.wait(self._node.start(), check=check)
        except BaseException:
            self.close()
            raise

    @property
    def invite(self) -> str:
        return self.info.invite

    @property
    def run_dir(self) -> Path:
        return self.info.run_dir

    def _let_go(self) -> None:
        self._parts.log.close()
        discard_if_never_founded(self._parts)
        self._parts.run_dir.release()


async def _make(parts: NodeParts, config: PeerConfig) -> ReachableNode:
    return ReachableNode(parts, config)
