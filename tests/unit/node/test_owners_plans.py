"""What the owner's commands make of what peers say: which electors, on which head, which changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.errors import ConfigError, InviteError, ManifestError, RemoteProtocolError, RunDirError
from geo_diloco.manifest import CodecSpec, PeerId, RunId, RunManifest
from geo_diloco.node import handing_over, owning
from geo_diloco.node.amending import _changes, _named, _wanted, _warnings
from geo_diloco.node.handing_over import _named as _to
from geo_diloco.node.handing_over import hand_over
from geo_diloco.node.owning import _check_status, finding, owned, wait_syncer
from geo_diloco.node.reforming import ALL_LIVE, Intended, _claim, _intended, _present
from geo_diloco.observability import Counters, status_json
from geo_diloco.protocol.amendments import Changes
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.session import Session
from geo_diloco.runtime.store import BlobStore
from tests.support.standing import Standing, seated_chain
from tests.unit.runtime import samples

A, B, C, D = (letter * 64 for letter in "abcd")
MANIFEST = replace(RunManifest(), model=replace(RunManifest().model, config={"model_type": "llama"}))
RULES: dict[str, Any] = {
    "commits": {"value": 0, "amended_at": None},
    "tokens": {"value": 0, "amended_at": None},
    "minutes": {"value": 5.0, "amended_at": None},
    "eta": {"value": 0.7, "amended_at": None},
    "mu": {"value": 0.5, "amended_at": None},
    "quorum": {"value": 2, "amended_at": 7},
    "grace": {"value": True, "amended_at": None},
    "grace_gamma": {"value": 0.5, "amended_at": None},
    "codec_up": {"value": "int4:128", "amended_at": 7},
    "codec_up_choices": {"value": "bf16:64", "amended_at": 7},
    "codec_down": {"value": "int4:64", "amended_at": None},
}


def status(
    peer: str, *, seq: int, held: int | None = None, lineage: int = 0, host: str = "", **more: Any
) -> dict[str, Any]:
    """Of a peer that answers, with a roster of three."""
    election = {
        "seat": {"peer": peer, "enrolment": f"disk {peer[0]}", "host": host or peer[0], "address": f"{peer[0]}:1"},
        "best": [lineage, 3, seq, f"{seq:064d}"],
        "held": [lineage, 3, seq if held is None else held],
        "offers": [],
        "roster": [A, B, C],
    }
    return {"role": "follower", "election": election | more}


def offer(peer: str, *, seq: int) -> dict[str, Any]:
    return {"peer": peer, "enrolment": f"disk {peer[0]}", "host": peer[0], "address": "", "held": [0, 3, seq]}


def intended(
    statuses: dict[str, dict[str, Any]],
    *electors: str,
    offers: tuple[dict[str, Any], ...] = (),
    one_machine: bool = False,
) -> Intended:
    present = _present(statuses, {each["peer"]: each for each in offers})
    return _intended(statuses, present, list(electors), one_machine=one_machine)


# ---- reform


def test_the_best_head_that_can_be_served_is_the_parent() -> None:
    found = intended({"u1": status(A, seq=10), "u2": status(D, seq=12)}, ALL_LIVE, offers=(offer(B, seq=14),))
    assert found.parent[0].seq == 12 and found.parent[1] == f"{12:064d}"
    assert [each.elector.peer for each in found.roster] == [A, D, B]
    assert (found.gone, found.num_old, found.lineage) == ((C,), 3, 1)
    assert "bbbbbbbb holds more than that entry" in found.text()


def test_reforms_are_counted_from_the_highest_anybody_has_heard_of() -> None:
    found = intended({"u1": status(A, seq=10, lineage=2), "u2": status(D, seq=12)}, ALL_LIVE)
    assert (found.lineage, found.parent[0].lineage) == (3, 2)


def test_all_live_is_an_odd_number_on_different_machines() -> None:
    three = {"u1": status(A, seq=1), "u2": status(B, seq=1, host="a"), "u3": status(D, seq=1)}
    assert [each.elector.peer for each in intended(three, ALL_LIVE).roster] == [A]
    assert len(intended(three, ALL_LIVE, one_machine=True).roster) == 3


def test_electors_are_named_by_the_beginning_of_their_id() -> None:
    here = {"u1": status(A, seq=10), "u2": status(D, seq=12)}
    assert [each.elector.peer for each in intended(here, "dd").roster] == [D]
    assert intended(here, "aa").parent[0].seq == 10
    for name in ("", "c", "x"):
        with pytest.raises(ConfigError, match=r"names 0 of the peers that are here, aaaaaaaa, dddddddd"):
            intended(here, name)


def test_somebody_must_be_able_to_serve() -> None:
    with pytest.raises(ConfigError, match="at least one must be reachable"):
        intended({"u1": status(A, seq=10)}, "bb", offers=(offer(B, seq=10),))


# ---- amend


def changes(*settings: str) -> Changes:
    return _changes([_named(each) for each in settings], {"rules": RULES}, MANIFEST)


def test_settings_become_changes() -> None:
    assert changes("quorum=1", "sync.grace=off", "outer.eta=0.5") == Changes(quorum=1, grace=False, eta=0.5)
    assert changes("minutes=90", "stop.commits=7") == Changes(minutes=90.0, commits=7)


def test_a_codec_keeps_its_block_unless_another_is_named() -> None:
    assert changes("codec_up=int8") == Changes(codec_up=CodecSpec(name="int8", block=128))
    assert changes("codec_up_choices=bf16:32, int8") == Changes(
        codec_up_choices=(CodecSpec(name="bf16", block=32), CodecSpec(name="int8", block=128))
    )
    assert changes("codec.up_choices=") == Changes(codec_up_choices=())
    assert changes("codec.down=bf16:32") == Changes(codec_down=CodecSpec(name="bf16", block=32))


@pytest.mark.parametrize("setting", ["inner.learning_rate=1", "quorum", "=2", "lockstep=true", "sync.num_fragments=3"])
def test_nothing_else_can_be_amended(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"only commits, tokens, minutes, eta, mu, quorum, grace, .* can be amended"):
        changes(setting)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("quorum=two", "--set quorum=two: a whole number is wanted"),
        ("quorum=1.5", "a whole number is wanted"),
        ("commits=1e6", "--set commits=1e6: a whole number is wanted"),
        ("eta=much", "--set eta=much: a number is wanted"),
        ("tokens=" + 5000 * "9", r"--set tokens=9{117}\.\.\.: a whole number is wanted"),
        ("minutes=\x1b[31m3", r"--set minutes=\?\[31m3: a number is wanted"),
        ("grace=maybe", "on or off is wanted"),
        ("codec_up=int8:x", "a codec, as int8 or int8:64 is wanted"),
        ("codec_up_choices=bf16,int8:x", "codecs, as bf16,int8:64 is wanted"),
    ],
)
def test_a_value_of_another_kind_is_named(setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        changes(setting)


@pytest.mark.parametrize(
    "setting",
    [
        "quorum=0",
        "eta=0",
        "mu=1",
        "codec_up=zip",
        "codec_up_choices=bf16,zip",
        "codec_up_choices=int8:48",
        "codec_up=int8:48",
        "grace_gamma=nan",
    ],
)
def test_a_value_that_no_manifest_may_have_is_refused(setting: str) -> None:
    with pytest.raises(ManifestError, match=r"^--set: "):
        changes(setting)


def test_what_could_not_be_sent_is_refused_before_it_is_signed() -> None:
    """A manifest may count further than a message."""
    assert changes(f"tokens={(1 << 53) - 1}") == Changes(tokens=(1 << 53) - 1)
    with pytest.raises(ConfigError, match=r"--set: tokens = 9007199254740992: 0 to 9\.\d+e\+15 is allowed"):
        changes(f"tokens={1 << 53}")


def test_two_values_of_one_name_contradict_each_other() -> None:
    assert _wanted(["eta=0.5", "mu=0.5"]) == [("eta", "0.5"), ("mu", "0.5")]
    with pytest.raises(ConfigError, match="--set eta: given 2 times, and an amendment has one value of it"):
        _wanted(["eta=0.5", "mu=0.5", "outer.eta=0.6"])
    with pytest.raises(ConfigError, match="nothing to amend"):
        _wanted([])


def test_a_run_whose_schedule_goes_by_the_token_budget_keeps_one() -> None:
    own = replace(MANIFEST, inner=replace(MANIFEST.inner, schedule_by="own"), stop=replace(MANIFEST.stop, tokens=100))
    with pytest.raises(ManifestError, match="schedule_by"):
        _changes([("tokens", "0")], {"rules": RULES}, own)


# ---- whose run


def test_the_owner_is_known_by_a_run_directory_or_by_a_key(tmp_path: Path) -> None:
    invite = Invite(run=MANIFEST.run_id(), bootstraps=("/ip4/127.0.0.1/tcp/1/p2p/Qm1",)).to_string()
    key = tmp_path / "key.pem"
    identity = Identity.load_or_create(key)
    (tmp_path / "invite.txt").write_text(invite + "\n")
    for run in (owned(str(tmp_path), None), owned(invite, key)):
        assert (run.identity.peer_id, run.run) == (identity.peer_id, MANIFEST.run_id())
    with pytest.raises(ConfigError, match="an invite alone has no key"):
        owned(invite, None)
    with pytest.raises(ConfigError, match="is no file"):
        owned(invite, tmp_path / "none.pem")
    with pytest.raises(InviteError):
        owned(str(tmp_path / "nothing"), key)
    (tmp_path / "invite.txt").write_text(invite[:-9])
    with pytest.raises(RunDirError, match=r"invite\.txt is damaged: .*; give the invite itself, and --key"):
        owned(str(tmp_path), None)
    (tmp_path / "invite.txt").unlink()
    with pytest.raises(RunDirError, match=r"no invite\.txt in it"):
        owned(str(tmp_path), None)


def test_nobody_is_here_twice() -> None:
    found = _present({"u1": status(A, seq=3)}, {A: offer(A, seq=9)})
    assert list(found) == [PeerId(A)] and found[PeerId(A)].url == "u1"


async def believe(*unused: Any, **unused_too: Any) -> None:
    """Who serves is for `test_claims.py`."""


def test_contacts_are_asked_besides_the_run_directorys_own_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as that takes long; and of the invite alone they are the first to be asked."""
    monkeypatch.setattr(owning, "DIRECTORY_S", 0.0)
    invite = Invite(run=samples.RUN, bootstraps=("/ip4/127.0.0.1/tcp/1/p2p/Qm1",))
    (tmp_path / "invite.txt").write_text(invite.to_string())
    (tmp_path / "ports.json").write_text('{"http": 1, "dht": 1, "host": "127.0.0.1"}')
    Identity.load_or_create(tmp_path / "key.pem")

    @asynccontextmanager
    async def shut(*unused: Any) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(owning, "visited_directory", shut)
    monkeypatch.setattr(owning, "manifest_from_bytes", lambda canonical: MANIFEST)
    monkeypatch.setattr(owning, "_check_status", lambda status, url: None)
    monkeypatch.setattr(owning, "check_syncer", believe)

    async def go() -> None:
        async with samples.served(BlobStore(tmp_path / "blobs")) as it:
            contact = it.url.removeprefix("http://")
            for run in (
                owned(str(tmp_path), None, [contact]),
                owned(invite.to_string(), tmp_path / "key.pem", [contact]),
            ):
                async with finding(run) as finder:
                    assert (await wait_syncer(finder)).url == it.url

    asyncio.run(go())
    with pytest.raises(ConfigError, match="--contact"):
        owned(str(tmp_path), None, ["nonsense"])


