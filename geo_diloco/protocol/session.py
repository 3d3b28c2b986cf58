"""Our connection to whoever is syncer: whom we take for it, Hello and what is answered, and when to look elsewhere.

It stands apart because it must work whatever we believe: the one we are connected to may not serve any more, or not
yet, or think that it does; what counts in the end is that a proven `open` names it and that it answers.
"""

from __future__ import annotations

from geo_diloco.manifest import WIRE_VERSION, Digest, MonoMs, PeerId
from geo_diloco.protocol.chain import Chain, Outcome, SyncerChanged
from geo_diloco.protocol.effects import CloseConnection, Effect, Note, RefusedForGood, SeekSyncer, Send
from geo_diloco.protocol.election.ballots import Refuse
from geo_diloco.protocol.events import Received
from geo_diloco.protocol.learner import Learner
from geo_diloco.protocol.messages import Decision, Durable, Goodbye, Hello, Message, RoundOpen, Welcome
from geo_diloco.protocol.seat import HelloFacts

HELLO_MS = 5_000
"""A Hello that is not answered for so long was said to one who does not serve."""
REFUSED_FOR_GOOD = frozenset({"layout", "wire", "token", "run"})


class Session:
    """One peer's side of it. Nobody has one with itself."""

    def __init__(self, facts: HelloFacts, layout_digest: Digest, chain: Chain, learner: Learner | None) -> None:
        self._facts = facts
        self._layout_digest = layout_digest
        self._chain = chain
        self._learner = learner
        self.syncer: PeerId | None = None
        """Whom we take for it."""
        self._welcomed = False
        self.deadline: MonoMs | None = None
        """When an unanswered Hello counts as refused."""

    # -- connections ----------------------------------------------------------------------------------------------

    def connected(self, peer: PeerId, now: MonoMs) -> list[Effect]:
        self.disconnected()
        self.syncer = peer
        self._chain.forget_asking()
        return self.say_hello(now)

    def disconnected(self) -> None:
        self.syncer, self._welcomed, self.deadline = None, False, None
        if self._learner is not None:
            self._learner.disconnected()

    def seek(self, why: str, peer: PeerId | None = None, address: str = "") -> list[Effect]:
        """Turn from whoever we took for the syncer to somebody else."""
        return [*self.close(why), SeekSyncer(peer, address)]

    def _turn_away(self, why: str) -> list[Effect]:
        """As `seek`, from one that answered. An elector lets the connection be: who does not serve may ask for votes,
        and an elector that only dials out is asked over what it has dialed."""
        if not self._chain.election.is_elector:
            return self.seek(why)
        self.disconnected()
        return [SeekSyncer(None, "")]

    def close(self, why: str) -> list[Effect]:
        peer = self.syncer
        self.disconnected()
        return [] if peer is None else [CloseConnection(peer, why)]

    def syncer_changed(self, news: SyncerChanged, now: MonoMs) -> list[Effect]:
        """An `open` of a higher term counts."""
        if news.peer == self.syncer:
            return self.say_hello(now)
        return self.seek(f"term {news.term} is another's", news.peer, news.address)

    def advance(self, now: MonoMs) -> list[Effect]:
        if self.deadline is None or now < self.deadline:
            return []
        return self.seek("no answer to Hello")

    def leave(self) -> list[Effect]:
        """Say Goodbye, so that nobody waits for us."""
        if self.syncer is None:
            return []
        return [self._send(self.syncer, Goodbye(reason="leaving")), CloseConnection(self.syncer, "leaving")]

    # -- messages -------------------------------------------------------------------------------------------------

    def _send(self, to: PeerId, message: Message) -> Send:
        return Send(to, self._chain.branch, self._chain.term, message)

    def say_hello(self, now: MonoMs) -> list[Effect]:
        if self.syncer is None or self._welcomed:
            return []
        learner, facts = self._learner, self._facts
        self.deadline = MonoMs(now + HELLO_MS)
        hello = Hello(
            wire_version=WIRE_VERSION,
            layout_digest=self._layout_digest,
            trains=learner is not None,
            host=facts.host,
            software=facts.software,
            address=facts.address,
            step=0 if learner is None else learner.step,
            tokens=0 if learner is None else learner.tokens,
            head_seq=self._chain.ledger.seq,
            undecided=() if learner is None else learner.undecided_ids(),
            proof=facts.proof,
            holds=None if learner is None else learner.holds(),
        )
        return [self._send(self.syncer, hello)]

    def refused(self, sender: PeerId, refuse: Refuse, now: MonoMs) -> list[Effect]:
        if sender != self.syncer:
            return []
        if refuse.reason in REFUSED_FOR_GOOD:
            return [RefusedForGood(f"{refuse.reason}: {refuse.detail}")]
        if refuse.reason == "not_serving":
            return self._turn_away(refuse.detail)
        if refuse.reason == "hello":
            self._welcomed = False
            return [Note("refused", f"{refuse.reason}: {refuse.detail}", "warning"), *self.say_hello(now)]
        if refuse.reason == "term":
            # It serves a term that we have not heard of: as it should be after any election.
            text = f"the run goes on in another term: {refuse.detail}"
            return [Note("refused", text, "debug"), self._chain.ask_again()]
        if refuse.reason == "branch":
            # As it should be, too, for a peer that has just joined and has no chain yet, and after a reform.
            return [Note("refused", f"{refuse.reason}: {refuse.detail}", "debug"), self._chain.ask_again()]
        return []

    def heard(self, event: Received) -> Outcome:
        """Only from the one we said Hello to, and only if the chain says that it serves."""
        opened = self._chain.election.opened
        if event.sender != self.syncer or opened is None or event.sender != opened.syncer:
            return []
        learner, message = self._learner, event.message
        match message:
            case Welcome():
                return self._welcome(event, message)
            case Durable():
                return self._chain.durable(message.seq, message.digest)
            case RoundOpen():
                return [] if learner is None else [*learner.round_open(message)]
            case Decision():
                return [] if learner is None else [*learner.decision(message)]
            case _:
                return [Note("message", f"{message.kind} is for a syncer", "warning")]

    def _welcome(self, event: Received, welcome: Welcome) -> Outcome:
        self._welcomed, self.deadline = True, None
        effects: list[Effect] = []
        if welcome.head_seq > self._chain.election.head.rank.seq:
            effects.append(self._chain.ask_again())
        if self._learner is not None:
            effects += self._learner.welcomed(event.sender, event.term, welcome)
        return [*effects]
