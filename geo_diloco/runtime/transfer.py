"""Moving a blob over plain HTTP, from the side that dials: what an upload and a fetch have in common.

A transfer has no time limit, only a progress deadline: it may take a night, but it may not stand still. It resumes
piece by piece, and within a piece, from what the other side (or the store here) already holds, over as many streams as
help and from as many donors as there are (`flow.py`). It fails in one of two ways: `TransferError`, try later and it
goes on where it stopped, or `TransferRefused`, this will never work. The two are `upload.py` and `fetch.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

from geo_diloco.errors import TransferError
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.board import Direction, Line
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.flow import Flow
from geo_diloco.runtime.pieces import PIECE_BYTES, BlobStatus, piece_range, status_from_headers
from geo_diloco.runtime.routes import Route
from geo_diloco.runtime.runs import NotYetError, Way
from geo_diloco.runtime.session import Deadline, Response, TransferRefused, asking, raise_for_status
from geo_diloco.runtime.spans import Missing, Span
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.streams import STREAMS_MAX

ROUNDS_MAX = 5
"""So often is gone on if all of a blob was moved and it is not there: a piece was wrong, or gave way to others."""


@dataclass
class Move:
    """What an upload and a fetch have in common."""

    bulk: Bulk
    ref: BlobRef
    store: BlobStore
    stall_s: float
    missing: Missing
    held: int = 0
    """Bytes that were there before."""
    num_moved: int = 0
    began_at: float = field(default_factory=monotonic)
    on_sent: Callable[[], None] = lambda: None
    sent_at: float = 0.0

    async def run(self, ways: Sequence[tuple[Way, float]], direction: Direction, what: str) -> dict[str, TransferError]:
        board = self.bulk.lanes.board
        self.line: Line = board.begin(what or f"blob {self.ref.digest[:12]}", direction, self.ref.size, done=self.held)
        lanes = self.bulk.lanes
        streams_max = lanes.fetching_streams_max if direction == "down" else STREAMS_MAX
        self.flow = Flow(self.missing, routes=self.bulk.routes, streams_max=streams_max, on_sent=self._sent)
        try:
            return await self.flow.run(ways)
        finally:
            board.end(self.line)

    def moved(self, way: Way, size: int, span: Span | None = None) -> None:
        """So many bytes went over the wire, of a span or of an index."""
        self.num_moved += size
        if span is not None:
            self.flow.moved(way, size, span)
            self.bulk.lanes.board.moved(self.line, size, way.url)
            self.line.resumed = max(self.line.resumed, self.flow.resumed)

    def _sent(self) -> None:
        self.sent_at = monotonic()
        self.on_sent()

    def bytes_per_s(self) -> int:
        return int(self.num_moved / max(monotonic() - self.began_at, 1e-6))

    def upload_bytes_per_s(self, route: Route) -> int:
        """What the link does for uploads that follow each other: one that began before the last had its answer is
        timed from that answer on, but for no less than it took to send; for another a round trip of waiting is none of
        the link's work."""
        now = monotonic()
        idle_s = 0.0 if route.upload_over_at > self.began_at else route.round_trip_s
        took_s = now - max(self.began_at, route.upload_over_at) - idle_s
        took_s = max(took_s, self.sent_at - self.began_at, 1e-6)
        route.upload_over_at = now
        return int(self.num_moved / took_s)

    @asynccontextmanager
    async def timed(self, base_url: str) -> AsyncIterator[None]:
        """A small question is asked, and answered by the end of this."""
        begin = monotonic()
        yield
        self.bulk.routes.to(base_url).answered(monotonic() - begin)

    async def status_there(self, base_url: str) -> BlobStatus:
        """What of the blob is there. Raises TransferError, `NotYetError` or TransferRefused."""
        url = self.url(base_url)
        async with (
            self.timed(base_url),
            asking(url),
            Deadline(self.stall_s),
            self.bulk.session.head(url, allow_redirects=False) as response,
        ):
            await check(response)
            return status_from_headers(response.headers, self.ref)

    def url(self, base_url: str) -> str:
        return f"{base_url}/v1/blobs/{self.ref.digest}"

    def url_of(self, base_url: str, span: Span) -> str:
        """Of the pieces that a span touches."""
        pieces = span.pieces()
        run = str(pieces[0]) if len(pieces) == 1 else f"{pieces[0]}-{pieces[-1]}"
        return f"{self.url(base_url)}/{run}"

    def within(self, span: Span) -> tuple[int, int, int]:
        """Its first and last byte as counted from the begin of the pieces that it touches, and their size."""
        pieces = span.pieces()
        base = pieces[0] * PIECE_BYTES
        return span.begin - base, span.end - 1 - base, piece_range(self.ref.size, pieces[-1])[1] - base


async def check(response: Response) -> None:
    """As `raise_for_status`, but what isn't there may come."""
    try:
        await raise_for_status(response)
    except TransferRefused as exc:
        if response.status == 404:
            raise NotYetError(str(exc)) from exc
        raise


def final(failure: TransferError) -> TransferError:
    """What was waited for and did not come is refused."""
    return TransferRefused(str(failure)) if isinstance(failure, NotYetError) else failure