def test_who_says_nothing_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owning, "ANSWER_S", 0.05)
    asked: list[str] = []

    async def fetch(session: Session, url: str, run: RunId) -> bytes:
        asked.append(url)
        return await asyncio.Event().wait() or b""

    monkeypatch.setattr(owning, "fetch_manifest", fetch)
    invite = Invite(run=samples.RUN, bootstraps=("/ip4/127.0.0.1/tcp/1/p2p/Qm1",))
    Identity.load_or_create(tmp_path / "key.pem")

    async def go() -> None:
        async with finding(owned(invite.to_string(), tmp_path / "key.pem")) as finder:
            assert await finder.answers() == [] and await finder.answers() == []
            assert "does not answer" in finder.why_not

    asyncio.run(go())
    assert len(asked) == 1


def test_who_claims_to_have_seen_reforms_without_end_is_not_counted_from() -> None:
    liar = offer(D, seq=5) | {"held": [(1 << 53) - 1, 1, 1]}
    assert intended({"http://a:1": status(A, seq=9, lineage=3)}, A, offers=(liar,)).lineage == 4
    later = offer(D, seq=5) | {"held": [7, 1, 1]}
    assert intended({"http://a:1": status(A, seq=9, lineage=3)}, A, offers=(later,)).lineage == 8


