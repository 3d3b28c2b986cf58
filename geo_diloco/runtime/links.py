"""Control connections as the core means them: `Send`, `CloseConnection` and `Announce` one way, events the other.

Any two peers may talk, and either may have dialed: links that others dialed come from the HTTP server, those we dial
are held here. Between two peers there may be one of each; what is sent takes the newest that is open, and a peer is
gone when its last one is. Nobody dials a peer twice at a time, because the second would replace the first there. All
messages go in signed envelopes of the connection's nonce with a number that counts up. The admission proof belongs to
a connection, so it is put into Hello here, not by the core.
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

from geo_diloco.errors import LocalProtocolError, RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import BootId, PeerId, RunId
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import CloseConnection, Send
from geo_diloco.protocol.events import Connected, Disconnected, Received
from geo_diloco.protocol.messages import Envelope, Hello, Message
from geo_diloco.runtime.control import CLOSE_PROTOCOL, ControlLink
from geo_diloco.runtime.driver import Driver, Interpreter
from geo_diloco.runtime.identity import Identity, admission_proof
from geo_diloco.runtime.wire import Signed, seal_envelope

NONCE = re.compile(r"\?nonce=[0-9a-f]+")
"""Left out of reasons, so that the same one reads the same."""
WAITING_MAX = 32
"""Messages that wait for one peer to be dialed; the oldest goes. Every one of them is said again by the core."""
DIALED_MAX = 64
"""Links that we dial for ballots, at once."""
DIAL_PAUSE_S = 1.0
"""After a dial that failed, nobody is dialed again sooner."""


class Sealer:
    """Makes this process's envelopes."""

    def __init__(self, identity: Identity, *, run: RunId, boot: BootId, token: str = "") -> None:
        self._identity = identity
        self._run = run
        self._boot = boot
        self._token = token

    def proof(self, link: ControlLink) -> str:
        """That this peer was given the run's admission token; empty in a run without one."""
        if not self._token:
            return ""
        return admission_proof(self._token, nonce=link.nonce, peer=self._identity.peer_id)

    def seal(self, effect: Send, link: ControlLink) -> str:
        message = effect.message
        if isinstance(message, Hello) and self._token:
            message = dataclasses.replace(message, proof=self.proof(link))
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


Connect = Callable[[str, PeerId | None], AbstractAsyncContextManager[ControlLink]]
"""Dial a base URL where that peer (if one is named) must be."""


