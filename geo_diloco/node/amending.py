"""The owner's amendments, from beside the run: from `--set NAME=VALUE` to a durable entry.

The order is signed once and given to whoever serves until an entry with it is durable, whoever that is by then: what it
is worth does not depend on who appends it, and its number sees to it that it happens once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from geo_diloco.config import changed_manifest
from geo_diloco.config.mistakes import named as printable
from geo_diloco.errors import ConfigError, RefusedError, TransferError
from geo_diloco.manifest import BranchId, CodecSpec, RunManifest
from geo_diloco.node.owning import FIND_S, LOOK_S, Finder, Found, Owned, finding, owned, wait_syncer
from geo_diloco.protocol.amendments import (
    AMENDABLE,
    CODECS,
    SECTIONS,
    AmendmentOrder,
    Changes,
    why_not_changes,
)
from geo_diloco.runtime.session import Session, give_order
from geo_diloco.runtime.wire import Order, seal_amendment, seal_order

DURABLE_S = 120.0
"""A hand-over or an election may be under way."""
SWITCHES = {"on": True, "true": True, "off": False, "false": False}


def amend(
    where: str,
    settings: Sequence[str],
    *,
    key: Path | None = None,
    contacts: Sequence[str] = (),
    wait: bool = True,
    limit_s: float = FIND_S,
) -> dict[str, Any]:
    """Order an amendment; returns the number, and what is in force as `status` says it, or none where it is not
    waited for, and warnings of what its owner may not have meant. `contacts`: `HOST:PORT` of peers, where no bootstrap
    answers. `limit_s`: how long somebody who serves is looked for.

    Raises UserError of some kind, DirectoryError, RefusedError or TransferError.
    """
    return asyncio.run(_amend(owned(where, key, contacts), settings, wait=wait, limit_s=limit_s))


async def _amend(run: Owned, settings: Sequence[str], *, wait: bool, limit_s: float) -> dict[str, Any]:
    wanted = _wanted(settings)
    async with finding(run) as finder:
        syncer = await wait_syncer(finder, limit_s=limit_s)
        assert finder.manifest is not None
        if run.identity.peer_id != finder.manifest.founder:
            raise ConfigError(f"the key given is not that of the run's owner, {finder.manifest.founder[:8]}")
        if syncer.status.get("finished"):
            raise ConfigError(
                f"the run is finished ({syncer.status.get('finish_reason')}) and can't be amended any more"
            )
        changes = _changes(wanted, syncer.status, finder.manifest)
        order = _order(run, syncer.status, changes)
        signed = seal_amendment(order, run.identity)
        try:
            await _give(finder.session, syncer, run, signed)
        except TransferError:
            if not wait:  # else whoever serves instead is given it, too
                raise
        rules = await _wait_durable(finder, run, order, signed) if wait else None
    warnings = _warnings(changes, syncer.status)
    return {"number": order.number, "given": list(changes.given()), "rules": rules, "warnings": warnings}


# ---- what is wanted ----------------------------------------------------------------------------------------------


def _wanted(settings: Sequence[str]) -> list[tuple[str, str]]:
    wanted = [_named(each) for each in settings]
    if not wanted:
        raise ConfigError(f"nothing to amend: give --set NAME=VALUE; what can be amended is {', '.join(AMENDABLE)}")
    names = [name for name, _ in wanted]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(f"--set {twice}: given {names.count(twice)} times, and an amendment has one value of it")
    return wanted


def _named(setting: str) -> tuple[str, str]:
    """`sync.quorum=2` and `quorum=2` say the same."""
    name, equals, text = setting.partition("=")
    sections = {f"{section}.{each}": each for section, names in SECTIONS.items() for each in names}
    sections |= {name.replace("_", ".", 1): name for name in CODECS}
    name = sections.get(name.strip(), name.strip())
    if name not in AMENDABLE or not equals:
        raise ConfigError(f"--set {printable(setting)}: only {', '.join(AMENDABLE)} can be amended, as NAME=VALUE")
    return name, text.strip()


def _changes(wanted: Sequence[tuple[str, str]], status: Mapping[str, Any], manifest: RunManifest) -> Changes:
    """Checked as if the manifest had been written so. Raises ConfigError or ManifestError."""
    rules = status["rules"]
    values = {name: _value(name, text, rules) for name, text in wanted}
    in_force = {name: _value(name, _text(rule["value"]), rules) for name, rule in rules.items()}
    sections: dict[str, dict[str, Any]] = {
        section: {name: (in_force | values)[name] for name in names} for section, names in SECTIONS.items()
    }
    legs = {name: _plain(value) for name, value in (in_force | values).items() if name in CODECS}
    plain = dataclasses.replace(manifest, founder="", nonce="")  # type: ignore[arg-type]
    changed_manifest(plain, sections | legs, source="--set")
    changes = Changes(**values)
    if why_not := why_not_changes(changes):  # what goes over the wire has ranges of its own
        raise ConfigError(f"--set: {why_not}")
    return changes


def _plain(value: CodecSpec | tuple[CodecSpec, ...]) -> Any:
    return [dataclasses.asdict(each) for each in value] if isinstance(value, tuple) else dataclasses.asdict(value)


def _text(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _value(name: str, text: str, rules: Mapping[str, Any]) -> Any:
    kinds = {"commits": int, "tokens": int, "quorum": int}
    try:
        if name == "grace":
            return SWITCHES[text.lower()]
        if name == "codec_up_choices":
            usual = str(rules["codec_up"]["value"])
            return tuple(_codec(each.strip(), usual) for each in text.split(",") if each.strip())
        if name in CODECS:
            return _codec(text, str(rules[name]["value"]))
        return kinds.get(name, float)(text)
    except (ValueError, KeyError) as exc:
        wanted = "on or off" if name == "grace" else "a whole number" if name in kinds else "a number"
        if name in CODECS:
            wanted = "a codec, as int8 or int8:64" if name != "codec_up_choices" else "codecs, as bf16,int8:64"
        raise ConfigError(f"--set {name}={printable(text)}: {wanted} is wanted") from exc


def _codec(text: str, usual: str) -> CodecSpec:
    """`usual` has the block that is meant where none is said."""
    name, _, block = text.partition(":")
    return CodecSpec(name=name, block=int(block or usual.partition(":")[2]))  # type: ignore[arg-type]


def _order(run: Owned, status: Mapping[str, Any], changes: Changes) -> AmendmentOrder:
    amended = status.get("amended") or [{"number": 0}]
    return AmendmentOrder(
        run=run.run, branch=BranchId(status["branch"]), number=int(amended[-1]["number"]) + 1, changes=changes
    )


def _warnings(changes: Changes, status: Mapping[str, Any]) -> list[str]:
    """Allowed, and hardly what was meant."""
    learners = status.get("learners") or ()
    here = sum(isinstance(each, dict) and each.get("connected") is True for each in learners)
    if changes.quorum is None or changes.quorum <= here:
        return []
    is_are = "learner is" if here == 1 else "learners are"
    return [
        f"quorum {changes.quorum}, and {here} {is_are} here: nothing is merged until there are {changes.quorum}; "
        f"--set quorum={max(1, here)} takes it back"
    ]


# ---- until it is in force ----------------------------------------------------------------------------------------


async def _give(session: Session, to: Found, run: Owned, signed: str) -> None:
    def order(nonce: str) -> str:
        return seal_order(Order(run=run.run, nonce=nonce, wish="amend", signed=signed), run.identity)

    await give_order(session, to.url, order)


async def _wait_durable(finder: Finder, run: Owned, order: AmendmentOrder, signed: str) -> Mapping[str, Any]:
    """What is in force then. Whoever serves next is given the order again, if it does not know it."""
    deadline = time.monotonic() + DURABLE_S
    while time.monotonic() < deadline:
        syncer = await finder.syncer()
        status = {} if syncer is None else syncer.status
        amended = {int(each["number"]): each["order"] for each in status.get("amended", ())}
        if amended.get(order.number) == signed:
            rules: Mapping[str, Any] = status["rules"]
            return rules
        if max(amended, default=0) >= order.number:
            raise RefusedError(f"another amendment of number {order.number} is in force: see `geo-diloco status`")
        if status.get("finished"):
            raise RefusedError(f"the run finished before amendment {order.number} was in force")
        if syncer is not None:
            with contextlib.suppress(TransferError):  # it may have it already, or serve no more: the next look tells
                await _give(finder.session, syncer, run, signed)
        await asyncio.sleep(LOOK_S)
    raise TransferError(
        f"amendment {order.number} is not durable after {DURABLE_S:.0f} s: a majority of the electors does not answer, "
        "see `geo-diloco status`; it may still come into force"
    )
