"""An owner's order to his own peer: by its key, for its run, once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from geo_diloco.errors import RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import RunId
from geo_diloco.runtime.door import OCCASION_S, Occasions
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.session import TransferRefused, give_order
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import Order, Signed, open_order, seal_envelope, seal_order

from .samples import RUN, RememberingPort, Served, envelope, hello, served

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


def test_whoever_asks_for_many_occasions_takes_away_nobodys(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async def others_ask() -> None:
            for _ in range(100):
                with pytest.raises(TransferRefused):
                    await give_order(it.session, it.url, lambda nonce: "nonsense")

        nonces: list[str] = []
        with pytest.raises(TransferRefused):  # its owner was about to give one
            await give_order(it.session, it.url, lambda nonce: nonces.append(nonce) or "")  # type: ignore[func-returns-value]
        await others_ask()
        await give_order(it.session, it.url, lambda _: seal_order(replace(ORDER, nonce=nonces[0]), it.identity))
        assert len(it.port.orders) == 1

    with_server(tmp_path, talk)


def test_an_occasion_is_good_once_and_not_for_long() -> None:
    occasions, others = Occasions(), Occasions()
    nonce = occasions.new(5.0)
    assert not others.take(nonce, 5.0), "of another process start"
    assert occasions.take(nonce, 5.0 + OCCASION_S)
    assert not occasions.take(nonce, 5.0 + OCCASION_S)
    assert not occasions.take(occasions.new(5.0), 5.1 + OCCASION_S)
    for forged in ("", nonce[:-1], nonce[:32], "f" * 96, "\u00e9" + nonce[1:], nonce[::-1]):
        assert not occasions.take(forged, 5.0)


def test_what_the_runs_owner_orders_a_syncers_own_key_can_not(tmp_path: Path) -> None:
    owner = Identity.generate()

    async def talk(it: Served) -> None:
        it.port.runs_owner = owner.peer_id
        wish = replace(ORDER, wish="amend", signed="as signed")
        for key, order in ((it.identity, wish), (owner, ORDER)):
            with pytest.raises(TransferRefused, match="signed by another key"):
                await give_order(it.session, it.url, lambda n, o=order, k=key: seal_order(replace(o, nonce=n), k))
        assert it.port.orders == []
        await give_order(it.session, it.url, lambda nonce: seal_order(replace(wish, nonce=nonce), owner))
        assert [(order.wish, order.signed) for order in it.port.orders] == [("amend", "as signed")]

    with_server(tmp_path, talk)


@pytest.mark.parametrize(
    ("raised", "seen"), [(RefusedError("no"), TransferRefused), (TransferError("elsewhere"), TransferError)]
)
def test_an_order_that_can_not_be_followed_is_answered_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, seen: type[Exception]
) -> None:
    def refuse(self: RememberingPort, order: Order) -> str:
        raise raised

    monkeypatch.setattr(RememberingPort, "order", refuse)

    async def talk(it: Served) -> None:
        with pytest.raises(seen, match=str(raised)) as caught:
            await give_order(it.session, it.url, lambda n: seal_order(replace(ORDER, nonce=n), it.identity))
        assert type(caught.value) is seen

    with_server(tmp_path, talk)


def test_an_order_that_was_changed_is_refused() -> None:
    me = Identity.generate()
    assert open_order(seal_order(ORDER, me)) == (ORDER, me.peer_id)
    signed = Signed.from_line(seal_order(ORDER, me))
    with pytest.raises(RemoteProtocolError, match="signature"):
        open_order(replace(signed, body=signed.body.replace("null", f'"{me.peer_id}"')).to_line())
