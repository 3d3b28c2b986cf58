"""What giving its state to a joiner costs a machine that trains: the same training loop with and without, in pairs.

A learner that can be reached serves through a standby, a process of its own beside training; here a founder's process
is that, with a model of some size. A joiner fetches the whole snapshot from it, over and over, as fast as its line
allows (`--rate`), from this machine too: what the joiner takes of the processors is in the figure, which is rather too
high for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from geo_diloco.cli.bench_overhead import window_alone
from geo_diloco.cli.demo_files import toml_from_manifest
from geo_diloco.cli.demo_processes import Children, child_environment
from geo_diloco.errors import ConfigError, TransferError

HIDDEN_SIZE = 512
"""Of the model whose state is given away: some millions of parameters."""
RETRY_S = 0.5


def measure_donor(*, num_pairs: int, seconds: float, rate: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Keys: `lost_median` (share of inner steps per second lost while the state is given away) and `rows`, one per
    pair, with the MB per second that were given. Raises ConfigError if there is no such rate."""
    from geo_diloco.config.quantities import bytes_per_s

    try:
        bytes_per_s(rate)
    except ValueError as exc:
        raise ConfigError(f"--rate: {exc}") from exc
    with tempfile.TemporaryDirectory(prefix="geo-diloco-bench-") as folder, Children(Path(folder)) as children:
        url = _founder(children, Path(folder))
        rows = []
        for pair in range(num_pairs):
            rows.append(_pair(url, rate, seconds, is_first=bool(pair % 2)))
            say(
                f"pair {pair + 1}/{num_pairs}: alone {rows[-1]['alone_steps_per_s']:.2f}, as a donor of "
                f"{rows[-1]['given_mb_per_s']:.1f} MB/s {rows[-1]['donor_steps_per_s']:.2f} steps/s, "
                f"lost {rows[-1]['lost']:.1%}"
            )
    return {"pairs": num_pairs, "lost_median": statistics.median(row["lost"] for row in rows), "rows": rows}


def _founder(children: Children, folder: Path) -> str:
    from geo_diloco.manifest import StopSpec
    from geo_diloco.training.presets import demo_manifest

    demo = demo_manifest()
    model = replace(demo.model, config={**(demo.model.config or {}), "hidden_size": HIDDEN_SIZE})
    run = replace(demo, model=model, stop=StopSpec(minutes=600.0), evaluation=replace(demo.evaluation, every_seconds=0))
    (folder / "run.toml").write_text(toml_from_manifest(run), encoding="utf-8")
    where = ("--run-dir", str(folder / "founder"), "--host", "127.0.0.1", "--port", "0", "--json")
    founder = children.start("founder", "start", str(folder / "run.toml"), *where)
    return f"http://{children.wait_ready(founder, 'invite')['http']}"


def _pair(url: str, rate: str, seconds: float, *, is_first: bool) -> dict[str, float]:
    """`is_first`: with the joiner before without it."""
    steps: dict[bool, float] = {}
    given = 0.0
    for is_donor in (True, False) if is_first else (False, True):
        with _joiner(url, rate) if is_donor else contextlib.nullcontext():
            before, began_at = _bytes_out(url), time.monotonic()
            steps[is_donor] = window_alone(seconds)["steps_per_s"]
            if is_donor:
                given = (_bytes_out(url) - before) / (time.monotonic() - began_at) / 1e6
    return {
        "alone_steps_per_s": steps[False],
        "donor_steps_per_s": steps[True],
        "given_mb_per_s": given,
        "lost": 1 - steps[True] / steps[False],
    }


@contextlib.contextmanager
def _joiner(url: str, rate: str) -> Iterator[None]:
    command = [sys.executable, "-P", "-m", "geo_diloco", "bench", "donor-joiner", url, "--rate", rate]
    process = subprocess.Popen(command, env=child_environment(os.environ), start_new_session=True)
    try:
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def fetch_for_ever(url: str, rate: str) -> None:
    """A joiner that begins anew each time it has everything."""
    asyncio.run(_fetch(url, rate))


async def _fetch(url: str, rate: str) -> None:
    from geo_diloco.config.quantities import bytes_per_s
    from geo_diloco.node.gathering import Gathering, blobs_of
    from geo_diloco.observability import EventLog
    from geo_diloco.runtime.bulk import make_bulk
    from geo_diloco.runtime.session import fetch_snapshot
    from geo_diloco.runtime.store import BlobStore
    from geo_diloco.runtime.wire import open_snapshot

    bulk = make_bulk(max_down=bytes_per_s(rate))
    while True:
        with tempfile.TemporaryDirectory(prefix="geo-diloco-bench-") as folder, contextlib.suppress(TransferError):
            signed = await fetch_snapshot(bulk.session, url)
            if signed is not None:
                blobs = blobs_of(open_snapshot(signed), with_momentum=True)
                gathering = Gathering(bulk, BlobStore(Path(folder)), syncer=url, others=(), log=EventLog())
                await gathering.fetch(blobs)
                continue
        await asyncio.sleep(RETRY_S)


def _bytes_out(url: str) -> int:
    from geo_diloco.runtime.session import fetch_status, make_session

    async def ask() -> int:
        async with make_session() as session:
            return int((await fetch_status(session, url))["bytes_out"])

    return asyncio.run(ask())
