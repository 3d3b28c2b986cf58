"""Contacts as they are kept and passed on: bounded, newest first, whole on disk or as before."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from geo_diloco.errors import RemoteProtocolError
from geo_diloco.runtime import contacts as module
from geo_diloco.runtime.contacts import (
    ADDRESSES_MAX,
    CONTACTS_BYTES_MAX,
    MADDRS_MAX,
    TEXT_MAX,
    Contacts,
    contacts_from_json,
    read_contacts,
    write_contacts,
)
from geo_diloco.runtime.session import fetch_contacts
from geo_diloco.runtime.store import BlobStore
from tests.unit.runtime.samples import RememberingPort, served

IDENTITY = "QmS3GLgjqzHA3WXTxwQTnLF5fxx5DzAMPu7rK1vLfH7Kuo"
MADDR = f"/ip4/192.0.2.1/tcp/31330/p2p/{IDENTITY}"
ONE = Contacts(("a.example:1", "[::1]:2"), (MADDR,))


def test_newer_ones_go_before_older_ones_and_each_is_there_once() -> None:
    newer = Contacts(("b.example:1", "a.example:1"))
    assert newer.before(ONE) == Contacts(("b.example:1", "a.example:1", "[::1]:2"), (MADDR,))


def test_there_is_room_for_so_many_and_the_oldest_are_let_go() -> None:
    many = Contacts(
        tuple(f"host-{n}.example:1" for n in range(100)),
        tuple(f"/ip4/192.0.2.1/tcp/{n + 1}/p2p/{IDENTITY}" for n in range(100)),
    )
    assert (len(many.addresses), len(many.maddrs)) == (ADDRESSES_MAX, MADDRS_MAX)
    both = ONE.before(many)
    assert both.addresses[:3] == ("a.example:1", "[::1]:2", "host-0.example:1")
    assert len(both.addresses) == ADDRESSES_MAX


@pytest.mark.parametrize(
    "address", ["", "a.example", "a.example:0", "a.example:65536", "a b:1", "http://a:1", "/etc/passwd:1", "é:1"]
)
def test_what_is_no_address_is_left_out(address: str) -> None:
    assert Contacts((address, "a.example:1")).addresses == ("a.example:1",)


@pytest.mark.parametrize(
    "maddr",
    [
        "",
        "/ip4/192.0.2.1/tcp/31330",
        f"/ip4/192.0.2.1/tcp/0/p2p/{IDENTITY}",
        f"/ip4/192.0.2.1/tcp/70000/p2p/{IDENTITY}",
        f"/ip4/192.0.2.1/udp/31330/quic/p2p/{IDENTITY}",
        f"/unix/tmp/tcp/1/p2p/{IDENTITY}",
        f"/dns4/{'a' * TEXT_MAX}/tcp/1/p2p/{IDENTITY}",
    ],
)
def test_what_is_no_multiaddress_of_a_peer_is_left_out(maddr: str) -> None:
    assert Contacts(maddrs=(maddr, MADDR)).maddrs == (MADDR,)


def test_the_largest_there_can_be_fits_into_an_answer() -> None:
    long = "a" * (TEXT_MAX - 60)
    full = Contacts(
        tuple(f"{long}:{10_000 + n}" for n in range(ADDRESSES_MAX)),
        tuple(f"/dns4/{long[:190]}/tcp/{10_000 + n}/p2p/{IDENTITY}"[:TEXT_MAX] for n in range(MADDRS_MAX)),
    )
    assert contacts_from_json(full.to_json()) == full
    assert len(full.addresses) == ADDRESSES_MAX and len(full.to_json()) < CONTACTS_BYTES_MAX


def test_other_keys_are_ignored_and_other_kinds_are_nothing() -> None:
    said = {"addresses": ["a.example:1", 7, None, ["b"]], "maddrs": "x", "later": {}}
    assert contacts_from_json(json.dumps(said).encode()) == Contacts(("a.example:1",))


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 5000, b" " * CONTACTS_BYTES_MAX + b"{}"])
def test_what_is_something_else_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="contacts"):
        contacts_from_json(body)


def test_what_was_written_is_read_and_nothing_is_none(tmp_path: Path) -> None:
    path = tmp_path / "contacts.json"
    assert read_contacts(path) == Contacts() and not read_contacts(path)
    write_contacts(path, ONE)
    assert read_contacts(path) == ONE


def test_a_write_that_breaks_off_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "contacts.json"
    write_contacts(path, ONE)

    def crash(handle: int) -> None:
        raise OSError("no power")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="no power"):
        write_contacts(path, Contacts(("b.example:1",)))
    assert read_contacts(path) == ONE and list(tmp_path.iterdir()) == [path]


def test_a_peer_says_where_others_are(tmp_path: Path) -> None:
    async def go() -> Contacts:
        async with served(BlobStore(tmp_path / "blobs"), RememberingPort(known=ONE)) as it:
            return await fetch_contacts(it.session, it.url)

    assert asyncio.run(go()) == ONE


def test_an_endless_answer_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Contacts, "to_json", lambda self: b" " * (CONTACTS_BYTES_MAX + 1))

    async def go() -> None:
        async with served(BlobStore(tmp_path / "blobs"), RememberingPort()) as it:
            await fetch_contacts(it.session, it.url)

    with pytest.raises(RemoteProtocolError, match="at most"):
        asyncio.run(go())