def test_nobody_hands_over_to_himself() -> None:
    with pytest.raises(ConfigError, match="that is this peer itself"):
        _to(A[:8], {"peer": A, "election": {"roster": [A, B]}})
    assert _to(B[:8], {"peer": A, "election": {"roster": [A, B]}}) == B


# ---- what strangers answer


def told() -> dict[str, Any]:
    """A peer's status, as it comes over the wire."""
    standing = Standing(seated_chain())
    said = status_json(
        standing.core.status(standing.now),
        Counters(),
        run="r",
        name="n",
        peer=A,
        heldout_at={},
        disk_bytes=0,
        lease_ms=None,
    )
    offers = [offer(B, seq=5)]
    said["election"] |= {"offers": offers}
    said["amended"] = [{"number": 1, "seq": 3, "order": "as signed"}]
    read: dict[str, Any] = json.loads(json.dumps(said))
    return read


def test_a_peers_own_status_makes_sense() -> None:
    _check_status(told(), "http://b:1")


@pytest.mark.parametrize("bad", ["x", -2, 1 << 60, 1.5, [], {}, [1], [{}], [{"peer": 1, "number": "x"}]], ids=repr)
@pytest.mark.parametrize(
    "where",
    [
        ("term",),
        ("branch",),
        ("rules",),
        ("rules", "eta"),
        ("amended", 0),
        ("amended", 0, "number"),
        ("election",),
        ("election", "offers", 0),
        ("election", "offers", 0, "held"),
        ("election", "seat"),
        ("election", "seat", "peer"),
        ("election", "best"),
        ("election", "held"),
        ("election", "syncer"),
        ("election", "roster", 0),
    ],
    ids=str,
)
def test_a_status_that_makes_no_sense_is_no_answer(where: tuple[Any, ...], bad: Any) -> None:
    """Anybody with an invite is in the directory: whatever he answers, the owner's command goes on with others."""
    said = inside = told()
    for each in where[:-1]:
        inside = inside[each]
    inside[where[-1]] = bad
    with pytest.raises(RemoteProtocolError, match=f"answers a status whose {where[0]} makes no sense"):
        _check_status(said, "http://b:1")