class Links:
    """All control connections of a process. For the event loop's thread."""

    def __init__(
        self,
        driver: Driver,
        sealer: Sealer,
        *,
        connect: Connect,
        url_of: Callable[[PeerId], str | None],
        take_entry: Callable[[Signed], None],
        heard: Callable[[PeerId, Message], None],
        log: EventLog,
    ) -> None:
        """`url_of`: where a peer can be dialed, if it can; `heard` is told every message once the core has it."""
        self._driver = driver
        self._sealer = sealer
        self._connect = connect
        self._url_of = url_of
        self._take_entry = take_entry
        self._heard = heard
        self._log = log
        self._links: dict[PeerId, list[ControlLink]] = {}
        """Oldest first; none without one."""
        self._dialing: dict[PeerId, deque[Send]] = {}
        """What waits for a dial that is under way."""
        self._held: set[PeerId] = set()
        """Whom we have dialed."""
        self._not_before: dict[PeerId, float] = {}

    def interpreters(self) -> Mapping[type, Interpreter]:
        return {Send: self._send, CloseConnection: self._close}

    @property
    def num_peers(self) -> int:
        return len(self._links)

    @property
    def is_settled(self) -> bool:
        """No link is on its way out."""
        return not any(link.is_closing for links in self._links.values() for link in links)

    def broadcast(self, line: str | bytes) -> None:
        for peer in list(self._links):
            self.tell(peer, line)

    def tell(self, peer: PeerId, line: str | bytes) -> bool:
        """An entry, as it is or packed. False if there is no link to that peer."""
        link = self._open_link(peer)
        if link is not None:
            link.send(line)
        return link is not None

    def _open_link(self, peer: PeerId) -> ControlLink | None:
        return next((link for link in reversed(self._links.get(peer, [])) if not link.is_closing), None)

    # ---- links that others dialed: `http.ServerPort`

    def opened(self, link: ControlLink, envelope: Envelope) -> None:
        if not self._is_fine(link, envelope):
            return
        self._add(link, seeking=False)
        self._hear(link, envelope)

    def received(self, link: ControlLink, item: Envelope | Signed) -> None:
        """A truncated, forged or foreign one closes the link by name; a repeated one is the core's to pass over."""
        if link not in self._links.get(link.peer, []):
            return
        if isinstance(item, Signed):
            try:
                self._take_entry(item)
            except RemoteProtocolError as exc:
                link.close(str(exc), code=CLOSE_PROTOCOL)
        elif self._is_fine(link, item):
            self._hear(link, item)

    def closed(self, link: ControlLink, reason: str) -> None:
        links = self._links.get(link.peer, [])
        if link not in links:
            return
        links.remove(link)
        if not links:
            del self._links[link.peer]
            self._driver.feed(Disconnected(link.peer, reason))

    def _is_fine(self, link: ControlLink, envelope: Envelope) -> bool:
        """Told before it comes onto the tape: Hello is the one message whose length the sender chooses."""
        num_fragments = len(self._driver.core.ledger.heads)
        message = envelope.message
        if isinstance(message, Hello) and len(message.undecided) > num_fragments > 0:
            link.close("more undecided contributions than there are fragments", code=CLOSE_PROTOCOL)
            return False
        return True

    def _add(self, link: ControlLink, *, seeking: bool) -> None:
        is_first = link.peer not in self._links
        self._links.setdefault(link.peer, []).append(link)
        if is_first or seeking:
            self._driver.feed(Connected(link.peer, seeking))
        for effect in self._dialing.pop(link.peer, ()):
            self._say(effect, link)

    def _hear(self, link: ControlLink, envelope: Envelope) -> None:
        self._driver.feed(
            Received(envelope.sender, envelope.branch, envelope.term, envelope.boot, envelope.message, link.evidence)
        )
        self._heard(envelope.sender, envelope.message)

    # ---- links that we dial

    async def hold(
        self, url: str, expected: PeerId | None, *, seeking: bool, up: Callable[[PeerId], None] = lambda peer: None
    ) -> str:
        """Dial, and hand over what comes until the connection ends; returns why. `up` is called when there is one.

        Raises TransferError or RemoteProtocolError if there is none, RefusedError if this peer is not admitted there.
        """
        async with self._connect(url, expected) as link:
            peer = link.peer
            if peer not in self._held:
                self._held.add(peer)
                try:
                    up(peer)
                    return await self._talk(link, seeking=seeking)
                finally:
                    self._held.discard(peer)
        there = self._open_link(peer)
        if seeking and there is not None:
            up(peer)
            return await self._seek_over(there)
        raise TransferError(f"{peer[:8]} is dialed already")

    async def seek(self, url: str, expected: PeerId | None, *, up: Callable[[PeerId], None]) -> str:
        """As `hold`, for the one whom we take for the syncer; over the link that there is to it, if there is one."""
        there = None if expected is None else self._open_link(expected)
        if there is not None:
            up(there.peer)
            return await self._seek_over(there)
        return await self.hold(url, expected, seeking=True, up=up)

    async def _talk(self, link: ControlLink, *, seeking: bool) -> str:
        if proof := self._sealer.proof(link):
            link.send_pass(proof)
        self._add(link, seeking=seeking)
        try:
            async for item in link:
                self.received(link, item)
        finally:
            self.closed(link, link.close_reason or "connection lost")
        if link.is_refused:
            raise RefusedError(link.close_reason)
        return link.close_reason

    async def _seek_over(self, link: ControlLink) -> str:
        self._driver.feed(Connected(link.peer, True))
        await link.wait_closing()
        return link.close_reason

    def _dial(self, effect: Send) -> None:
        """For a ballot: it waits, bounded, for the link to be made."""
        peer, now = effect.to, self._driver.now() / 1000
        if (waiting := self._dialing.get(peer)) is not None:
            waiting.append(effect)
            return
        url = self._url_of(peer)
        if url is None or now < self._not_before.get(peer, 0.0) or len(self._dialing) >= DIALED_MAX:
            return
        self._dialing[peer] = deque([effect], WAITING_MAX)
        self._driver.start(self._hold_for_ballots(peer, url), name=f"dial {peer[:8]}")

    async def _hold_for_ballots(self, peer: PeerId, url: str) -> None:
        try:
            await self.hold(url, peer, seeking=False)
        except (TransferError, RemoteProtocolError, RefusedError) as exc:
            self._log.note("ballots", f"{peer[:8]}: {NONCE.sub('', str(exc))}", level="debug")
        finally:
            self._dialing.pop(peer, None)
            self._not_before[peer] = self._driver.now() / 1000 + DIAL_PAUSE_S
            while len(self._not_before) > DIALED_MAX:
                del self._not_before[next(iter(self._not_before))]

    # ---- effects

    def _send(self, effect: Send) -> None:
        link = self._open_link(effect.to)
        if link is not None:
            self._say(effect, link)
        elif effect.dial:
            self._dial(effect)

    def _say(self, effect: Send, link: ControlLink) -> None:
        def seal() -> str:
            try:
                return self._sealer.seal(effect, link)
            except LocalProtocolError as exc:
                self._driver.fail(exc)
                raise

        link.send_sealed(seal)

    def _close(self, effect: CloseConnection) -> None:
        for link in self._links.get(effect.peer, []):
            link.close(effect.reason)
