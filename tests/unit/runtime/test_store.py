from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_diloco.errors import BlobError, RemoteProtocolError, RunDirError
from geo_diloco.manifest import Digest
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime import disk, pieces
from geo_diloco.runtime.disk import StoreFullError
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.pieces import (
    BlobStatus,
    IndexMissingError,
    OpenBudget,
    headers_from_status,
    status_from_headers,
)
from geo_diloco.runtime.ranges import joined
from geo_diloco.runtime.store import PIECE_BYTES, BlobStore, ChainStore, atomic_write, blob_ref, piece_digests

from .samples import bytes_of, chain_of

BIG = bytes_of(2 * PIECE_BYTES + 1000)
BIG_REF = blob_ref(BIG)
SMALL = b"a small blob"
SMALL_REF = blob_ref(SMALL)


def index_of(data: bytes) -> bytes:
    return b"".join(piece_digests(data))


def piece(data: bytes, i: int) -> bytes:
    return data[i * PIECE_BYTES : (i + 1) * PIECE_BYTES]


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


# ---- names


def test_a_blobs_digest_covers_its_size_and_its_pieces_digests() -> None:
    index = b"".join(blake3(piece(BIG, i)).digest() for i in range(3))
    assert BIG_REF.digest == blake3(len(BIG).to_bytes(8, "little") + index).hexdigest()
    assert BIG_REF.size == len(BIG)
    assert index_of(BIG) == index
    assert blob_ref(memoryview(BIG)) == BIG_REF


def test_blobs_of_another_size_have_another_digest() -> None:
    assert blob_ref(b"").digest == blake3(bytes(8)).hexdigest()
    assert len({blob_ref(bytes(n)).digest for n in (0, 1, 2, PIECE_BYTES, PIECE_BYTES + 1)}) == 5


# ---- whole blobs


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1])
def test_what_is_put_can_be_got_again_by_another_process(tmp_path: Path, size: int) -> None:
    data = bytes_of(size)
    ref = BlobStore(tmp_path).put(data)
    again = BlobStore(tmp_path)
    assert again.get(ref) == data
    assert again.has(ref)
    assert again.find(ref.digest) == ref
    assert b"".join(again.read_piece(ref, i) for i in range(pieces.num_pieces(size))) == data
    assert again.status(ref) == BlobStatus(True, True, frozenset(range(pieces.num_pieces(size))), ())


def test_the_same_digest_with_another_size_is_not_held(store: BlobStore) -> None:
    store.put(SMALL)
    lie = BlobRef(SMALL_REF.digest, 5)
    assert not store.has(lie)
    with pytest.raises(BlobError, match="not held"):
        store.get(lie)
    assert store.get(SMALL_REF) == SMALL


def test_a_damaged_blob_is_never_returned_and_can_be_had_again(store: BlobStore, tmp_path: Path) -> None:
    store.put(BIG)
    path = tmp_path / "blobs" / BIG_REF.digest
    spoiled = bytearray(BIG)
    spoiled[PIECE_BYTES + 5] ^= 1
    reads: list[Callable[[], bytes]] = [
        lambda: store.get(BIG_REF),
        lambda: store.read_piece(BIG_REF, 1),
        lambda: BlobStore(tmp_path / "blobs").index(BIG_REF),
    ]
    for read in reads:
        store.put(BIG)
        path.write_bytes(spoiled)
        with pytest.raises(BlobError, match="damaged"):
            read()
        assert not store.has(BIG_REF)


def test_the_index_of_what_was_put_is_known_without_reading_it_again(store: BlobStore, tmp_path: Path) -> None:
    store.put(BIG)
    (tmp_path / "blobs" / BIG_REF.digest).write_bytes(BIG[::-1])
    assert store.index(BIG_REF) == index_of(BIG), "whoever asks for it first does not wait for the disk"


