"""What `status` tells people: where the run stands, who serves, who could, and who is missing."""

from __future__ import annotations

from typing import Any

from geo_diloco.cli.status_text import status_text
from tests.unit.cli.test_cli_commands import STATUS

A, B, C = ("ab" * 32, "cd" * 32, "ef" * 32)


def seat(peer: str, *, heard_ms: int | None = 0, address: str = "", here: bool = True) -> dict[str, Any]:
    return {
        "peer": peer,
        "enrolment": "e",
        "host": "machine",
        "address": address,
        "here": here,
        "heard_ms": heard_ms,
    }


def election(**changed: Any) -> dict[str, Any]:
    """Of a syncer (A) with a learner (B) and a standby (C), as `GET /v1/status` has it."""
    return {
        "role": "syncer",
        "term": 1,
        "lease_ms": 4900,
        "durable_seq": 84,
        "roster": [A, B, C],
        "electors": [seat(A, address="192.0.2.1:31340"), seat(B), seat(C, address="192.0.2.2:31340")],
        "standbys": [seat(C, address="192.0.2.2:31340")],
        "follows": None,
        "vote": "no vote: none",
        "append": "",
        "candidacy": "1 of the 2 electors needed are here",
        "roster_plan": "3 electors as wanted",
    } | changed


SERVED = STATUS | {"served_by": {"peer": A, "address": "192.0.2.1:31340"}}


def said(status: dict[str, Any], **changed: Any) -> list[str]:
    return status_text(status | {"election": election(**changed)}).splitlines()


def test_status_tells_people_where_the_run_stands() -> None:
    text = status_text(STATUS)
    for part in (
        "25% done",
        "5 commits",
        "held-out loss 2.1000 nats per token at seq 7 (first 5.6000)",
        "cdcdcdcd  box  away, step 24, loss -\n",
        "round 3, fragment 2: 3 of 4 learners, quorum after 12 ms, grace 8 ms: all expected delivered",
        "fragment 1 waits: quorum: 0 of 1",
    ):
        assert part in text
    here = STATUS | {"learners": [STATUS["learners"][0] | {"connected": True}]}
    assert "cdcdcdcd  box  step 24, 900 tokens/s, loss -, training\n" in status_text(here)


def test_status_prints_no_control_character_that_a_peer_sent() -> None:
    hostile = election(electors=[seat("a\x1b", address="\x1b", here=False)] * 3, append="\x1b", roster=["\x1b"] * 3)
    assert "\x1b" not in status_text(SERVED | {"election": hostile, "finish_reason": "\x1b", "from_folder": "\x1b"})


def test_status_names_limits_and_what_each_transfer_is_doing() -> None:
    moving = {
        "what": "blob 12ab\x1b",
        "direction": "down",
        "with": ["http://192.0.2.1:31340"],
        "bytes": 12_000_000,
        "bytes_total": 100_000_000,
        "bytes_per_s": 1_250_000,
        "left_s": 70.4,
        "resumed": 2,
    }
    limits = {"max_up": 1_250_000, "quota": 50 * 10**9, "quota_used": 5 * 10**8}
    bulk = {"limits": limits, "transfers": [moving, moving | {"left_s": None, "resumed": 0}], "mirror": "used up"}
    lines = status_text(STATUS | bulk).splitlines()[-3:]
    assert lines == [
        "limits of abababab, who was asked: max up 10 Mbit/s, 0.50 of 50 GB used today, no mirror: used up",
        "  down blob 12ab?: 12.0 of 100.0 MB, 10.00 Mbit/s, 70 s left, with http://192.0.2.1:31340, resumed 2 times",
        "  down blob 12ab?: 12.0 of 100.0 MB, 10.00 Mbit/s, stands still, with http://192.0.2.1:31340",
    ]


def test_status_of_a_run_without_learners_or_measurements_is_readable() -> None:
    text = status_text(STATUS | {"learners": [], "heldout": [], "rounds": [], "waiting": [], "finished": True})
    assert "no learners yet" in text
    assert "finished" in text


