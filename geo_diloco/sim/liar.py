"""A peer that is admitted and then says whatever it likes, to whoever serves. It uploads nothing and holds no seat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from geo_diloco.manifest import (
    WIRE_VERSION,
    BootId,
    BranchId,
    FragmentId,
    MonoMs,
    PeerId,
    Seq,
    Term,
    Version,
)
from geo_diloco.protocol.effects import Send
from geo_diloco.protocol.election.ballots import (
    Ack,
    Append,
    Ask,
    Head,
    Need,
    Offer,
    PeerBoot,
    Rank,
    Refuse,
    Release,
    Serving,
    Vote,
)
from geo_diloco.protocol.events import Event
from geo_diloco.protocol.messages import (
    BlobRef,
    Contribution,
    ContributionId,
    Durable,
    EntryHeader,
    Finished,
    Goodbye,
    Hello,
    Message,
    Progress,
    RoundOpen,
    Sampled,
    Welcome,
)
from geo_diloco.sim.fakes import LAYOUT, RUN, SignedEntry, fake_digest, fake_peer
from geo_diloco.sim.network import Link

if TYPE_CHECKING:
    from geo_diloco.sim.process import Process
    from geo_diloco.sim.world import World

LIAR = fake_peer("liar")


class Liar:
    """Speaks with a key of its own. What it hears it ignores."""

    def __init__(self, world: World) -> None:
        self.peer = LIAR
        self.boot = BootId(fake_digest("liar")[:16])
        self.alive = False
        """No core, and nothing that listens."""
        self._world = world
        self._link: Link | None = None
        self._syncer: Process | None = None

    def start(self) -> None:
        self._world.clock.after(500, self._say)

    def handle(self, event: Event) -> None:
        """Not even listened to."""

    def lost(self, link: Link, peer: PeerId) -> None:
        """It will find another."""

    def _say(self) -> None:
        world = self._world
        if not world.faults_on:
            if self._link is not None:
                self._link.break_off()
            return
        syncer = world.syncer()
        if syncer is not None:
            if self._link is None or not self._link.up or self._syncer is not syncer:
                self._syncer = syncer
                self._link = syncer.links[self.peer] = Link(world, self, syncer)  # type: ignore[arg-type]
            self._lie(self._link, syncer)
        world.clock.after(world.clock.between((20, 400)), self._say)

    def _lie(self, link: Link, syncer: Process) -> None:
        chance, election = self._world.clock.random, syncer.core.election
        term = Term(election.head.rank.term + chance.choice((0, 0, 0, 0, 1, -1)))
        if chance.random() < 0.1:
            link.deliver_entry(self, self._entry(election.branch, term, election.head))  # type: ignore[arg-type]
            return
        branch = election.branch if chance.random() < 0.95 else BranchId(fake_digest("fork"))
        tell: Callable[[Process], Message] = chance.choice((self._message, self._message, self._ballot))
        link.send(self, Send(syncer.peer, branch, term, tell(syncer)))  # type: ignore[arg-type]

    def _entry(self, branch: BranchId, term: Term, head: Head) -> SignedEntry:
        """The end of the run, by its own word."""
        chance = self._world.clock.random
        prev = chance.choice([head.digest, fake_digest("nothing")])
        header = EntryHeader(run=RUN, branch=branch, term=term, seq=Seq(head.rank.seq + 1), prev=prev)
        entry = Finished(header=header, reason="a lie", tokens_total=10**400)
        return SignedEntry(entry, fake_digest("liar", entry), self.peer)

    # -- messages -------------------------------------------------------------------------------------------------

    def _message(self, syncer: Process) -> Message:
        chance, ledger = self._world.clock.random, syncer.core.ledger
        p = FragmentId(chance.choice([0, 0, len(self._world.plan.num_elements), -1, 10**6]))
        base = chance.choice([ledger.heads[0].base, fake_digest("nothing")])
        somebody = self._world.hosts[chance.randrange(len(self._world.hosts))].peer
        claim = ContributionId(chance.choice([self.peer, somebody]), p, base, chance.choice([7, 0, 10**400]))
        lies: list[Message] = [
            self._hello(claim),
            self._contribution(claim, ledger.heads[0].version),
            self._progress(),
            Sampled(round=1, fragment=p, attempt=1),
            RoundOpen(round=1, fragment=p, attempt=1, version=Version(0), base=base, collect_at=""),
            Goodbye(reason="not really"),
            Durable(seq=Seq(10**6), digest=fake_digest("nothing")),
            Welcome(head_seq=Seq(10**6), head_digest=base, merged_until=(), resume_step=10**400, allotment=None),
        ]
        return chance.choice(lies)

    def _contribution(self, claim: ContributionId, version: Version) -> Contribution:
        chance = self._world.clock.random
        return Contribution(
            id=claim,
            round=chance.choice([1, -5]),
            attempt=1,
            base_version=Version(chance.choice([version, 3])),
            first_step=chance.choice([0, 5, -1]),
            steps=chance.choice([1, 7, 0]),
            tokens=chance.choice([100, 10**400, 0]),
            tokens_unmerged=chance.choice([100, 10**400]),
            cursor=chance.choice([0, 10**30]),
            blob=BlobRef(fake_digest("lie", chance.random()), chance.choice([50, 10**12, 0])),
        )

    def _hello(self, claim: ContributionId) -> Hello:
        chance = self._world.clock.random
        return Hello(
            wire_version=WIRE_VERSION,
            layout_digest=LAYOUT,
            trains=chance.random() < 0.2,
            host="liar",
            software="",
            address="",
            step=chance.choice([0, 10**400]),
            tokens=0,
            head_seq=Seq(10**9),
            undecided=(claim,),
            proof="",
        )

    def _progress(self) -> Progress:
        return Progress(
            step=10**6,
            tokens=10**400,
            step_time_us=self._world.clock.random.choice([0, -5, 1, 10**30]),
            upload_bytes_per_s=-1,
            loss=float("nan"),
            cursor=10**30,
        )

    # -- ballots --------------------------------------------------------------------------------------------------

    def _ballot(self, syncer: Process) -> Message:
        """Of one who has no seat. It never claims to hold what the run has: that would earn it one."""
        chance = self._world.clock.random
        head = Head(Rank(chance.choice([0, 1]), Term(10**9), Seq(10**9)), fake_digest("nothing"))
        if chance.random() < 0.5:
            head = replace(head, rank=syncer.core.election.head.rank)
        me, other = PeerBoot(self.peer, self.boot), PeerBoot(syncer.peer, syncer.boot)
        enrolment = chance.choice(["liar", syncer.core.election.record.enrolment])
        offer = Offer(
            held=head.rank,
            can_serve=head,
            enrolment=enrolment,
            host="liar",
            address=chance.choice(["", "liar:1"]),
            free=True,
        )
        at = chance.choice([MonoMs(0), syncer.mono(), MonoMs(10**400)])
        lies: list[Message] = [
            offer,
            Need(points=(head,)),
            Need(points=()),
            Ask(head=head),
            Vote(candidate=chance.choice([me, other]), head=head.digest, enrolment=enrolment),
            Append(head=head, durable_seq=Seq(10**9), sent_at=at),
            Ack(acked=head, sent_at=at, enrolment=enrolment, host="liar", address="liar:1"),
            Release(to=self.peer),
            Serving(term=Term(10**9), syncer=self.peer),
            Refuse(reason=chance.choice(["term", "branch", "vote", "not_serving"]), detail="a lie", term=Term(10**9)),
        ]
        return chance.choice(lies)
