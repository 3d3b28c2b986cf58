"""A peer that is admitted and then says whatever it likes."""

from __future__ import annotations

from geo_diloco.manifest import WIRE_VERSION, FragmentId, Seq, Version
from geo_diloco.protocol.effects import Effect
from geo_diloco.protocol.messages import (
    BlobRef,
    Contribution,
    ContributionId,
    Goodbye,
    Hello,
    Message,
    Progress,
    RoundOpen,
    Sampled,
)
from tests.support.cluster import LAYOUT, Cluster, Link, Process, fake_digest, fake_peer
from tests.support.member_process import World


class LiarProcess(Process):
    """Speaks with a key of its own and never uploads a byte."""

    def __init__(self, cluster: Cluster, world: World) -> None:
        super().__init__(cluster, fake_peer("liar"), "follower", 1)
        self.world = world
        self.link: Link | None = None

    def start(self) -> None:
        self.clock.after(500, self._say)

    def do(self, effect: Effect) -> None:
        """Its own core is not what it listens to."""

    def _say(self) -> None:
        if not self.cluster.faults_on:
            if self.link is not None:
                self.link.break_off()
            return
        syncer = self.world.reachable(self.peer)
        if syncer is not None and len(syncer.disk.chain) > 1:
            if self.link is None or not self.link.up or self.link.syncer is not syncer:
                self.link = Link(self.cluster, self, syncer)
                syncer.links[self.peer] = self.link
            header = syncer.disk.chain[-1].entry.header
            branch = syncer.disk.chain[0].digest if self.clock.random.random() < 0.95 else fake_digest("fork")
            self.link.send(self, self._lie(), branch, header.term + self.clock.random.choice((0, 0, 0, 0, 1, -1)))
        self.clock.after(self.clock.between((20, 400)), self._say)

    def _lie(self) -> Message:
        chance, syncer = self.clock.random, self.world.syncer
        assert syncer is not None
        p = FragmentId(chance.choice([0, 0, len(self.cluster.plan.num_elements), -1, 10**6]))
        base = chance.choice([syncer.disk.bases[0], fake_digest("nothing")])
        peer = chance.choice([self.peer, fake_peer("learner 0")])
        claim = ContributionId(peer, p, base, chance.choice([7, 0, 10**400]))
        contribution = Contribution(
            id=claim,
            round=chance.choice([1, -5]),
            attempt=1,
            base_version=Version(chance.choice([syncer.disk.versions[0], 3])),
            first_step=chance.choice([0, 5, -1]),
            steps=chance.choice([1, 7, 0]),
            tokens=chance.choice([100, 10**400, 0]),
            tokens_unmerged=chance.choice([100, 10**400]),
            cursor=chance.choice([0, 10**30]),
            blob=BlobRef(fake_digest("lie", chance.random()), chance.choice([50, 10**12, 0])),
        )
        hello = Hello(
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
        progress = Progress(
            step=10**6,
            tokens=10**400,
            step_time_us=chance.choice([0, -5, 1, 10**30]),
            upload_bytes_per_s=-1,
            loss=float("nan"),
            cursor=10**30,
        )
        lies: list[Message] = [hello, contribution, contribution, progress, Sampled(round=1, fragment=p, attempt=1)]
        lies.append(RoundOpen(round=1, fragment=p, attempt=1, version=Version(0), base=base, collect_at=""))
        lies.append(Goodbye(reason="not really"))
        return chance.choice(lies)
