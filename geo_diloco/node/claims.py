"""Whether what a peer says of itself to the run's owner is so: that it serves, that its head is one of the run's.

The owner's commands find peers as anybody finds them, and anybody with an invite is found. The chain proves who serves
(`runtime/proof.py`), and whoever is asked shows that it has that key: it signs for one connection. Two answers differ
here: one that contradicts the claim (RemoteProtocolError, RefusedError), and none (TransferError), which may be the
network's fault. What a syncer says of its lease, its electors and its rules stays what it says.
"""

from __future__ import annotations

import asyncio

from geo_diloco.errors import RemoteProtocolError, TransferError
from geo_diloco.manifest import WIRE_VERSION, BootId, BranchId, Digest, PeerId, RunId, Seq, Term
from geo_diloco.protocol.election.ballots import Rank
from geo_diloco.protocol.messages import Envelope, Hello
from geo_diloco.protocol.tail import TAIL_MAX
from geo_diloco.runtime.control import connect_control
from geo_diloco.runtime.identity import Identity, admission_proof
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.proof import PROOF_ENTRIES_MAX, Authority, check_entry, is_of_proof, read_proof
from geo_diloco.runtime.session import Session, fetch_entries, fetch_proof
from geo_diloco.runtime.wire import Signed, open_entry, seal_envelope

SHOW_S = 10.0
"""For each of the two things that a claim to serve takes."""
_NOWHERE = Digest("0" * 64)
"""Of no branch and no layout: a visitor is told so, by a signed word, and takes nobody's place."""


class KeyNotShown(TransferError):
    """The chain names that peer, and it did not sign for us: all its doors may be taken, or it is not that peer."""


async def check_syncer(session: Session, url: str, peer: PeerId, *, invite: Invite, founder: PeerId) -> None:
    """That peer serves the newest term that is durable there, and it is that peer who answers. Raises as said above;
    KeyNotShown where only the first is shown."""
    try:
        async with asyncio.timeout(SHOW_S):
            authority = await _authority(session, url, run=invite.run, founder=founder)
    except TimeoutError as exc:
        raise TransferError(f"{url} does not show in {SHOW_S:.0f} s who serves") from exc
    opened = authority.opened.get(authority.term)
    if opened is None or opened.syncer != peer:
        served = "nobody" if opened is None else opened.syncer[:8]
        raise RemoteProtocolError(f"{url} says that {peer[:8]} serves, and shows that {served} does", peer=peer)
    try:
        async with asyncio.timeout(SHOW_S):
            await _check_key(session, url, peer, invite)
    except TimeoutError as exc:
        raise KeyNotShown(f"{url} does not show in {SHOW_S:.0f} s that it is {peer[:8]}") from exc
    except TransferError as exc:
        raise KeyNotShown(f"{url} does not show that it is {peer[:8]}: {exc}") from exc


async def check_head(
    session: Session, url: str, signed: Signed, rank: Rank, *, run: RunId, founder: PeerId
) -> Authority:
    """By the votes of electors, step by step from `found` on, whoever signed that entry served its term: else anybody
    with an invite could make one up, and nobody could follow a reform on top of that. And it has that rank: else an
    old entry could be called the highest, and gone back to. Returns what was shown."""
    entry = open_entry(signed)
    authority = await _authority(session, url, run=run, founder=founder)
    seq = max(authority.seq + 1, entry.header.seq - TAIL_MAX)  # the newest terms may not be durable
    while seq <= entry.header.seq:
        entries = await fetch_entries(session, url, seq)
        if not entries:
            raise TransferError(f"{url} shows no entry {seq}")
        for each in entries:
            shown, seq = open_entry(each), seq + 1
            if is_of_proof(shown) and shown.header.seq <= entry.header.seq:
                authority.add(each, shown)
    check_entry(signed, entry, authority)
    shown_rank = Rank(authority.lineage, entry.header.term, entry.header.seq)
    if shown_rank != rank:
        raise RemoteProtocolError(f"{url} shows an entry of {_text(shown_rank)} and calls it {_text(rank)}")
    return authority


def _text(rank: Rank) -> str:
    return f"reform {rank.lineage}, term {rank.term}, seq {rank.seq}"


async def _authority(session: Session, url: str, *, run: RunId, founder: PeerId) -> Authority:
    lines = await fetch_proof(session, url, entries_max=PROOF_ENTRIES_MAX)
    if not lines:  # as of a process that starts
        raise TransferError(f"{url} shows no proof of who serves")
    return read_proof(lines, run=run, founder=founder)


async def _check_key(session: Session, url: str, peer: PeerId, invite: Invite) -> None:
    visitor = Identity.generate()  # the owner's own key would take the place of its peer's connection
    async with connect_control(session, url, visitor, invite.run, expected_peer=peer) as link:
        proof = ""
        if invite.token:
            proof = admission_proof(invite.token, nonce=link.nonce, peer=visitor.peer_id)
        hello = Hello(
            wire_version=WIRE_VERSION,
            layout_digest=_NOWHERE,
            trains=False,
            host="",
            software="",
            address="",
            step=0,
            tokens=0,
            head_seq=Seq(0),
            undecided=(),
            proof=proof,
        )
        envelope = Envelope(
            run=invite.run,
            branch=BranchId(_NOWHERE),
            term=Term(0),
            boot=BootId("0" * 16),
            sender=visitor.peer_id,
            to=peer,
            nonce=link.nonce,
            number=link.next_number(),
            message=hello,
        )
        link.send(seal_envelope(envelope, visitor))
        async for item in link:
            if isinstance(item, Envelope):  # verified: of that peer, for this connection
                return
    raise TransferError(link.close_reason)
