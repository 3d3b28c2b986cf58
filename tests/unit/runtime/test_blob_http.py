from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from blake3 import blake3

from geo_diloco.errors import ConfigError, RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import Digest, RunId
from geo_diloco.runtime import answers, http
from geo_diloco.runtime.http import HttpServer
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.pieces import BlobStatus, headers_from_status
from geo_diloco.runtime.session import (
    fetch_entries,
    fetch_layout,
    fetch_manifest,
    fetch_snapshot,
    fetch_status,
)
from geo_diloco.runtime.store import PIECE_BYTES, BlobStore, blob_ref, piece_digests
from geo_diloco.runtime.wire import seal_snapshot

from .samples import MANIFEST, RUN, RememberingPort, Served, bytes_of, chain_of, served, snapshot

BIG = bytes_of(2 * PIECE_BYTES + 1000)
BIG_REF = blob_ref(BIG)
BIG_INDEX = b"".join(piece_digests(BIG))
SMALL = b"a small blob"
SMALL_REF = blob_ref(SMALL)
ME = Identity.generate()


def test_the_disk_is_waited_for_only_where_a_blob_must_outlive_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    honest = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), honest(handle))[1])

    async def talk(it: Served) -> None:
        brief = blob_ref(b"another small blob")
        it.port.brief.add(brief.digest)
        for ref, data, waits in ((SMALL_REF, SMALL, True), (brief, b"another small blob", False)):
            it.port.announce(ref)
            synced.clear()
            assert (await ask(it, "PUT", f"/v1/blobs/{ref.digest}/0", data))[0] == 200
            assert it.port.arrived[-1] == ref and it.store.get(ref) == data
            assert bool(synced) is waits

    with_server(tmp_path, talk)


def test_who_goes_away_before_the_answer_begins_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    answered: list[web.StreamResponse] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        answered.append(await answers.write_answer(request, [SMALL], headers={}))
        return answered[-1]

    async def talk() -> None:
        app = web.Application()
        app.router.add_get("/", answer)
        async with TestServer(app) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert await reader.read() == b""
            writer.close()

    asyncio.run(talk())
    assert len(answered) == 1 and not caplog.records


def piece(i: int) -> bytes:
    return BIG[i * PIECE_BYTES : (i + 1) * PIECE_BYTES]


def with_server(tmp_path: Path, talk: Callable[[Served], Awaitable[None]]) -> Served:
    async def run() -> Served:
        async with served(BlobStore(tmp_path)) as it:
            await talk(it)
            return it

    return asyncio.run(run())


