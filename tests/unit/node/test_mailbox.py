"""The mailbox: what ends a wait of the training thread, and what does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from geo_diloco.node.mailbox import Mailbox
from geo_diloco.training.learner import FinishOrder, SampleOrder

LONG_S = 600.0


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    loop = asyncio.new_event_loop()
    yield Mailbox(loop, lambda report: None)
    loop.close()


def waited(mailbox: Mailbox, event: Callable[[], None]) -> bool:
    """Whether a thread that keeps its pace goes on when that happens."""
    thread = threading.Thread(target=mailbox.wait_over, args=(LONG_S,), daemon=True)
    thread.start()
    event()
    thread.join(10.0)
    return not thread.is_alive()


def test_leaving_ends_a_step_that_keeps_its_pace(mailbox: Mailbox) -> None:
    assert waited(mailbox, lambda: mailbox.finish("SIGINT"))
    assert [order.reason for order in mailbox.take_orders() if isinstance(order, FinishOrder)] == ["SIGINT"]


def test_a_failure_ends_it_too(mailbox: Mailbox) -> None:
    assert waited(mailbox, lambda: mailbox.fail(RuntimeError("gone")))


def test_orders_do_not_end_it_and_wait_for_the_boundary(mailbox: Mailbox) -> None:
    order = SampleOrder(0, 1)
    mailbox.post(order)
    mailbox.wait_over(0.001)
    assert mailbox.take_orders() == [order]