# ---- what an owner may not have meant


def seat_of(peer: str, *, here: bool) -> dict[str, Any]:
    return {"peer": peer, "enrolment": "e", "host": "h", "address": "", "here": here, "heard_ms": 0 if here else None}


def serving(**changed: Any) -> dict[str, Any]:
    """Of a syncer with two electors that only dial out, one of which is there."""
    electors = [seat_of(A, here=True), seat_of(B, here=True), seat_of(C, here=False)]
    facts = status(A, seq=10, electors=electors, lease_ms=4000)
    return facts | {"role": "syncer", "peer": A} | changed


def test_who_serves_says_so_with_a_lease() -> None:
    assert _claim(serving()) == "aaaaaaaa serves the run, and 2 of 3 electors answer it, a majority"
    lapsed = serving()
    lapsed["election"] |= {"lease_ms": -1}
    assert [_claim(said) for said in (status(D, seq=1), lapsed, serving(role="follower"))] == ["", "", ""]


def test_electors_that_follow_are_not_called_gone_for_good() -> None:
    found = intended({"u1": serving()}, ALL_LIVE)
    assert (found.gone, found.left_out) == ((C,), (B,))
    assert "following whoever serves now, and no electors any more: bbbbbbbb" in found.text()
    assert "gone for good are then 1 of 3 electors: cccccccc" in found.text()


def test_a_quorum_above_the_learners_that_are_here_is_warned_of() -> None:
    here = {"learners": [{"connected": True}, {"connected": False}, "nonsense"]}
    assert _warnings(Changes(quorum=1), here) == [] == _warnings(Changes(eta=0.5), here)
    (warning,) = _warnings(Changes(quorum=2), here)
    assert warning.startswith("quorum 2, and 1 learner is here: nothing is merged until there are 2")


def test_who_hands_over_reads_that_a_dead_peer_has_nothing_to_hand_over(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path / "identity.key")
    (tmp_path / "manifest.json").write_bytes(replace(MANIFEST, founder=PeerId(A), nonce="0" * 32).canonical_bytes())
    (tmp_path / "ports.json").write_text('{"http": 1, "dht": 1, "host": "127.0.0.1"}')
    with pytest.raises(RunDirError, match=r"does not run, so it has nothing to hand over: .*connection refused"):
        hand_over(tmp_path)


def test_a_hand_over_says_to_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([serving(), {"role": "follower"}, {"role": "follower", "served_by": {"peer": D, "address": "d:1"}}])

    async def fetch(session: Session, url: str) -> dict[str, Any]:
        return next(answers)

    monkeypatch.setattr(handing_over, "fetch_status", fetch)
    monkeypatch.setattr(handing_over, "LOOK_S", 0.0)
    unused: Any = None
    told = asyncio.run(handing_over._wait_handed_over(unused, "u", "handing over", 60.0))
    assert told == "handed over: dddddddd serves at d:1"
