"""A peer whose model is cut differently is told what differs first, whoever built which model where."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from geo_diloco.errors import LayoutError
from geo_diloco.node.contacting import ContactBook
from geo_diloco.node.joining import Lobby, check_same_layout
from geo_diloco.node.rundir import RunDir
from geo_diloco.numerics.fragments import Layout, layout_from_module
from geo_diloco.observability import EventLog
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.store import BlobStore
from tests.unit.runtime.samples import RUN, RememberingPort, served

HERE = layout_from_module(nn.Linear(3, 4), num_fragments=1)
THERE = layout_from_module(nn.Linear(3, 5), num_fragments=1)


def refusal(tmp_path: Path, run: Layout, *, shown: bytes) -> str:
    """Of the peer with layout HERE, in a run whose layout is `run` and whose syncer shows that."""

    async def go() -> None:
        async with served(BlobStore(tmp_path / "blobs"), RememberingPort(layout=shown)) as it:
            log, unused = EventLog(tmp_path / "log", level="error"), Any
            invite = Invite(run=RUN, bootstraps=("/ip4/127.0.0.1/tcp/1/p2p/Qm1",))
            lobby = Lobby(
                invite,
                RunDir(tmp_path),
                Identity.generate(),
                log,
                unused,  # type: ignore[arg-type]
                Bulk(it.session),
                ContactBook(RUN, log),
            )
            try:
                await check_same_layout(lobby, it.url, run.digest, run.num_elements, HERE)
            finally:
                log.close()

    with pytest.raises(LayoutError) as caught:
        asyncio.run(go())
    return str(caught.value)


def test_the_first_tensor_that_differs_is_named(tmp_path: Path) -> None:
    said = refusal(tmp_path, THERE, shown=THERE.to_json().encode())
    assert "(here: this model; there: the run): tensor 'bias' has shape (4,) here and (5,) there; 16 parameters" in said
    assert f"in 1 fragments (layout {HERE.digest[:12]}) here, 20 in 1 ({THERE.digest[:12]}) there" in said


@pytest.mark.parametrize("shown", [b"", HERE.to_json().encode()], ids=["nothing", "another"])
def test_a_layout_that_is_not_the_runs_is_not_believed(shown: bytes, tmp_path: Path) -> None:
    said = refusal(tmp_path, THERE, shown=shown)
    assert "tensor" not in said
    assert "16 parameters" in said and "20 in 1" in said
    assert "what differs can't be told" not in said


def test_the_same_layout_is_no_news(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refusal(tmp_path, HERE, shown=b"")
