"""The proof of who serves (`runtime/proof.py`), kept in memory as the chain grows: whoever joins asks for it."""

from __future__ import annotations

from geo_diloco.manifest import Seq
from geo_diloco.protocol.peer import Peer
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.proof import is_of_proof
from geo_diloco.runtime.wire import Signed


class ProofShelf:
    """Of the chain that counts, as far as it is durable."""

    def __init__(self, core: Peer, chain: ChainCopy) -> None:
        self._core = core
        self._chain = chain
        self._entries: list[Signed] = []
        self._seq = Seq(-1)
        self._lineage = 0

    def entries(self, first: int, limit: int) -> list[Signed]:
        self.collect()
        return self._entries[first : first + limit]

    def collect(self) -> None:
        """What is durable by now; done as a rule while it is in memory, not when somebody asks."""
        ledger, chain = self._core.ledger, self._chain
        if self._entries and ledger.lineage != self._lineage:  # a reform may have left some of it behind
            self._entries, self._seq = [], Seq(-1)
        self._lineage = ledger.lineage
        while self._seq < ledger.seq:
            digest = self._core.election.digest_at(Seq(self._seq + 1))
            entry = None if digest is None else chain.entry(digest)
            signed = None if digest is None else chain.signed(digest)
            if entry is None or signed is None:
                break
            self._seq = Seq(self._seq + 1)
            if is_of_proof(entry):
                self._entries.append(signed)
