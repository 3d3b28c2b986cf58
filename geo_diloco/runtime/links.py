"""Control connections as the core means them: `Send`, `CloseConnection` and `Announce` one way, events the other.

At the accepting end (the syncer) there are many links, at the dialing end one, which is made again for ever. Both put
messages into signed envelopes of the connection's nonce with a number that counts up. The admission proof belongs to
a connection, so it is put into Hello here, not by the core.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager

from geo_diloco.errors import RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import BootId, PeerId, RunId
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import CloseConnection, Send
from geo_diloco.protocol.events import Connected, Disconnected, Received
from geo_diloco.protocol.messages import Envelope, Hello
from geo_diloco.runtime.control import CLOSE_PROTOCOL, ControlLink
from geo_diloco.runtime.driver import Driver, Interpreter
from geo_diloco.runtime.following import Backoff
from geo_diloco.runtime.identity import Identity, admission_proof
from geo_diloco.runtime.wire import Signed, seal_envelope

_NONCE = re.compile(r"\?nonce=[0-9a-f]+")
"""Left out of reasons, so that the same one reads the same."""


class Sealer:
    """Makes this process's envelopes."""

    def __init__(self, identity: Identity, *, run: RunId, boot: BootId, token: str = "") -> None:
        self._identity = identity
        self._run = run
        self._boot = boot
        self._token = token

    def seal(self, effect: Send, link: ControlLink) -> str:
        message = effect.message
        if isinstance(message, Hello) and self._token:
            proof = admission_proof(self._token, nonce=link.nonce, peer=self._identity.peer_id)
            message = dataclasses.replace(message, proof=proof)
        envelope = Envelope(
            run=self._run,
            branch=effect.branch,
            term=effect.term,
            boot=self._boot,
            sender=self._identity.peer_id,
            to=effect.to,
            nonce=link.nonce,
            number=link.next_number(),
            message=message,
        )
        return seal_envelope(envelope, self._identity)


def _received(envelope: Envelope) -> Received:
    return Received(envelope.sender, envelope.branch, envelope.term, envelope.boot, envelope.message)


class AcceptedLinks:
    """The syncer's side: one link per peer, kept by the HTTP server, which calls `opened`, `received` and `closed`."""

    def __init__(self, driver: Driver, sealer: Sealer) -> None:
        self._driver = driver
        self._sealer = sealer
        self._links: dict[PeerId, ControlLink] = {}

    def interpreters(self) -> Mapping[type, Interpreter]:
        return {Send: self._send, CloseConnection: self._close}

    @property
    def num_open(self) -> int:
        return len(self._links)

    def broadcast(self, text: str) -> None:
        for link in list(self._links.values()):
            link.send(text)

    def opened(self, link: ControlLink, envelope: Envelope) -> None:
        if self._is_too_long(envelope):
            link.close("more undecided contributions than there are fragments", code=CLOSE_PROTOCOL)
            return
        self._links[link.peer] = link
        self._driver.feed(Connected(link.peer))
        self._driver.feed(_received(envelope))

    def received(self, link: ControlLink, envelope: Envelope) -> None:
        if self._links.get(link.peer) is not link:
            return
        if self._is_too_long(envelope):
            link.close("more undecided contributions than there are fragments", code=CLOSE_PROTOCOL)
            return
        self._driver.feed(_received(envelope))

    def _is_too_long(self, envelope: Envelope) -> bool:
        """Told before it comes onto the tape: it is the one message whose length the sender chooses."""
        num_fragments = len(self._driver.core.ledger.heads)
        return isinstance(envelope.message, Hello) and len(envelope.message.undecided) > num_fragments

    def closed(self, link: ControlLink, reason: str) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            self._driver.feed(Disconnected(link.peer, reason))

    def _send(self, effect: Send) -> None:
        link = self._links.get(effect.to)
        if link is not None and not link.is_closing:
            link.send(self._sealer.seal(effect, link))

    def _close(self, effect: CloseConnection) -> None:
        link = self._links.get(effect.peer)
        if link is not None:
            link.close(effect.reason)


Connect = Callable[[str], AbstractAsyncContextManager[ControlLink]]
"""Dial a base URL."""


class DialedLink:
    """Everyone else's side: the one connection to the syncer, dialed again for ever, with jitter."""

    def __init__(
        self,
        driver: Driver,
        sealer: Sealer,
        *,
        connect: Connect,
        locate: Callable[[], Awaitable[str]],
        take_entry: Callable[[Signed], None],
        log: EventLog,
    ) -> None:
        """`locate` waits until it knows the syncer's base URL; asked again after every failure."""
        self._driver = driver
        self._sealer = sealer
        self._connect = connect
        self._locate = locate
        self._take_entry = take_entry
        self._log = log
        self._link: ControlLink | None = None
        self._number = 0
        self._is_leaving = False
        self.refused: RefusedError | None = None

    def interpreters(self) -> Mapping[type, Interpreter]:
        return {Send: self._send, CloseConnection: self._close}

    @property
    def connection(self) -> int:
        """Counts connections; 0 while there is none."""
        return self._number if self._link is not None else 0

    async def run(self) -> None:
        """Until cancelled, refused for good (`refused`), or closed because this peer leaves."""
        backoff = Backoff()
        while not self._is_leaving:
            url = await self._locate()
            try:
                async with self._connect(url) as link:
                    backoff.reset()
                    reason = await self._serve(link)
                    if link.is_refused:
                        raise RefusedError(reason)
            except RefusedError as exc:
                self.refused = exc
                return
            except (TransferError, RemoteProtocolError) as exc:
                reason = _NONCE.sub("", str(exc))
            if not self._is_leaving:
                self._log.note("link", f"no connection to the syncer, trying again: {reason}", level="warning")
                await backoff.wait()

    async def _serve(self, link: ControlLink) -> str:
        self._number += 1
        self._link = link
        try:
            self._log.note("link", f"connected to the syncer {link.peer[:8]}")
            self._driver.feed(Connected(link.peer))
            async for item in link:
                try:
                    if isinstance(item, Signed):
                        self._take_entry(item)
                    else:
                        self._driver.feed(_received(item))
                except RemoteProtocolError as exc:
                    link.close(str(exc))
                    break
        finally:
            self._link = None
            self._driver.feed(Disconnected(link.peer, link.close_reason))
        return link.close_reason

    def _send(self, effect: Send) -> None:
        link = self._link
        if link is not None and link.peer == effect.to and not link.is_closing:
            link.send(self._sealer.seal(effect, link))

    def _close(self, effect: CloseConnection) -> None:
        if self._link is not None and self._link.peer == effect.peer:
            self._is_leaving = True
            self._link.close(effect.reason)