def test_who_serves_and_who_could_are_named_with_their_addresses() -> None:
    lines = said(SERVED)
    assert "served by abababab at 192.0.2.1:31340: term 1, lease 4.9 s, durable up to seq 84" in lines
    electors = "abababab (syncer), cdcdcdcd (learner), efefefef (standby)"
    assert f"3 electors: {electors}; 3 electors as wanted" in lines
    assert "standby, who can take over: efefefef at 192.0.2.2:31340" in lines
    assert not any("do not answer" in line for line in lines)
    assert "no standby: nobody can take over from the syncer" in "\n".join(said(SERVED, standbys=[]))


def test_electors_that_are_missing_are_named_and_a_reform_only_where_a_majority_is() -> None:
    gone = seat(C, heard_ms=42_000, address="192.0.2.2:31340", here=False)
    lines = said(SERVED, electors=[seat(A), seat(B), gone])
    named = "electors that do not answer: efefefef (not heard of for 42 s, was at 192.0.2.2:31340)"
    assert named in lines and not any("reform" in line for line in lines)
    both = [seat(A), seat(B, heard_ms=None, here=False), gone]
    lines = said(SERVED, electors=both, append="no lease for 9 s", lease_ms=-9000)
    assert "served by abababab at 192.0.2.1:31340: term 1, no lease for 9.0 s, durable up to seq 84" in lines
    assert "nothing is appended: no lease for 9 s" in lines
    assert "cdcdcdcd (not heard of in this term), efefefef (not heard of for 42 s" in "\n".join(lines)
    assert [line for line in lines if "until 1 of them is back" in line and "geo-diloco reform RUN_DIR" in line]


def test_a_standby_says_whom_it_follows_or_that_nobody_serves() -> None:
    standby = SERVED | {"role": "follower", "peer": C, "learners": []}
    lines = said(standby, role="peer", follows=A, electors=[seat(A), seat(B, heard_ms=None, here=False), seat(C)])
    assert "served by abababab at 192.0.2.1:31340, says efefefef, a standby that follows it" in "\n".join(lines)
    assert not any("do not answer" in line or "no learners" in line for line in lines), "it can't know"
    gone = [seat(A, heard_ms=None, here=False), seat(B, heard_ms=None, here=False), seat(C)]
    lines = said(standby | {"served_by": None}, role="peer", electors=gone, standbys=[seat(C)])
    assert "nobody serves the run now, says efefefef, a standby: 1 of the 2 electors needed are here" in lines
    assert any("geo-diloco reform" in line for line in lines)


def test_a_run_that_is_over_misses_nobody() -> None:
    over = SERVED | {"finished": True, "finish_reason": "3 minutes are over"}
    lines = said(over, electors=[seat(A), seat(B, here=False), seat(C, here=False)], standbys=[])
    assert lines[0].endswith("finished: 3 minutes are over")
    assert not any("do not answer" in line or "no standby" in line for line in lines)


def test_what_a_folder_holds_of_a_run_that_is_over_is_told_with_the_way_to_its_model() -> None:
    held = {key: STATUS[key] for key in ("run", "name", "term", "seq", "heldout", "tokens_total", "commits")}
    held |= {"finished": True, "finish_reason": "done", "learners": [], "rounds": [], "waiting": []}
    lines = status_text(held | {"from_folder": "/a b", "holds_model": True}).splitlines()
    assert "nobody serves it any more: this is what /a b holds" in lines
    assert lines[-1] == "the model: geo-diloco export '/a b' --to my-model"
    lines = status_text(held | {"from_folder": "/l", "holds_model": False, "commits": None}).splitlines()
    assert "term 1, seq 7: 1000 tokens merged" in lines and "(first" not in "\n".join(lines)
    assert lines[-1].startswith("the model is with the founder and the standbys")
