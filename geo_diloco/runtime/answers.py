"""Answers and bodies as every part of the server writes and reads them: bounded, watched, refused by name.

A body has a progress deadline and no total one. Its bytes are counted here, before and while they are read, because
the HTTP library does not. A refusal is one line of JSON, `{"error": word, "detail": text}`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from aiohttp import ClientPayloadError, web

from geo_diloco.errors import BlobError
from geo_diloco.runtime.session import STALL_S, Deadline

WRITE_BYTES = 64 << 10
_NUMBER = re.compile(r"[0-9]{1,15}")


class Refusal(Exception):
    """Becomes the answer."""

    def __init__(self, status: int, error: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.body = json.dumps({"error": error, "detail": detail})


async def _uncounted(size: int) -> None:
    """What is not bulk is neither counted nor held back."""


async def _unshaped(size: int, deadline: Deadline) -> None:
    """What is not bulk goes as it is."""


async def write_answer(
    request: web.Request,
    parts: AsyncIterator[memoryview] | list[bytes],
    *,
    status: int = 200,
    headers: dict[str, str],
    content_type: str = "application/octet-stream",
    portion: int = WRITE_BYTES,
    sending: Callable[[int, Deadline], Awaitable[None]] = _unshaped,
) -> web.StreamResponse:
    """An answer that whoever asked has to read: one that takes nothing for a while is let go. If a part can't be had
    after all the connection ends, so that nobody takes what came for the whole."""
    response = web.StreamResponse(status=status, headers=headers)
    response.content_type = content_type
    if isinstance(parts, list):
        response.content_length = sum(map(len, parts))
    try:
        await response.prepare(request)
        async with Deadline(STALL_S) as deadline:
            deadline.watch(request.transport)
            async for part in _each(parts):
                for begin in range(0, len(part), portion):
                    chunk = part[begin : begin + portion]
                    await sending(len(chunk), deadline)
                    await response.write(chunk)
                    deadline.touch()
        await response.write_eof()
    except (TimeoutError, BlobError, ConnectionError):
        if request.transport is not None:
            request.transport.abort()
    return response


async def _each(parts: AsyncIterator[memoryview] | list[bytes]) -> AsyncIterator[memoryview]:
    if isinstance(parts, list):
        for part in parts:
            yield memoryview(part)
    else:
        async for each in parts:
            yield each


async def read_body(
    request: web.Request, length: int, *, came: Callable[[int], Awaitable[None]] = _uncounted
) -> AsyncGenerator[bytes]:
    """What a request brings: exactly `length` bytes in chunks as they come. Refused if there are fewer, or more, or
    none for a while."""
    taken = 0
    try:
        while taken < length:
            async with asyncio.timeout(STALL_S):
                chunk = await request.content.readany()
            if not chunk:
                raise Refusal(400, "truncated", f"{taken} bytes came, {length} were declared")
            taken += len(chunk)
            if taken > length:
                raise Refusal(413, "too-large", f"more than the {length} bytes declared")
            await came(len(chunk))
            yield chunk
    except TimeoutError as exc:
        raise Refusal(408, "stalled", f"no byte came for {STALL_S:.0f} s") from exc
    except (ConnectionError, ClientPayloadError) as exc:
        raise Refusal(400, "truncated", f"{taken} bytes came, {length} were declared") from exc


# ---- refusals --------------------------------------------------------------------------------------------------


@web.middleware
async def refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Also for paths and methods that don't exist: every refusal is one line of JSON."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return web.Response(status=refusal.status, text=refusal.body, content_type="application/json")
    except web.HTTPError as exc:
        body = json.dumps({"error": "no-such-thing", "detail": f"{request.method} {request.path[:200]}: {exc.reason}"})
        return web.Response(status=exc.status, text=body, content_type="application/json")


def check_length(request: web.Request, wanted: int) -> None:
    declared = request.content_length
    if declared is None:
        raise Refusal(411, "no-length", "Content-Length wanted")
    if declared != wanted:
        status = 413 if declared > wanted else 400
        raise Refusal(status, "wrong-length", f"Content-Length {declared}, wanted {wanted}")


def number(text: str, name: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise Refusal(400, "bad-number", f"{name}={text[:40]!r} is not a whole number")
    return int(text)
