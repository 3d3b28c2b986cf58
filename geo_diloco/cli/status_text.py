"""A run's status as a person reads it. What peers said of themselves is freed of control characters.

A status that was read from a folder, when the run is over and nobody serves it, has only what the chain tells.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def status_text(status: Json) -> str:
    """All of it, line by line."""
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in _lines(status))


def _lines(status: Json) -> list[str]:
    lines = [f"run {status['run']} ({_plain(status['name'])}): {_state(status)}"]
    lines += _folder_lines(status)
    counts = f"{status['tokens_total']} tokens merged"
    counts = counts if status["commits"] is None else f"{status['commits']} commits, {counts}"
    lines.append(f"term {status['term']}, seq {status['seq']}: {counts}")
    if status.get("lineage"):
        lines.append(f"in the branch of the owner's reform {status['lineage']}")
    lines += _election_lines(status)
    lines += amended_lines(status.get("rules", {}))
    lines += _bootstrap_lines(status)
    if status["heldout"]:
        seq, loss, _ = status["heldout"][-1]
        first = "" if status["commits"] is None else f" (first {status['heldout'][0][1]:.4f})"
        lines.append(f"held-out loss {loss:.4f} nats per token at seq {seq}{first}")
    if status.get("from_folder"):
        return [*lines, *_model_lines(status)]
    lines.append(_bytes_text(status))
    if status.get("disk_bytes"):
        lines.append(f"{status['disk_bytes'] / 1e6:.1f} MB on {_whose_disk(status)} disk")
    lines += [*_learner_lines(status), *_round_lines(status)]
    return [*lines, *_bulk_lines(status)]


def _bytes_text(status: Json) -> str:
    moved = f"in {status['bytes_in'] / 1e6:.1f} MB, out {status['bytes_out'] / 1e6:.1f} MB"
    if not (status["bytes_per_param_up"] or status["bytes_per_param_down"]):
        return moved  # of a peer that has not served: only who merges knows
    return (
        f"{moved}; per parameter and contribution {status['bytes_per_param_up']:.3f} bytes up, "
        f"{status['bytes_per_param_down']:.3f} down"
    )


def _state(status: Json) -> str:
    if not status["finished"]:
        return f"{status['progress']:.0%} done"
    return f"finished: {_plain(status['finish_reason'])}" if status.get("finish_reason") else "finished"


def _whose_disk(status: Json) -> str:
    return "the syncer's" if status.get("role", "syncer") == "syncer" else f"{status['peer'][:8]}'s"


def _folder_lines(status: Json) -> list[str]:
    folder = status.get("from_folder")
    return [f"nobody serves it any more: this is what {_plain(folder)} holds"] if folder else []


def _model_lines(status: Json) -> list[str]:
    if not status.get("holds_model"):
        return ["the model is with the founder and the standbys: geo-diloco export RUN_DIR --to my-model"]
    return [f"the model: geo-diloco export {shlex.quote(_plain(status['from_folder']))} --to my-model"]


# ---- who serves, and who could -----------------------------------------------------------------------------------


def _election_lines(status: Json) -> list[str]:
    election, over = status.get("election"), bool(status["finished"])
    if not election:
        return []
    names = ", ".join(_elector_text(peer, status) for peer in election["roster"])
    lines = _served_lines(status, election)
    if over:
        return [*lines, _electors_text(election, names)]
    lines.append(f"{_electors_text(election, names)}{_plan_text(election)}")
    return [*lines, *_missing_lines(election), *_standby_lines(status, election)]


def _electors_text(election: Json, names: str) -> str:
    number = len(election["roster"])
    return f"1 elector: {names}" if number == 1 else f"{number} electors: {names}"


def _served_lines(status: Json, election: Json) -> list[str]:
    served = status.get("served_by")
    who = "" if not served else f"served by {_plain(served['peer'])[:8]}{_at(served)}"
    if election["role"] == "syncer":
        if status["finished"]:  # whoever serves tells of the end, and needs nobody for that
            return [f"{who or 'syncer'}: term {election['term']}"]
        lease = "no lease" if election["lease_ms"] is None else _lease_text(election["lease_ms"])
        durable = "-" if election["durable_seq"] is None else election["durable_seq"]
        lines = [f"{who or 'syncer'}: term {election['term']}, {lease}, durable up to seq {durable}"]
        return lines + ([f"nothing is appended: {_plain(election['append'])}"] if election["append"] else [])
    asked = f"{_plain(status.get('peer', 'a peer'))[:8]}, a standby"
    if who:
        return [f"{who}, says {asked} that follows it: the syncer itself did not answer ({_plain(election['vote'])})"]
    follows = election["follows"]
    if follows is not None:
        return [f"{asked}, follows {_plain(follows)[:8]}, which did not answer: {_plain(election['vote'])}"]
    return [f"nobody serves the run now, says {asked}: {_plain(election['candidacy'])}"]


def _lease_text(lease_ms: int) -> str:
    return f"lease {lease_ms / 1000:.1f} s" if lease_ms >= 0 else f"no lease for {-lease_ms / 1000:.1f} s"


def _at(place: Json) -> str:
    return f" at {_plain(place['address'])}" if place.get("address") else ""


def _elector_text(peer: str, status: Json) -> str:
    """With what it is beside that, for who knows peers by what they do."""
    served, election = status.get("served_by") or {}, status["election"]
    roles = {each["peer"]: "standby" for each in election.get("standbys", [])}
    roles |= {each["peer"]: "learner" for each in status.get("learners", [])}
    roles |= {served["peer"]: "syncer"} if served else {}
    return f"{_plain(peer)[:8]} ({roles[peer]})" if peer in roles else _plain(peer)[:8]


def _plan_text(election: Json) -> str:
    plan = _plain(election["roster_plan"])
    return f"; {plan}" if election["role"] == "syncer" and plan and not election["append"] else ""


def _missing_lines(election: Json) -> list[str]:
    """Who votes and is not here, as far as whoever was asked can tell: to one that follows nobody says so."""
    seats = election.get("electors", [])
    if not seats or (election["role"] != "syncer" and election["follows"] is not None):
        return []
    is_syncer = election["role"] == "syncer"
    gone = [_absence_text(each, " in this term" if is_syncer else "") for each in seats if not each["here"]]
    needed = len(seats) // 2 + 1
    if not gone:
        return []
    said = f"electors that do not answer: {', '.join(gone)}"
    if len(seats) - len(gone) >= needed:
        return [said]
    back = needed - (len(seats) - len(gone))
    return [
        said,
        f"a majority of electors is missing: nothing is committed until {back} of them {'is' if back == 1 else 'are'} "
        "back. If they are gone for good, the run's owner goes on without them: geo-diloco reform RUN_DIR --electors "
        "all-live",
    ]


def _absence_text(seat: Json, never: str) -> str:
    heard = seat["heard_ms"]
    since = f"not heard of{never}" if heard is None else f"not heard of for {heard / 1000:.0f} s"
    return f"{_plain(seat['peer'])[:8]} ({since}{', was' + _at(seat) if seat.get('address') else ''})"


def _standby_lines(status: Json, election: Json) -> list[str]:
    serving = (status.get("served_by") or {}).get("peer")
    found = [each for each in election.get("standbys", []) if each["peer"] != serving]
    if found:
        names = ", ".join(f"{_plain(each['peer'])[:8]}{_at(each)}" for each in found)
        return [f"{'standby' if len(found) == 1 else 'standbys'}, who can take over: {names}"]
    if "standbys" not in election or election["role"] != "syncer":
        return []
    return ["no standby: nobody can take over from the syncer (join ... --announce HOST:PORT brings one)"]


def _bootstrap_lines(status: Json) -> list[str]:
    from geo_diloco.runtime.directory import silence_text

    since = (status.get("bootstraps") or {}).get("silent_since")
    return [silence_text(since)] if isinstance(since, int | float) and 0 < since < 1e11 else []


# ---- learners and rounds -----------------------------------------------------------------------------------------


def _learner_lines(status: Json) -> list[str]:
    if not status["learners"] and status.get("role", "syncer") != "syncer":
        return []  # only the syncer knows them
    lines = ["learners:" if status["learners"] else "no learners yet"]
    for learner in status["learners"]:
        loss = "-" if learner["loss"] is None else f"{learner['loss']:.4f}"
        pace = f"{learner['tokens_per_s']:.0f} tokens/s, loss {loss}, {_plain(learner['doing'])}"
        lines.append(
            f"  {learner['peer'][:8]}  {_plain(learner['host'])}  {'' if learner['connected'] else 'away, '}"
            f"step {learner['step']}, {pace if learner['connected'] else f'loss {loss}'}"
        )
        lines += [f"    {_plain(learner['uplink'])}"] if learner.get("uplink") else []
    return lines


def _round_lines(status: Json) -> list[str]:
    lines = [
        f"  round {item['round']}, fragment {item['fragment']}: {item['participants']} of {item['live']} learners, "
        f"quorum after {item['quorum_wait_ms']} ms, grace {item['grace_ms']} ms: {_plain(item['reason'])}"
        for item in status["rounds"][-4:]
    ]
    return lines + [f"  fragment {item['fragment']} waits: {_plain(item['reason'])}" for item in status["waiting"]]


# ---- the line ----------------------------------------------------------------------------------------------------


def _bulk_lines(status: Mapping[str, Any]) -> list[str]:
    """Transfers of the peer that was asked, and the limits that its owner set."""
    limits = status.get("limits", {})
    said = [
        f"{name.replace('_', ' ')} {limits[name] * 8 / 1e6:g} Mbit/s"
        for name in ("max_up", "max_down")
        if name in limits
    ]
    if "quota" in limits:
        said.append(f"{limits['quota_used'] / 1e9:.2f} of {limits['quota'] / 1e9:g} GB used today")
    if status.get("mirror"):
        said.append(f"no mirror: {_plain(status['mirror'])}")
    whose = _plain(status.get("peer", "the peer"))[:8]
    lines = [f"limits of {whose}, who was asked: {', '.join(said)}"] if said else []
    for item in status.get("transfers", []):
        left = "stands still" if item["left_s"] is None else f"{item['left_s']:.0f} s left"
        resumed = f", resumed {item['resumed']} times" if item["resumed"] else ""
        moved = f"{item['bytes'] / 1e6:.1f} of {item['bytes_total'] / 1e6:.1f} MB"
        lines.append(
            f"  {item['direction']} {_plain(item['what'])}: {moved}, {item['bytes_per_s'] * 8 / 1e6:.2f} Mbit/s, "
            f"{left}, with {_plain(', '.join(item['with']))}{resumed}"
        )
    return lines


def amended_lines(rules: Mapping[str, Any]) -> list[str]:
    """What is not as the manifest says, each with the entry since which."""
    return [
        f"{name} {_plain(value_text(rule['value']))} (amended at seq {rule['amended_at']})"
        for name, rule in rules.items()
        if rule["amended_at"] is not None
    ]


def value_text(value: object) -> str:
    """As `amend --set` takes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(text: object) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(text))[:200]
