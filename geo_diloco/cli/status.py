"""`geo-diloco status`: what a run is doing, asked of its syncer, which the invite's bootstraps know, or a contact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from geo_diloco.cli import options
from geo_diloco.cli.options import answer


def status(
    invite: Annotated[str, typer.Argument(help="The run's invite.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    contacts: options.Contacts = None,
) -> None:
    """Show where a run stands: held-out loss, learners, last rounds, and what it waits for."""
    from geo_diloco.node import fetch_status
    from geo_diloco.runtime.invite import Invite

    found = fetch_status(Invite.parse(invite), contacts or ())
    answer(json.dumps(found) if as_json else status_text(found))


def status_text(status: Mapping[str, Any]) -> str:
    """The same for people. What peers said of themselves is freed of control characters."""
    state = "finished" if status["finished"] else f"{status['progress']:.0%} done"
    counts = f"{status['commits']} commits, {status['tokens_total']} tokens merged"
    lines = [
        f"run {status['run']} ({_plain(status['name'])}): {state}",
        f"term {status['term']}, seq {status['seq']}: {counts}",
    ]
    if status.get("lineage"):
        lines.append(f"in the branch of the owner's reform {status['lineage']}")
    lines += _election_lines(status["election"]) if status.get("election") else []
    lines += amended_lines(status["rules"])
    lines += _bootstrap_lines(status)
    if status["heldout"]:
        seq, loss, _ = status["heldout"][-1]
        lines.append(f"held-out loss {loss:.4f} nats per token at seq {seq} (first {status['heldout'][0][1]:.4f})")
    lines.append(
        f"in {status['bytes_in']} bytes, out {status['bytes_out']} bytes; per parameter and contribution "
        f"{status['bytes_per_param_up']:.3f} up, {status['bytes_per_param_down']:.3f} down"
    )
    if status.get("disk_bytes"):
        lines.append(f"{status['disk_bytes'] / 1e6:.1f} MB on the syncer's disk")
    lines.append("learners:" if status["learners"] else "no learners yet")
    for learner in status["learners"]:
        loss = "-" if learner["loss"] is None else f"{learner['loss']:.4f}"
        lines.append(
            f"  {learner['peer'][:8]}  {_plain(learner['host'])}  {'' if learner['connected'] else 'away, '}"
            f"step {learner['step']}, {learner['tokens_per_s']:.0f} tokens/s, loss {loss}, {_plain(learner['doing'])}"
        )
        lines += [f"    {_plain(learner['uplink'])}"] if learner.get("uplink") else []
    for item in status["rounds"][-4:]:
        lines.append(
            f"  round {item['round']}, fragment {item['fragment']}: {item['participants']} of {item['live']} learners, "
            f"quorum after {item['quorum_wait_ms']} ms, grace {item['grace_ms']} ms: {_plain(item['reason'])}"
        )
    lines += [f"  fragment {item['fragment']} waits: {_plain(item['reason'])}" for item in status["waiting"]]
    return "\n".join([*lines, *_bulk_lines(status)])


def _bootstrap_lines(status: Mapping[str, Any]) -> list[str]:
    from geo_diloco.runtime.directory import silence_text

    since = (status.get("bootstraps") or {}).get("silent_since")
    return [silence_text(since)] if isinstance(since, int | float) and 0 < since < 1e11 else []


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
    lines = [f"limits: {', '.join(said)}"] if said else []
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


def _election_lines(election: Mapping[str, Any]) -> list[str]:
    lease = "no lease" if election["lease_ms"] is None else f"lease {election['lease_ms'] / 1000:.1f} s"
    durable = "-" if election["durable_seq"] is None else election["durable_seq"]
    names = ", ".join(_plain(peer)[:8] for peer in election["roster"])
    lines = [
        f"{election['role']} in term {election['term']}, {lease}, durable up to seq {durable}",
        f"{len(election['roster'])} electors ({names}): {_plain(election['roster_plan'])}",
    ]
    if election["role"] != "syncer":
        follows = "nobody" if election["follows"] is None else _plain(election["follows"])[:8]
        return [
            f"{election['role']} in term {election['term']}, follows {follows}: {_plain(election['vote'])}",
            f"{len(election['roster'])} electors ({names}); candidacy: {_plain(election['candidacy'])}",
        ]
    return lines + ([f"nothing is appended: {_plain(election['append'])}"] if election["append"] else [])


def _plain(text: object) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(text))[:200]
