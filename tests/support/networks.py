"""What a test of cuts needs of a network, whichever kind it is: real namespaces, or relays on loopback."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Protocol


class Network(Protocol):
    """Hosts, counted from 0, that reach each other until they are cut. A context manager."""

    def __enter__(self) -> Network: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def inside(self, host: int) -> AbstractContextManager[None]:
        """What this thread starts, dials or binds inside is that host's."""

    def started(self, host: int, pid: int) -> None:
        """That process was started inside."""

    def flags(self, host: int) -> tuple[str, ...]:
        """With which a peer on that host can be reached by the others."""

    def cut(self, one: Collection[int], other: Collection[int]) -> None:
        """From now on nothing passes between hosts of the two sides, either way, and nobody is told."""

    def heal(self) -> None:
        """Everything passes again."""
