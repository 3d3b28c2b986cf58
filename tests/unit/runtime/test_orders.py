"""An owner's order to his own peer: by its key, for its run, once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from geo_diloco.errors import RemoteProtocolError
from geo_diloco.manifest import RunId
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.session import TransferRefused, give_order
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import Order, Signed, open_order, seal_envelope, seal_order

from .samples import RUN, Served, envelope, hello, served

ORDER = Order(run=RUN, nonce="n", wish="hand_over", to=None)


def with_server(tmp_path: Path, talk: Callable[[Served], Awaitable[None]]) -> None:
    async def run() -> None:
        async with served(BlobStore(tmp_path)) as it:
            await talk(it)

    asyncio.run(run())


def test_the_owner_is_heard_and_answered(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        answer = await give_order(
            it.session, it.url, lambda nonce: seal_order(replace(ORDER, nonce=nonce), it.identity)
        )
        assert answer == "done"
        assert [(order.wish, order.to) for order in it.port.orders] == [("hand_over", None)]

    with_server(tmp_path, talk)


def test_nobody_else_is(tmp_path: Path) -> None:
    stranger = Identity.generate()

    async def talk(it: Served) -> None:
        given: list[str] = []

        def twice(nonce: str) -> str:
            given.append(seal_order(replace(ORDER, nonce=nonce), it.identity))
            return given[0]

        for order in (
            lambda nonce: seal_order(replace(ORDER, nonce=nonce), stranger),
            lambda nonce: seal_order(replace(ORDER, nonce="of another occasion"), it.identity),
            lambda nonce: seal_order(replace(ORDER, nonce=""), it.identity),
            lambda nonce: seal_order(replace(ORDER, nonce=nonce, run=RunId("9" * 40)), it.identity),
            lambda nonce: seal_envelope(envelope(it.identity.peer_id, it.identity.peer_id, hello()), it.identity),
            lambda nonce: "nonsense",
            lambda nonce: "x" * 20_000,
        ):
            with pytest.raises(TransferRefused):
                await give_order(it.session, it.url, order)
        assert it.port.orders == []
        await give_order(it.session, it.url, twice)
        with pytest.raises(TransferRefused):
            await give_order(it.session, it.url, twice)
        assert len(it.port.orders) == 1

    with_server(tmp_path, talk)


def test_an_order_that_was_changed_is_refused() -> None:
    me = Identity.generate()
    assert open_order(seal_order(ORDER, me)) == (ORDER, me.peer_id)
    signed = Signed.from_line(seal_order(ORDER, me))
    with pytest.raises(RemoteProtocolError, match="signature"):
        open_order(replace(signed, body=signed.body.replace("null", f'"{me.peer_id}"')).to_line())
