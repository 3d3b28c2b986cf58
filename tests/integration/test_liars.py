"""An admitted peer that lies, on the real wire to a real founder: the run goes on, and what it made stays right."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_diloco.config import manifest_from_bytes
from geo_diloco.manifest import WIRE_VERSION, BootId, BranchId, CodecSpec, FragmentId, RunId, Seq
from geo_diloco.numerics import codec
from geo_diloco.protocol.messages import (
    Allotment,
    BlobRef,
    Commit,
    Contribution,
    ContributionId,
    Decision,
    Envelope,
    Found,
    Hello,
    Message,
    Progress,
)
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.control import ControlLink, connect_control
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.session import Session, fetch_entries, fetch_manifest, make_session
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.upload import upload_blob
from geo_diloco.runtime.wire import Signed, open_entry, seal_envelope

from .test_run import Run, check_agreement

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PATIENCE_S = 60.0


class Liar:
    """A peer with a key of its own that says what it likes, on one control connection."""

    def __init__(self, run: Run, root: Path) -> None:
        self._run = run
        self.identity = Identity.generate()
        self.store = BlobStore(root / f"liar-{self.identity.peer_id[:8]}")
        self.boot = BootId(secrets.token_hex(8))
        self.url = f"http://{run._ready['http']}"
        self.commits: list[Commit] = []

    async def look(self, session: Session) -> None:
        """Read what anybody may."""
        self.run_id = RunId(self._run.status()["run"])
        self.manifest = manifest_from_bytes(await fetch_manifest(session, self.url, self.run_id))
        entries: list[tuple[Signed, Any]] = []
        while batch := await fetch_entries(session, self.url, len(entries)):
            entries += [(signed, open_entry(signed)) for signed in batch]
        assert isinstance(entries[0][1], Found)
        self.found = entries[0][1]
        self.branch = BranchId(entries[0][0].digest)
        self.term = entries[-1][1].header.term
        self.heads = {p: (0, entries[0][0].digest) for p in range(len(self.found.num_elements))}
        for signed, entry in entries:
            if isinstance(entry, Commit):
                self.heads[entry.fragment] = entry.version, signed.digest
                self.commits.append(entry)

    def say(self, link: ControlLink, message: Message) -> None:
        envelope = Envelope(
            run=self.run_id,
            branch=self.branch,
            term=self.term,
            boot=self.boot,
            sender=self.identity.peer_id,
            to=link.peer,
            nonce=link.nonce,
            number=link.next_number(),
            message=message,
        )
        link.send(seal_envelope(envelope, self.identity))

    def introduce(self, link: ControlLink, **changes: Any) -> None:
        plain = Hello(
            wire_version=WIRE_VERSION,
            layout_digest=self.found.layout_digest,
            trains=True,
            host="[bold]liar[/bold]",
            software="",
            address="",
            step=0,
            tokens=0,
            head_seq=Seq(0),
            undecided=(),
            proof="",
        )
        self.say(link, replace(plain, **changes))
        self.say(
            link,
            Progress(step=100, tokens=25_600, step_time_us=20_000, upload_bytes_per_s=0, loss=0.1, cursor=0),
        )

    def claim(self, link: ControlLink, blob: BlobRef, fragment: int = 0, **changes: Any) -> ContributionId:
        version, base = self.heads[fragment]
        claim = ContributionId(self.identity.peer_id, FragmentId(fragment), base, 100)  # type: ignore[arg-type]
        plain = Contribution(
            id=claim,
            round=1,
            attempt=1,
            base_version=version,  # type: ignore[arg-type]
            first_step=0,
            steps=8,
            tokens=2048,
            tokens_unmerged=2048,
            cursor=0,
            blob=blob,
        )
        self.say(link, replace(plain, **changes))
        return claim

    def frame(self, value: float, spec: CodecSpec | None = None) -> BlobRef:
        delta = torch.full((self.found.num_elements[0],), value)
        spec = spec or self.manifest.codec_up
        return self.store.put(codec.encode(delta, spec, layout_digest=self.found.layout_digest, fragment=0))

    async def verdict(self, link: ControlLink, claim: ContributionId) -> str:
        """Of the claim: `merged`, or the reason of its refusal."""
        async with asyncio.timeout(PATIENCE_S):
            async for item in link:
                if isinstance(item, Signed):
                    entry = open_entry(item)
                    if isinstance(entry, Commit) and any(each.peer == claim.peer for each in entry.participants):
                        return "merged"
                elif isinstance(said := item.message, Decision) and (said.id, said.verdict) == (claim, "refused"):
                    return said.reason
        return f"closed: {link.close_reason}"


Lie = Callable[[Liar, ControlLink, Session], Awaitable[None]]


async def names_an_update_as_its_contribution(liar: Liar, link: ControlLink, session: Session) -> None:
    liar.introduce(link)
    update = liar.commits[-1].update
    liar.claim(link, BlobRef(update.digest, update.size + 1), 1 - liar.commits[-1].fragment)
    assert await liar.verdict(link, liar.claim(link, update, liar.commits[-1].fragment)) != ""


async def hands_in_gigantic_values(liar: Liar, link: ControlLink, session: Session) -> None:
    liar.introduce(link)
    blob = liar.frame(3e38)
    claim = liar.claim(link, blob)
    await upload_blob(Bulk(session), liar.url, blob, liar.store)
    assert "implausible" in await liar.verdict(link, claim)


async def uses_another_codec(liar: Liar, link: ControlLink, session: Session) -> None:
    liar.introduce(link)
    blob = liar.frame(1e-4, CodecSpec(name="none"))
    claim = liar.claim(link, blob)
    await upload_blob(Bulk(session), liar.url, blob, liar.store)
    assert "was agreed" in await liar.verdict(link, claim)


async def claims_more_tokens_than_the_run_has(liar: Liar, link: ControlLink, session: Session) -> None:
    liar.introduce(link)
    blob = liar.frame(1e-4)
    claim = liar.claim(link, blob, tokens=2**49, tokens_unmerged=2**50, steps=1, cursor=2**50)
    await upload_blob(Bulk(session), liar.url, blob, liar.store)
    assert await liar.verdict(link, claim) == "merged"


async def says_it_holds_an_absurd_share(liar: Liar, link: ControlLink, session: Session) -> None:
    most = 2**53 - 1
    liar.introduce(link, holds=Allotment(share=1, num_shares=8, cursor=most, pass_number=most))
    await asyncio.sleep(0.2)


LIES: list[Lie] = [
    names_an_update_as_its_contribution,
    hands_in_gigantic_values,
    uses_another_codec,
    claims_more_tokens_than_the_run_has,
    says_it_holds_an_absurd_share,
]


async def tell(run: Run, root: Path, lie: Lie) -> None:
    liar = Liar(run, root)
    async with make_session() as session:
        await liar.look(session)
        async with connect_control(session, liar.url, liar.identity, liar.run_id) as link:
            await lie(liar, link, session)


def num_training_honestly(run: Run) -> int:
    return sum(each["step"] > 30 and "liar" not in each["host"] for each in run.status()["learners"])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, num_commits=170)
    yield made
    made.close()


def test_a_run_with_liars_in_it_ends_as_it_should(run: Run, tmp_path: Path) -> None:
    run.start_founder()
    run.start_learner(1)
    run.wait(lambda: run.status()["commits"] >= 4, "the first commits")
    for lie in LIES:
        asyncio.run(tell(run, tmp_path, lie))
        assert run.founder.poll() is None, f"the founder did not survive a peer that {lie.__name__}"
    run.start_learner(2)
    run.wait(lambda: num_training_honestly(run) >= 2, "an honest newcomer")
    status = run.status()
    assert status["tokens_total"] < 10**8
    assert status["heldout"][0][1] < 7.0
    run.wait_ended()
    assert [learner.returncode for learner in run.learners.values()] == [0, 0]
    check_agreement(run)
    blobs = run.root / "founder" / "blobs"
    assert all((blobs / entry.update.digest).exists() for entry in run.entries() if isinstance(entry, Commit))