async def ask(
    it: Served, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    async with it.session.request(method, f"{it.url}{path}", data=body, headers=headers or {}) as response:
        return response.status, dict(response.headers), await response.read()


async def error_of(it: Served, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    sent = {key.replace("_", "-"): value for key, value in headers.items()}
    status, _, answer = await ask(it, method, path, body, sent)
    assert b"\n" not in answer
    return status, json.loads(answer)["error"]


async def raw(it: Served, text: bytes) -> bytes:
    """The first line of the answer to exactly these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(it.url.rsplit(":", 1)[1]))
    writer.write(text)
    async with asyncio.timeout(10):
        answer = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return answer


async def cut_off(it: Served, text: bytes) -> None:
    """Say this and go; returns when the other end has gone too."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(it.url.rsplit(":", 1)[1]))
    writer.write(text)
    writer.write_eof()
    async with asyncio.timeout(10):
        await reader.read()
    writer.close()
    await writer.wait_closed()


# ---- small questions


def test_a_run_is_fetched_by_its_hash(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        assert await fetch_manifest(it.session, it.url, RUN) == MANIFEST
        with pytest.raises(RefusedError, match="serves run"):
            await fetch_manifest(it.session, it.url, RunId("0" * 40))

    with_server(tmp_path, talk)


def test_a_layout_is_fetched_by_its_hash(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        it.port.layout = b'{"tensors":[]}'
        digest = Digest(blake3(it.port.layout).hexdigest())
        assert await fetch_layout(it.session, it.url, digest) == '{"tensors":[]}'
        it.port.layout = b'{"tensors":[1]}'
        with pytest.raises(RemoteProtocolError, match="another layout"):
            await fetch_layout(it.session, it.url, digest)

    with_server(tmp_path, talk)


def test_entries_are_fetched_as_signed_and_in_bounded_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(ME, 6)

    async def talk(it: Served) -> None:
        it.port.entries = chain
        assert await fetch_entries(it.session, it.url, 0) == chain
        assert await fetch_entries(it.session, it.url, 2, limit=3) == chain[2:5]
        assert await fetch_entries(it.session, it.url, 6) == []
        monkeypatch.setattr(http, "ENTRIES_PER_ANSWER_MAX", 4)
        assert await fetch_entries(it.session, it.url, 0) == chain[:4]
        monkeypatch.setattr(http, "ANSWER_BYTES_MAX", 2 * len(chain[0].to_line()) + 50)
        assert await fetch_entries(it.session, it.url, 0) == chain[:2]
        for query in ("from=-1", "from=x", "from=1&limit=1e9", "from=" + "9" * 30):
            assert await error_of(it, "GET", f"/v1/chain?{query}") == (400, "bad-number")

    with_server(tmp_path, talk)


def test_a_snapshot_is_fetched_when_there_is_one(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        assert await fetch_snapshot(it.session, it.url) is None
        it.port.newest_snapshot = seal_snapshot(snapshot(), ME)
        assert await fetch_snapshot(it.session, it.url, {0, 2}) == it.port.newest_snapshot
        assert await error_of(it, "GET", "/v1/snapshot?fragments=0,x") == (400, "bad-number")

    with_server(tmp_path, talk)


def test_status_is_json(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        assert await fetch_status(it.session, it.url) == {"name": "run", "role": "syncer"}

    with_server(tmp_path, talk)


def test_every_refusal_is_one_line_of_json_that_names_it(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        assert await error_of(it, "GET", "/v2/run") == (404, "no-such-thing")
        assert await error_of(it, "POST", "/v1/run") == (405, "no-such-thing")
        assert await error_of(it, "GET", "/v1/control") == (400, "bad-nonce")

    with_server(tmp_path, talk)


def test_a_port_that_is_taken_is_said_by_name(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        taken = int(it.url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{taken}.*--port 0 takes a free one"):
            await HttpServer(RememberingPort(), ME, it.store).start("127.0.0.1", taken)

    with_server(tmp_path, talk)


# ---- blobs: reading


def test_a_held_blob_is_served_whole_by_piece_and_by_range(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        it.store.put(BIG)
        path = f"/v1/blobs/{BIG_REF.digest}"
        status, headers, body = await ask(it, "GET", path)
        assert (status, headers["X-Blob-Size"], body) == (200, str(len(BIG)), BIG_INDEX)
        assert b"".join([(await ask(it, "GET", f"{path}/{i}"))[2] for i in range(3)]) == BIG
        for asked, begin, end in (("bytes=5-", 5, 1000), ("bytes=0-0", 0, 1), ("bytes=990-99999", 990, 1000)):
            status, headers, body = await ask(it, "GET", f"{path}/2", headers={"Range": asked})
            assert (status, body) == (206, piece(2)[begin:end])
            assert headers["Content-Range"] == f"bytes {begin}-{end - 1}/1000"
        for asked in ("bytes=1000-", "bytes=5-4", "bytes=-5", "bytes=0-1,3-4", "items=0-1", "bytes=x-"):
            assert await error_of(it, "GET", f"{path}/2", Range=asked) == (416, "bad-range")
        _, headers, _ = await ask(it, "HEAD", path)
        assert headers.items() >= headers_from_status(BIG_REF, it.store.status(BIG_REF)).items()

    it = with_server(tmp_path, talk)
    assert it.server.counters.bulk_out == len(BIG) + len(BIG_INDEX) + 995 + 1 + 10


def test_what_is_not_held_is_404(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        it.store.put(SMALL)
        it.port.announce(BIG_REF)
        unknown = "ab" * 32
        for path in (unknown, f"{unknown}/0", "../../etc/passwd", "..%2F..%2Fetc%2Fpasswd", "x", "%00"):
            status, _ = await error_of(it, "GET", f"/v1/blobs/{path}")
            assert status == 404
        assert (await ask(it, "HEAD", f"/v1/blobs/{unknown}"))[0] == 404
        assert await error_of(it, "GET", f"/v1/blobs/{SMALL_REF.digest}/1") == (404, "no-such-piece")
        assert await error_of(it, "GET", f"/v1/blobs/{SMALL_REF.digest}/-1") == (400, "bad-number")
        assert await error_of(it, "GET", f"/v1/blobs/{BIG_REF.digest}") == (404, "not-held")
        assert await error_of(it, "GET", f"/v1/blobs/{BIG_REF.digest}/0") == (404, "not-held")

    with_server(tmp_path, talk)


def test_a_blob_damaged_on_disk_is_not_served(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        it.store.put(SMALL)
        (tmp_path / SMALL_REF.digest).write_bytes(SMALL[::-1])
        assert await error_of(it, "GET", f"/v1/blobs/{SMALL_REF.digest}/0") == (404, "not-held")

    with_server(tmp_path, talk)


# ---- blobs: writing


def test_an_announced_blob_is_taken_piece_by_piece_in_any_order_and_twice(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        it.port.announce(BIG_REF)
        path = f"/v1/blobs/{BIG_REF.digest}"
        assert (await ask(it, "PUT", f"{path}/index", BIG_INDEX))[0] == 200
        for i in (2, 0, 0):
            assert (await ask(it, "PUT", f"{path}/{i}", piece(i)))[0] == 200
        told = headers_from_status(BIG_REF, BlobStatus(False, True, frozenset({0, 2})))
        for method, place, body in (("HEAD", path, None), ("PUT", f"{path}/index", BIG_INDEX)):
            _, headers, _ = await ask(it, method, place, body)
            assert headers.items() >= told.items()
        assert it.port.arrived == []
        assert (await ask(it, "PUT", f"{path}/1", piece(1)))[0] == 200
        assert it.port.arrived == [BIG_REF]
        assert it.store.get(BIG_REF) == BIG
        it.port.announced.clear()
        assert (await ask(it, "PUT", f"{path}/1", piece(1)))[0] == 200

    it = with_server(tmp_path, talk)
    assert it.server.counters.bulk_in == len(BIG) + 2 * len(BIG_INDEX) + len(piece(0)) + len(piece(1))


def test_an_unannounced_blob_is_refused_before_its_bytes_are_read(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        for path in (f"{SMALL_REF.digest}/0", f"{SMALL_REF.digest}/index", "../x/0", "x/0"):
            status, _ = await error_of(it, "PUT", f"/v1/blobs/{path}", SMALL)
            assert status in (404, 405)
        assert await error_of(it, "PUT", f"/v1/blobs/{SMALL_REF.digest}/0", SMALL) == (404, "unannounced")
        big = b"PUT /v1/blobs/%b/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 1099511627776\r\n\r\n"
        assert b" 404 " in await raw(it, big % SMALL_REF.digest.encode())

    it = with_server(tmp_path, talk)
    assert it.server.counters.bulk_in == 0
    assert not list(tmp_path.iterdir())


def test_a_declared_length_that_is_wrong_is_refused_before_its_bytes_are_read(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        it.port.announce(SMALL_REF)
        it.port.announce(BIG_REF)
        small, big = f"/v1/blobs/{SMALL_REF.digest}", f"/v1/blobs/{BIG_REF.digest}"
        assert await error_of(it, "PUT", f"{small}/0", SMALL + b"x") == (413, "wrong-length")
        assert await error_of(it, "PUT", f"{small}/0", SMALL[:-1]) == (400, "wrong-length")
        assert await error_of(it, "PUT", f"{big}/index", BIG_INDEX + bytes(32)) == (413, "wrong-length")
        assert await error_of(it, "PUT", f"{big}/index", BIG_INDEX[:-32]) == (400, "wrong-length")
        for length, status in ((b"1099511627776", b" 413 "), (b"9" * 26, b" 400 "), (b"-12", b" 400 ")):
            text = b"PUT " + small.encode() + b"/0 HTTP/1.1\r\nHost: x\r\nContent-Length: " + length + b"\r\n\r\n"
            assert status in await raw(it, text)

        async def chunks() -> AsyncIterator[bytes]:
            yield SMALL

        assert await error_of(it, "PUT", f"{small}/0", chunks()) == (411, "no-length")

    it = with_server(tmp_path, talk)
    assert it.server.counters.bulk_in == 0


@pytest.mark.parametrize(
    "said",
    ["bytes 0-12/12", "bytes 5-4/12", "bytes 0-11/13", "bytes 0-11/*", "bytes */12", "0-11/12", "bytes -1-11/12", "x"],
)
def test_a_content_range_outside_the_piece_is_refused(tmp_path: Path, said: str) -> None:
    async def talk(it: Served) -> None:
        it.port.announce(SMALL_REF)
        path = f"/v1/blobs/{SMALL_REF.digest}/0"
        assert await error_of(it, "PUT", path, SMALL, Content_Range=said) == (416, "bad-range")

    with_server(tmp_path, talk)


def test_a_piece_out_of_range_is_refused(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        it.port.announce(BIG_REF)
        path = f"/v1/blobs/{BIG_REF.digest}"
        assert await error_of(it, "PUT", f"{path}/3", b"x") == (404, "no-such-piece")
        assert await error_of(it, "PUT", f"{path}/99999999999", b"x") == (404, "no-such-piece")
        assert await error_of(it, "PUT", f"{path}/-1", b"x") == (400, "bad-number")
        assert await error_of(it, "PUT", f"{path}/0x1", b"x") == (400, "bad-number")

    with_server(tmp_path, talk)


def test_parts_of_a_piece_come_in_any_order_and_the_last_one_is_told_that_all_is_there(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        it.port.announce(SMALL_REF)
        path = f"/v1/blobs/{SMALL_REF.digest}/0"
        for part, begin, is_last in ((SMALL[7:], 7, False), (SMALL[:5], 0, False), (SMALL[5:7], 5, True)):
            where = {"Content-Range": f"bytes {begin}-{begin + len(part) - 1}/12"}
            status, headers, _ = await ask(it, "PUT", path, part, where)
            assert (status, headers["X-Blob-Complete"]) == (200, str(int(is_last)))
            if begin == 0:
                assert (await ask(it, "HEAD", f"/v1/blobs/{SMALL_REF.digest}"))[1]["X-Blob-Unverified"] == "0-4,7-11"
        assert it.store.get(SMALL_REF) == SMALL and it.port.arrived == [SMALL_REF]

    with_server(tmp_path, talk)


def test_a_body_cut_off_leaves_what_came_and_nothing_is_merged(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        it.port.announce(SMALL_REF)
        head = f"PUT /v1/blobs/{SMALL_REF.digest}/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\n\r\n"
        await cut_off(it, head.encode() + SMALL[:7])
        assert it.store.status(SMALL_REF).unverified == ((0, 7),)
        assert it.port.arrived == []
        rest = {"Content-Range": "bytes 7-11/12"}
        assert (await ask(it, "PUT", f"/v1/blobs/{SMALL_REF.digest}/0", SMALL[7:], rest))[0] == 200
        assert it.port.arrived == [SMALL_REF]

    with_server(tmp_path, talk)


def test_wrong_bytes_are_refused_and_the_piece_begins_again(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        it.port.announce(SMALL_REF)
        it.port.announce(BIG_REF)
        small, big = f"/v1/blobs/{SMALL_REF.digest}/0", f"/v1/blobs/{BIG_REF.digest}"
        assert await error_of(it, "PUT", small, SMALL[::-1]) == (422, "wrong-bytes")
        assert (await ask(it, "PUT", small, SMALL))[0] == 200
        assert await error_of(it, "PUT", f"{big}/0", piece(0)) == (409, "index-missing")
        assert await error_of(it, "PUT", f"{big}/index", BIG_INDEX[::-1]) == (422, "wrong-bytes")
        for brought, answer in (("!", (400, "bad-index")), ("AAAA", (422, "wrong-bytes"))):
            assert await error_of(it, "PUT", f"{big}/0", piece(0), X_Blob_Piece_Digests=brought) == answer
        assert await error_of(it, "PUT", f"{big}/0", piece(0)) == (409, "index-missing")
        assert (await ask(it, "PUT", f"{big}/index", BIG_INDEX))[0] == 200
        assert await error_of(it, "PUT", f"{big}/0", piece(1)) == (422, "wrong-bytes")
        assert it.port.arrived == [SMALL_REF]

    with_server(tmp_path, talk)


def test_a_compressed_body_is_refused_and_never_inflated(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        it.port.announce(SMALL_REF)
        path = f"/v1/blobs/{SMALL_REF.digest}/0"
        assert await error_of(it, "PUT", path, SMALL, Content_Encoding="gzip") == (415, "encoded")

    with_server(tmp_path, talk)


def test_a_full_disk_is_said_and_the_peer_lives_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Served) -> None:
        it.port.announce(SMALL_REF)

        def full(needed: int) -> None:
            from geo_diloco.runtime.disk import StoreFullError

            raise StoreFullError("disk full")

        path = f"/v1/blobs/{SMALL_REF.digest}/0"
        with monkeypatch.context() as patch:
            patch.setattr(it.store, "_check_space", full)
            assert await error_of(it, "PUT", path, SMALL) == (507, "full")
        assert (await ask(it, "PUT", path, SMALL))[0] == 200

    with_server(tmp_path, talk)


def test_a_body_that_stands_still_is_given_up_without_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "STALL_S", 0.05)

    async def talk(it: Served) -> None:
        it.port.announce(SMALL_REF)
        head = f"PUT /v1/blobs/{SMALL_REF.digest}/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\n\r\n"
        assert b" 408 " in await raw(it, head.encode() + SMALL[:3])
        assert it.store.status(SMALL_REF).unverified == ((0, 3),)

    with_server(tmp_path, talk)


def test_two_writers_of_one_blob_both_succeed(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        it.port.announce(BIG_REF)
        path = f"/v1/blobs/{BIG_REF.digest}"

        async def write() -> None:
            assert (await ask(it, "PUT", f"{path}/index", BIG_INDEX))[0] == 200
            for i in range(3):
                assert (await ask(it, "PUT", f"{path}/{i}", piece(i)))[0] == 200

        await asyncio.gather(write(), write(), write())
        assert it.store.get(BIG_REF) == BIG
        assert set(it.port.arrived) == {BIG_REF}

    with_server(tmp_path, talk)


def test_a_blob_of_no_bytes_is_complete_with_its_index(tmp_path: Path) -> None:
    nothing = blob_ref(b"")

    async def talk(it: Served) -> None:
        it.port.announce(nothing)
        assert (await ask(it, "PUT", f"/v1/blobs/{nothing.digest}/index", b""))[0] == 200
        assert it.port.arrived == [nothing]

    with_server(tmp_path, talk)


def test_a_partial_blob_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    async def first(it: Served) -> None:
        it.port.announce(BIG_REF)
        await ask(it, "PUT", f"/v1/blobs/{BIG_REF.digest}/index", BIG_INDEX)
        await ask(it, "PUT", f"/v1/blobs/{BIG_REF.digest}/1", piece(1))

    async def second(it: Served) -> None:
        it.port.announce(BIG_REF)
        headers = (await ask(it, "HEAD", f"/v1/blobs/{BIG_REF.digest}"))[1]
        assert (headers["X-Blob-Held"], headers["X-Blob-Index"]) == ("1-1", "1")
        for i in (0, 2):
            assert (await ask(it, "PUT", f"/v1/blobs/{BIG_REF.digest}/{i}", piece(i)))[0] == 200
        assert it.store.get(BIG_REF) == BIG

    with_server(tmp_path, first)
    with_server(tmp_path, second)


# ---- answers from a liar


class Liar:
    """Answers every question with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self._answer)
            await writer.drain()
            writer.write_eof()
            await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def ok(body: bytes, declared: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body) if declared is None else declared) + body


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ok(b"", declared=1 << 40), RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"100000\r\n" + bytes(1 << 20) + b"\r\n", None),
        (ok(b"no json"), RemoteProtocolError),
        (ok(b"[" * 50_000), RemoteProtocolError),
        (ok(b"[1]"), RemoteProtocolError),
        (ok(b"\xff"), RemoteProtocolError),
        (ok(b"{}", declared=10), TransferError),
        (b"", TransferError),
        (b"garbage\r\n\r\n", TransferError),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 3\r\n\r\n\x1b[2", TransferError),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", TransferError),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", TransferError),
    ],
    ids=range(12),
)
def test_a_lying_answer_is_bounded_and_refused_by_a_named_error(
    answer: bytes, error: type[Exception] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_diloco.runtime.session.STATUS_BYTES_MAX", 100_000)

    async def talk(it: Served) -> None:
        listening = await asyncio.start_server(Liar(answer), "127.0.0.1", 0)
        number = listening.sockets[0].getsockname()[1]
        async with listening:
            with pytest.raises(error or RemoteProtocolError):
                await fetch_status(it.session, f"http://127.0.0.1:{number}")

    with_server(tmp_path, talk)


def test_a_peer_that_is_not_there_is_a_transfer_error(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        await it.server.stop()
        with pytest.raises(TransferError):
            await fetch_status(it.session, it.url)

    with_server(tmp_path, talk)


def test_more_entries_than_asked_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Served) -> None:
        it.port.entries = chain_of(ME, 3)
        monkeypatch.setattr(it.port, "signed_entries", lambda from_seq, limit: it.port.entries)
        with pytest.raises(RemoteProtocolError, match="3 entries"):
            await fetch_entries(it.session, it.url, 0, limit=2)

    with_server(tmp_path, talk)