def test_a_digest_that_is_no_digest_never_becomes_a_path(store: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    for name in ("../secret", "/etc/passwd", "", "A" * 64, "a" * 63):
        lie = BlobRef(Digest(name), 1)
        assert store.find(name) is None
        for call in (store.get, store.delete, store.status, store.index, lambda r: store.append_piece(r, 0, 0, b"x")):
            with pytest.raises(BlobError):
                call(lie)
    assert (tmp_path / "secret").exists()


def test_deleting_is_idempotent_and_takes_partial_blobs_too(store: BlobStore, tmp_path: Path) -> None:
    store.put(SMALL)
    store.set_index(BIG_REF, index_of(BIG))
    store.append_piece(BIG_REF, 0, 0, piece(BIG, 0))
    for ref in (SMALL_REF, BIG_REF, BIG_REF):
        store.delete(ref)
    assert not list((tmp_path / "blobs").iterdir())
    assert store.status(BIG_REF) == BlobStatus(False, False, frozenset())


def test_a_sweep_keeps_what_it_is_told_and_nothing_else(store: BlobStore, tmp_path: Path) -> None:
    kept, gone = store.put(b"kept"), store.put(b"gone")
    store.set_index(BIG_REF, index_of(BIG))
    store.append_piece(BIG_REF, 0, 0, piece(BIG, 0))
    assert store.sweep({kept.digest}) == 2
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [kept.digest]
    assert not store.has(gone)


# ---- pieces


def test_a_blob_is_complete_when_its_last_piece_is_held_in_whatever_order(store: BlobStore, tmp_path: Path) -> None:
    store.set_index(BIG_REF, index_of(BIG))
    for i in (2, 0, 1):
        assert not store.has(BIG_REF)
        assert not (tmp_path / "blobs" / BIG_REF.digest).exists()
        assert store.append_piece(BIG_REF, i, 0, piece(BIG, i))
    assert store.get(BIG_REF) == BIG
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [BIG_REF.digest]


@settings(max_examples=20)
@given(st.lists(st.integers(0, len(SMALL)), max_size=6))
def test_any_split_of_a_piece_gives_the_piece(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    store = BlobStore(tmp_path_factory.mktemp("blobs"))
    edges = [0, *sorted(cuts), len(SMALL)]
    for begin, end in itertools.pairwise(edges):
        store.append_piece(SMALL_REF, 0, begin, SMALL[begin:end])
    assert store.get(SMALL_REF) == SMALL


def test_one_piece_needs_no_index_and_several_do(store: BlobStore) -> None:
    assert store.append_piece(SMALL_REF, 0, 0, SMALL)
    with pytest.raises(IndexMissingError):
        store.append_piece(BIG_REF, 0, 0, piece(BIG, 0))
    with pytest.raises(BlobError):
        store.index(BIG_REF)


def test_an_index_must_be_that_of_the_blob(store: BlobStore) -> None:
    right = index_of(BIG)
    for wrong in (b"", right[:-1], right + bytes(32), right[32:] + right[:32], bytes(96)):
        with pytest.raises(BlobError, match="index"):
            store.set_index(BIG_REF, wrong)
    store.set_index(BIG_REF, right)
    store.set_index(BIG_REF, right)
    assert store.index(BIG_REF) == right


def test_a_blob_of_no_bytes_is_complete_with_its_index(store: BlobStore) -> None:
    nothing = blob_ref(b"")
    assert not store.has(nothing)
    store.set_index(nothing, b"")
    assert store.get(nothing) == b""


def test_a_piece_with_a_wrong_digest_begins_again_and_was_never_on_disk(store: BlobStore, tmp_path: Path) -> None:
    store.set_index(BIG_REF, index_of(BIG))
    with pytest.raises(BlobError, match="wrong digest"):
        store.append_piece(BIG_REF, 1, 0, bytes(PIECE_BYTES))
    assert store.status(BIG_REF) == BlobStatus(False, True, frozenset())
    assert not (tmp_path / "blobs" / f"{BIG_REF.digest}.part").exists()
    assert store.append_piece(BIG_REF, 1, 0, piece(BIG, 1))
    with pytest.raises(BlobError, match="wrong digest"):
        store.append_piece(SMALL_REF, 0, 0, SMALL[::-1])
    assert store.append_piece(SMALL_REF, 0, 0, SMALL)


def test_a_piece_that_comes_twice_changes_nothing(store: BlobStore) -> None:
    store.set_index(BIG_REF, index_of(BIG))
    for _ in range(2):
        assert store.append_piece(BIG_REF, 0, 0, piece(BIG, 0))
    assert store.append_piece(BIG_REF, 0, 0, bytes(PIECE_BYTES))
    assert store.read_piece(BIG_REF, 0) == piece(BIG, 0)
    for i in (1, 2, 1):
        assert store.append_piece(BIG_REF, i, 0, piece(BIG, i))
    assert store.get(BIG_REF) == BIG


def test_bytes_of_a_piece_come_in_any_order_and_may_overlap(store: BlobStore) -> None:
    assert not store.append_piece(SMALL_REF, 0, 7, SMALL[7:9])
    assert not store.append_piece(SMALL_REF, 0, 0, SMALL[:4])
    assert store.status(SMALL_REF).unverified == ((0, 4), (7, 9))
    assert store.status(SMALL_REF).lacking(len(SMALL)) == [(4, 7), (9, 12)]
    assert not store.is_piece_filled_by(SMALL_REF, 0, 3, 5)
    assert not store.append_piece(SMALL_REF, 0, 3, SMALL[3:8])
    assert store.status(SMALL_REF).unverified == ((0, 9),)
    assert store.is_piece_filled_by(SMALL_REF, 0, 9, 3)
    assert store.append_piece(SMALL_REF, 0, 9, SMALL[9:])
    assert not store.is_piece_filled_by(SMALL_REF, 0, 9, 3)
    assert store.get(SMALL_REF) == SMALL


@pytest.mark.parametrize(
    ("i", "offset", "chunk"),
    [(3, 0, b"x"), (-1, 0, b"x"), (2, 999, b"xx"), (2, 1001, b""), (0, -1, b"x"), (0, 1, bytes(PIECE_BYTES))],
)
def test_bytes_outside_a_piece_are_refused(store: BlobStore, i: int, offset: int, chunk: bytes) -> None:
    store.set_index(BIG_REF, index_of(BIG))
    with pytest.raises(BlobError):
        store.append_piece(BIG_REF, i, offset, chunk)
    assert store.status(BIG_REF) == BlobStatus(False, True, frozenset())


def test_held_pieces_of_a_partial_blob_are_served_and_others_not(store: BlobStore) -> None:
    store.set_index(BIG_REF, index_of(BIG))
    store.append_piece(BIG_REF, 1, 0, piece(BIG, 1))
    store.append_piece(BIG_REF, 2, 0, piece(BIG, 2)[:10])
    assert store.read_piece(BIG_REF, 1) == piece(BIG, 1)
    for i in (0, 2):
        with pytest.raises(BlobError, match="not held"):
            store.read_piece(BIG_REF, i)
    assert store.status(BIG_REF) == BlobStatus(False, True, frozenset({1}), ((2 * PIECE_BYTES, 2 * PIECE_BYTES + 10),))


def test_held_pieces_survive_a_restart_and_damaged_ones_dont(store: BlobStore, tmp_path: Path) -> None:
    store.set_index(BIG_REF, index_of(BIG))
    store.append_piece(BIG_REF, 0, 0, piece(BIG, 0))
    store.append_piece(BIG_REF, 2, 0, piece(BIG, 2))
    with (tmp_path / "blobs" / f"{BIG_REF.digest}.part").open("r+b") as file:
        file.seek(2 * PIECE_BYTES + 3)
        file.write(b"\xff\xfe\xfd")
    again = BlobStore(tmp_path / "blobs")
    assert again.status(BIG_REF) == BlobStatus(False, True, frozenset({0}))
    for i in (1, 2):
        again.append_piece(BIG_REF, i, 0, piece(BIG, i))
    assert again.get(BIG_REF) == BIG


def test_a_process_that_died_before_the_rename_has_the_blob_after_a_restart(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set_index(BIG_REF, index_of(BIG))
    for i in (0, 1):
        store.append_piece(BIG_REF, i, 0, piece(BIG, i))

    def dies(*paths: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies)
        with pytest.raises(BlobError, match="killed"):
            store.append_piece(BIG_REF, 2, 0, piece(BIG, 2))
        assert not store.has(BIG_REF)
        assert not store.status(BIG_REF).complete
    shutil.copytree(tmp_path / "blobs", tmp_path / "copy")
    again = BlobStore(tmp_path / "blobs")
    assert again.status(BIG_REF).complete
    assert again.get(BIG_REF) == BIG
    assert store.append_piece(BIG_REF, 2, 0, piece(BIG, 2))
    brought_again = BlobStore(tmp_path / "copy")
    brought_again.set_index(BIG_REF, index_of(BIG))  # by a peer that heard nothing of it
    assert brought_again.get(BIG_REF) == BIG


def test_a_damaged_index_on_disk_is_asked_for_again(store: BlobStore, tmp_path: Path) -> None:
    store.set_index(BIG_REF, index_of(BIG))
    store.append_piece(BIG_REF, 0, 0, piece(BIG, 0))
    (tmp_path / "blobs" / f"{BIG_REF.digest}.index").write_bytes(bytes(96))
    again = BlobStore(tmp_path / "blobs")
    assert again.status(BIG_REF) == BlobStatus(False, False, frozenset())
    again.set_index(BIG_REF, index_of(BIG))
    assert again.append_piece(BIG_REF, 0, 0, piece(BIG, 0))


def test_many_writers_of_one_blob_do_no_harm(store: BlobStore) -> None:
    store.set_index(BIG_REF, index_of(BIG))
    surprises: list[BaseException] = []
    barrier = threading.Barrier(4)

    def write(step: int) -> None:
        barrier.wait()
        try:
            for i in (0, 1, 2):
                for offset in range(0, len(piece(BIG, i)), step):
                    store.append_piece(BIG_REF, i, offset, piece(BIG, i)[offset : offset + step])
        except BaseException as exc:
            surprises.append(exc)

    threads = [threading.Thread(target=write, args=(step,)) for step in (PIECE_BYTES, 65536, 100_000, 9999)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not surprises
    assert store.get(BIG_REF) == BIG


def test_a_liar_among_two_writers_only_delays(store: BlobStore) -> None:
    store.append_piece(SMALL_REF, 0, 0, b"lies")
    with pytest.raises(BlobError, match="wrong digest"):
        store.append_piece(SMALL_REF, 0, 4, SMALL[4:])
    store.append_piece(SMALL_REF, 0, 0, b"lies")
    assert store.append_piece(SMALL_REF, 0, 0, SMALL)


# ---- room


def test_a_full_disk_is_said_before_and_while_writing(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        for call in (
            lambda: store.put(SMALL),
            lambda: store.set_index(BIG_REF, index_of(BIG)),
            lambda: store.append_piece(SMALL_REF, 0, 0, SMALL),
        ):
            with pytest.raises(StoreFullError, match="disk full"):
                call()

    def no_space(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_space)
        with pytest.raises(StoreFullError, match="disk full"):
            store.append_piece(SMALL_REF, 0, 0, SMALL)
    assert store.append_piece(SMALL_REF, 0, 0, SMALL)


def test_a_blob_of_absurd_size_is_refused_without_allocating(store: BlobStore) -> None:
    for size in (1 << 60, -1):
        lie = BlobRef(SMALL_REF.digest, size)
        with pytest.raises(BlobError):
            store.set_index(lie, b"")
        with pytest.raises(BlobError):
            store.append_piece(lie, 0, 0, b"x")


def test_unfinished_pieces_have_a_bounded_memory_and_idle_ones_give_way(tmp_path: Path) -> None:
    refs = [blob_ref(bytes([n]) * 100) for n in range(4)]
    store = BlobStore(tmp_path / "busy", budget=OpenBudget(bytes_max=250))
    store.append_piece(refs[0], 0, 0, bytes([0]) * 50)
    store.append_piece(refs[1], 0, 0, bytes([1]) * 50)
    with pytest.raises(StoreFullError, match="unfinished"):
        store.append_piece(refs[2], 0, 0, bytes([2]) * 50)
    store.append_piece(refs[0], 0, 50, bytes([0]) * 50)
    assert store.append_piece(refs[2], 0, 0, bytes([2]) * 100)

    store = BlobStore(tmp_path / "idle", budget=OpenBudget(bytes_max=250, idle_s=0.0))
    for n in range(4):
        store.append_piece(refs[n], 0, 0, bytes([n]) * 50)
    assert store.status(refs[0]).unverified == ()
    assert store.status(refs[3]).unverified == ((0, 50),)
    assert not store.append_piece(refs[0], 0, 50, bytes([0]) * 50), "what came before gave way"
    assert store.append_piece(refs[0], 0, 0, bytes([0]) * 50)


# ---- how much is held, as headers


@given(
    st.sets(st.integers(0, 2)),
    st.lists(st.tuples(st.integers(0, len(BIG) - 1), st.integers(1, 2 * PIECE_BYTES))),
    st.booleans(),
)
def test_what_is_held_is_told_in_headers(held: set[int], came: list[tuple[int, int]], has_index: bool) -> None:
    complete = len(held) == 3 and has_index
    unverified = joined((begin, min(len(BIG), begin + size)) for begin, size in came)
    status = BlobStatus(complete, has_index, frozenset(held), tuple(unverified))
    assert status_from_headers(headers_from_status(BIG_REF, status), BIG_REF) == status


def test_a_long_list_of_pieces_is_cut_and_stays_true() -> None:
    ref = BlobRef(BIG_REF.digest, 10_000 * PIECE_BYTES)
    status = BlobStatus(False, True, frozenset(range(0, 10_000, 2)))
    headers = headers_from_status(ref, status)
    assert max(map(len, headers.values())) <= 4000
    told = status_from_headers(headers, ref)
    assert 100 < len(told.held) < 5000
    assert told.held < status.held


@pytest.mark.parametrize(
    "lie",
    [
        {"X-Blob-Size": "5"},
        {"X-Blob-Size": ""},
        {"X-Blob-Held": "0-99999999"},
        {"X-Blob-Held": "0-3"},
        {"X-Blob-Held": "0-"},
        {"X-Blob-Held": "0-1,"},
        {"X-Blob-Held": "0-999999999999999999999"},
        {"X-Blob-Unverified": "0--1"},
        {"X-Blob-Unverified": "x"},
        {"X-Blob-Unverified": "0-99999999999999"},
    ],
)
def test_headers_that_cant_be_about_the_blob_are_refused(lie: dict[str, str]) -> None:
    honest = headers_from_status(BIG_REF, BlobStatus(False, True, frozenset()))
    with pytest.raises(RemoteProtocolError):
        status_from_headers(honest | lie, BIG_REF)


# ---- files that are whole or absent


def test_an_interrupted_write_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def dies(*paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_drafts_of_a_killed_process_are_removed_at_start(tmp_path: Path) -> None:
    (tmp_path / ".x.0123.tmp").write_bytes(b"half")
    BlobStore(tmp_path)
    assert not list(tmp_path.iterdir())


# ---- the chain


ME = Identity.generate()
CHAIN = chain_of(ME, 5)


def filled(path: Path, entries: list[Any]) -> ChainStore:
    chain = ChainStore(path)
    for signed in entries:
        chain.append(signed)
    return chain


def test_the_chain_is_the_same_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "new" / "chain.jsonl"
    chain = filled(path, CHAIN[:3])
    chain.close()
    again = ChainStore(path)
    assert again.load() == CHAIN[:3]
    assert again.num_entries == 3
    again.append(CHAIN[3])
    assert again.load() == CHAIN[:4]
    again.close()


def test_an_empty_chain_is_empty(tmp_path: Path) -> None:
    chain = ChainStore(tmp_path / "chain.jsonl")
    assert (chain.num_entries, chain.load()) == (0, [])
    chain.close()


def test_entries_are_kept_as_they_came_whatever_their_place(tmp_path: Path) -> None:
    """A log may hold forks, and a learner's begins anywhere."""
    other = chain_of(Identity.generate(), 2)[1]
    came = [CHAIN[2], CHAIN[0], other, CHAIN[4]]
    chain = filled(tmp_path / "chain.jsonl", came)
    assert chain.load() == came
    chain.close()


@pytest.mark.parametrize("torn", [b"x", b'{"body":"{', bytes(100), None, b"\xff\xfe\n"], ids=range(5))
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes | None) -> None:
    path = tmp_path / "chain.jsonl"
    filled(path, CHAIN[:3]).close()
    whole = path.read_bytes()
    path.write_bytes(whole + torn if torn is not None else whole[:-1])
    chain = ChainStore(path)
    kept = 3 if torn is not None else 2
    assert chain.load() == CHAIN[:kept]
    chain.append(CHAIN[kept])
    assert chain.load() == CHAIN[: kept + 1]
    chain.close()


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_a_chain_torn_anywhere_is_a_prefix_of_itself(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "chain.jsonl"
    filled(path, CHAIN[:3]).close()
    whole = path.read_bytes()
    path.write_bytes(whole[: length % len(whole)])
    chain = ChainStore(path)
    assert chain.load() == CHAIN[: chain.num_entries]
    assert chain.num_entries == whole[: length % len(whole)].count(b"\n")
    chain.close()


def test_a_broken_middle_is_an_error_and_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "chain.jsonl"
    filled(path, CHAIN[:3]).close()
    lines = path.read_bytes().splitlines(keepends=True)
    for broken in (
        [lines[0], b"garbage\n", lines[2]],
        [lines[0], lines[1][:40] + b"\n", lines[2]],
        [lines[0], b"\n", lines[1]],
    ):
        path.write_bytes(b"".join(broken))
        with pytest.raises(RunDirError, match="line 2"):
            ChainStore(path)
        assert path.read_bytes() == b"".join(broken)


def test_a_failed_append_leaves_the_chain_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chain.jsonl"
    chain = filled(path, CHAIN[:2])
    before = path.read_bytes()

    def no_space(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(RunDirError, match="No space"):
            chain.append(CHAIN[2])
    assert path.read_bytes() == before
    chain.append(CHAIN[2])
    assert chain.load() == CHAIN[:3]
    chain.close()


def test_the_line_is_synced_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = ChainStore(tmp_path / "chain.jsonl")
    sizes: list[int] = []
    sync = os.fsync

    def watched(handle: int) -> None:
        sizes.append(os.fstat(handle).st_size)
        sync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    chain.append(CHAIN[0])
    assert sizes == [len(CHAIN[0].to_line()) + 1]
    chain.close()


# ---- while a piece is being written


def test_a_slow_disk_holds_up_no_other_chunk(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set_index(BIG_REF, index_of(BIG))
    writing, go_on = threading.Event(), threading.Event()
    write = disk.write_at

    def slow(path: Path, offset: int, data: bytes | memoryview) -> None:
        writing.set()
        assert go_on.wait(10)
        write(path, offset, data)

    monkeypatch.setattr(pieces, "write_at", slow)
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(store.append_piece(BIG_REF, 0, 0, piece(BIG, 0))))
        for _ in range(2)
    ]
    threads[0].start()
    assert writing.wait(10)
    assert not store.append_piece(BIG_REF, 1, 0, b"")
    assert not store.append_piece(BIG_REF, 1, 0, piece(BIG, 1)[:10])
    assert not store.append_piece(BIG_REF, 0, 0, piece(BIG, 0)[:10])
    told: list[BlobStatus] = []
    threads.append(threading.Thread(target=lambda: told.append(store.status(BIG_REF))))
    for thread in threads[1:]:  # the same piece to its end, and a question what is held: both wait for the first
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert results == [True, True]
    assert told == [BlobStatus(False, True, frozenset({0}), ((PIECE_BYTES, PIECE_BYTES + 10),))]


def test_a_blob_forgotten_while_a_piece_is_written_leaves_nothing(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set_index(BIG_REF, index_of(BIG))
    write = disk.write_at

    def forgotten(path: Path, offset: int, data: bytes | memoryview) -> None:
        store.delete(BIG_REF)
        write(path, offset, data)

    monkeypatch.setattr(pieces, "write_at", forgotten)
    with pytest.raises(BlobError, match="forgotten"):
        store.append_piece(BIG_REF, 0, 0, piece(BIG, 0))
    assert not list((tmp_path / "blobs").iterdir())


# ---- beside the one who holds the folder -------------------------------------------------------------------------


def test_a_read_only_chain_leaves_alone_what_its_owner_is_about_to_finish(tmp_path: Path) -> None:
    path = tmp_path / "chain.jsonl"
    path.write_bytes(b'{"torn')
    reader = ChainStore(path, is_read_only=True)
    assert reader.load() == []
    reader.close()
    assert path.read_bytes() == b'{"torn'
    with pytest.raises(RunDirError, match="No such file"):
        ChainStore(tmp_path / "none" / "chain.jsonl", is_read_only=True)
    assert not (tmp_path / "none").exists()


def test_a_read_only_store_neither_tidies_up_nor_drops_what_is_damaged(tmp_path: Path) -> None:
    ref = BlobStore(tmp_path).put(b"some bytes")
    (tmp_path / ".blob.0123.tmp").write_bytes(b"in the making")
    (tmp_path / ref.digest).write_bytes(b"SOME BYTES")
    reader = BlobStore(tmp_path, is_read_only=True)
    with pytest.raises(BlobError, match="is damaged on disk"):
        reader.get(ref)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".blob.0123.tmp", ref.digest]
