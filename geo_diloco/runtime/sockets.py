"""What we ask of the kernel for a TCP connection that carries bulk, and what it can tell us about one.

Stands apart because all of it is a wish: where a kernel lacks an option, the connection is used as it is. The sender's
side decides how a link is filled, so both the dialing and the serving side ask for the same.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

UNSENT_BYTES_MAX = 32 << 10
"""Kept small so that what the kernel takes from us is what the network carries."""
_ACKED_AT, _ACKED_END = 120, 128
"""Where `struct tcp_info` of Linux has the count of bytes that the other end has acknowledged."""


class _Asked(Protocol):
    """A socket, as a transport shows it."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def prepare(made: socket.socket, *, congestion: Sequence[str], receive_bytes: int = 0) -> None:
    """Set up a socket before it dials or listens (accepted ones inherit): the first of the `congestion` controls that
    this kernel lets us have, and if `receive_bytes` is given, room for no more than that of what we have not read."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with suppress(OSError):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
    if receive_bytes:
        with suppress(OSError):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    if hasattr(socket, "TCP_CONGESTION"):
        for name in congestion:
            with suppress(OSError):
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
                return


def congestion_in_use(made: socket.socket) -> str:
    """The name of a socket's congestion control; empty where the kernel doesn't say."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    try:
        return made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode("ascii", "replace")
    except OSError:
        return ""


def congestion_granted(congestion: Sequence[str]) -> str:
    """The one that a connection has here which asks for those."""
    with socket.socket() as made:
        prepare(made, congestion=congestion)
        return congestion_in_use(made)


def bytes_acked(transport: Any) -> int | None:
    """How many bytes the other end of an asyncio transport has acknowledged; None where the kernel doesn't say."""
    asked: _Asked | None = None if transport is None else transport.get_extra_info("socket")
    if asked is None or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        told = asked.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_END)
    except OSError:
        return None
    return int(struct.unpack_from("=Q", told, _ACKED_AT)[0]) if len(told) >= _ACKED_END else None
