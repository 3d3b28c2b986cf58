"""A peer that finds its own identity at work elsewhere ends, and what only looks so does not end it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geo_diloco.config import PeerConfig
from geo_diloco.errors import RunDirError, TransferError
from geo_diloco.manifest import WIRE_VERSION, BootId, PeerId, RunId, Seq, Term
from geo_diloco.node import station as station_module
from geo_diloco.node.member import Member
from geo_diloco.node.rundir import RunDir
from geo_diloco.node.station import Station
from geo_diloco.runtime.records import PeerRecord

ME, OTHER = PeerId("ab" * 32), PeerId("cd" * 32)
BOOT = BootId("1" * 16)
OURS = PeerRecord(
    run=RunId("0f" * 20),
    peer=ME,
    roles=("syncer",),
    address="192.0.2.1:31340",
    term=Term(1),
    boot=BOOT,
    head_seq=Seq(3),
    wire_version=WIRE_VERSION,
)
DOUBLE = replace(OURS, boot=BootId("2" * 16), address="192.0.2.9:31340")


def look(records: list[PeerRecord], said: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch_status(session: object, url: str) -> dict[str, Any]:
        assert url == "http://192.0.2.9:31340"
        if said is None:
            raise TransferError("connection refused")
        return said

    monkeypatch.setattr(station_module, "fetch_status", fetch_status)
    station = object.__new__(Station)
    station.boot = BOOT
    station._records = records
    station._p = SimpleNamespace(  # type: ignore[assignment]
        identity=SimpleNamespace(peer_id=ME),
        hello=SimpleNamespace(address=OURS.address),
        bulk=SimpleNamespace(session=None),
        run_dir=RunDir(Path("runs/mine")),
    )
    asyncio.run(station._end_if_doubled())


def test_a_double_that_answers_elsewhere_ends_this_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RunDirError, match=r"this peer's identity, at 192\.0\.2\.9:31340: its folder or runs/mine is a copy"
    ):
        look([OURS, DOUBLE], {"peer": ME}, monkeypatch)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (DOUBLE, None),  # the process before us
        (DOUBLE, {"peer": OTHER}),  # somebody else has its port by now
        (replace(DOUBLE, address=OURS.address), {"peer": ME}),  # the process before us, at our own port
        (replace(DOUBLE, address=""), {"peer": ME}),
        (replace(DOUBLE, peer=OTHER), {"peer": OTHER}),
    ],
)
def test_what_is_no_double_does_not(
    record: PeerRecord, said: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    look([OURS, record], said, monkeypatch)


def test_bulk_is_closed_after_those_who_fetch_by_it(tmp_path: Path) -> None:
    closed: list[str] = []

    def closing(name: str, *, turns: int = 1) -> Any:
        async def close(*_: object) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            closed.append(name)

        return close

    async def leave() -> None:
        bulk, directory = SimpleNamespace(close=closing("bulk")), SimpleNamespace(close=closing("directory"))

        async def close() -> None:
            await bulk.close()

        lobby: Any = SimpleNamespace(run_dir=RunDir(tmp_path), bulk=bulk, directory=directory, close=close)
        member = Member(lobby, PeerConfig())
        member.failure = RunDirError("it ends")
        station: Any = SimpleNamespace(close=closing("station", turns=20))
        member._station = station
        member._write_summary = lambda: None  # type: ignore[method-assign]
        await member.leave(last_save=None)

    asyncio.run(leave())
    assert closed.index("station") < closed.index("bulk")
