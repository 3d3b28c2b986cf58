"""The proof of who serves (`runtime/proof.py`), kept in memory as the chain grows: whoever joins asks for it."""

from __future__ import annotations

from geo_diloco.manifest import Digest, Seq
from geo_diloco.protocol.peer import Peer
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.proof import is_of_proof
from geo_diloco.runtime.wire import Signed


class ProofShelf:
    """Of the chain that counts, as far as it is durable. A reform counts before anything on top of it is durable: the
    owner who reforms once more asks for a proof of it."""

    def __init__(self, core: Peer, chain: ChainCopy) -> None:
        self._core = core
        self._chain = chain
        self._entries: list[Signed] = []
        self._seq = Seq(-1)
        self._last: Digest | None = None
        """The entry there."""

    def entries(self, first: int, limit: int) -> list[Signed]:
        self.collect()
        return self._entries[first : first + limit]

    def collect(self) -> None:
        """What is durable by now; done as a rule while it is in memory, not when somebody asks."""
        ledger, chain = self._core.ledger, self._chain
        if self._last != self._core.election.digest_at(self._seq):  # a reform has left some of it behind
            self._entries, self._seq, self._last = [], Seq(-1), None
        while self._seq < ledger.seq:
            digest = self._core.election.digest_at(Seq(self._seq + 1))
            entry = None if digest is None else chain.entry(digest)
            signed = None if digest is None else chain.signed(digest)
            if entry is None or signed is None:
                break
            self._seq, self._last = Seq(self._seq + 1), digest
            if is_of_proof(entry):
                self._entries.append(signed)
