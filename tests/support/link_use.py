"""How full transfers keep a link that loses packets, against iperf3's best of 1, 4 and 8 streams on it in the same run.

    python -m tests.support.link_use [--links fast,slow,piece] [--congestion bbr,cubic] [--rounds 1] [--json]

Two network namespaces (root) with a link between them that is as netem would make it: `switch.py` delays, drops and
paces each packet, since many kernels have no netem. Its queue holds 0.2 s of the rate, about what a home's router has,
and loses the rest; packets are lost each way, acknowledgements too. iperf3 and our transfers take turns, under the same
congestion control; iperf3's figure is what its receiver counts in about the time our blob takes, slow start included;
ours has all of it: connections, index, last answer. The blob is new to whoever takes it and whoever gives it has all of
it, as between learner and syncer. Control is small questions on connections of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_diloco.manifest import Digest
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.bulk import Bulk, Lanes
from geo_diloco.runtime.fetch import Source, fetch_blob
from geo_diloco.runtime.http import HttpServer
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.session import Session, make_session, read_small
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.upload import upload_blob
from tests.support.namespaces import Namespaces, why_no_namespaces
from tests.unit.runtime.samples import RememberingPort

ROOT = Path(__file__).resolve().parents[2]
SERVER, CLIENT = 0, 1
IPERF_STREAMS = (1, 4, 8)
IPERF_S_MAX = 30
ASKERS = 4
ASK_EVERY_S = 0.02
IDLE_S = 6.0
CUTS = 3


@dataclass(frozen=True)
class Link:
    mbit_per_s: float
    round_trip_ms: float
    loss: float
    blob_bytes: int


LINKS = {
    "fast": Link(100.0, 100.0, 0.005, 100_000_000),
    "slow": Link(10.0, 200.0, 0.02, 25_000_000),
    "piece": Link(10.0, 200.0, 0.02, 1_000_000),
}


# ---- the two ends, each a process in its namespace


async def serve(folder: Path, congestion: str, ref: BlobRef) -> None:
    """Until standard input ends; then what came is printed."""
    port = RememberingPort()
    port.announce(ref)
    server = HttpServer(port, Identity.generate(), _store(folder, ref), lanes=Lanes(congestion=congestion))
    print(await server.start("0.0.0.0", 0), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(server.counters.bulk_in, flush=True)
    await server.stop()


async def dial(folder: Path, congestion: str, ref: BlobRef, url: str, direction: str) -> None:
    """Move the blob and print how it went: "up", "down", or with "idle" nothing but questions."""
    lanes = Lanes(congestion=congestion)
    store = _store(folder, ref)
    async with make_session(congestion=lanes.controls) as session:
        bulk = Bulk(session, lanes=lanes)
        took_ms: list[float] = []
        asking = [asyncio.create_task(_ask(url, lanes.controls, took_ms)) for _ in range(ASKERS)]
        await asyncio.sleep(1.0)
        took_ms.clear()
        began_at = time.monotonic()
        if direction == "up":
            await upload_blob(bulk, url, ref, store, there="none")
        elif direction == "down":
            await fetch_blob(bulk, [Source(url, has_all=True)], ref, store)
        else:
            await asyncio.sleep(IDLE_S)
        took_s = time.monotonic() - began_at
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        route = bulk.routes.to(url)
        figures = {
            "seconds": took_s,
            "streams": route.streams,
            "received": bulk.counters.bulk_in,
            "control_ms": took_ms,
        }
        print(json.dumps(figures), flush=True)


def _store(folder: Path, ref: BlobRef) -> BlobStore:
    """Knows the index of what is there, as whoever has just put it there does."""
    store = BlobStore(folder)
    if store.has(ref):
        store.index(ref)
    return store


async def _ask(url: str, controls: Sequence[str], took_ms: list[float]) -> None:
    session: Session
    async with make_session(congestion=controls) as session:
        while True:
            began_at = time.monotonic()
            await read_small(session, f"{url}/v1/status")
            took_ms.append((time.monotonic() - began_at) * 1000)
            await asyncio.sleep(ASK_EVERY_S)


# ---- who starts them


class Bench:
    """One link, one congestion control."""

    def __init__(self, namespaces: Namespaces, link: Link, congestion: str, folder: Path) -> None:
        self._namespaces = namespaces
        self._link = link
        self._congestion = congestion
        self._folder = folder
        self._full = folder / f"full-{link.blob_bytes}"
        self._ref = BlobStore(self._full).put(os.urandom(link.blob_bytes))
        namespaces.shape(CLIENT, delay_ms=link.round_trip_ms / 2, mbit_per_s=link.mbit_per_s, loss=link.loss)

    def ours(self, direction: str, *, cuts: int = 0) -> dict[str, Any]:
        """`received`: bytes of the blob, and of its index on the way up, that came to whoever takes it."""
        with tempfile.TemporaryDirectory(dir=self._folder) as empty:
            theirs, mine = (Path(empty), self._full) if direction == "up" else (self._full, Path(empty))
            with self._served(theirs) as (server, url):
                with self._namespaces.inside(CLIENT):
                    client = self._end("dial", mine, "--url", url, "--direction", direction)
                for number in range(1, cuts + 1):
                    self._wait_passed(client, direction, number * self._link.blob_bytes // (cuts + 1))
                    with self._namespaces.inside(CLIENT):
                        dst = ("dst", Namespaces.address(SERVER), "dport", f"= :{url.rpartition(':')[2]}")
                        subprocess.run(["ss", "-K", *dst], check=True, capture_output=True)
                said, _ = client.communicate()
                figures: dict[str, Any] = json.loads(said)
                taken, _ = server.communicate()
            if direction == "up":
                figures["received"] = int(taken)
            return figures

    @contextmanager
    def _served(self, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
        with self._namespaces.inside(SERVER):
            server = self._end("serve", folder)
        try:
            assert server.stdout is not None
            yield server, f"http://{Namespaces.address(SERVER)}:{int(server.stdout.readline())}"
        finally:
            server.kill()
            server.wait()

    def _end(self, role: str, folder: Path, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.support.link_use", "--role", role, "--folder", str(folder)]
        command += ["--congestion", self._congestion, "--blob", f"{self._ref.digest}:{self._ref.size}", *more]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    @staticmethod
    def _wait_passed(client: subprocess.Popen[str], direction: str, wanted: int) -> None:
        column = 9 if direction == "up" else 1
        device = Path(f"/proc/{client.pid}/net/dev")
        before = None
        while client.poll() is None:
            lines = device.read_text("ascii").splitlines()
            passed = int(next(line.split() for line in lines if line.strip().startswith("wan0"))[column])
            before = passed if before is None else before
            if passed - before >= wanted:
                return
            time.sleep(0.02)

    def iperf(self, streams: int, seconds: int) -> float:
        """Mbit/s that its receiver counts."""
        with self._namespaces.inside(SERVER):
            server = subprocess.Popen(["iperf3", "-s", "-1", "-p", "5201"], stdout=subprocess.DEVNULL)
        try:
            command = ["iperf3", "-c", Namespaces.address(SERVER), "-C", self._congestion, "-P", str(streams)]
            for _ in range(50):
                with self._namespaces.inside(CLIENT):
                    done = subprocess.run([*command, "-t", str(seconds), "-J"], capture_output=True, text=True)
                found = json.loads(done.stdout)
                if "refused" not in found.get("error", ""):
                    break
                time.sleep(0.1)
            return float(found["end"]["sum_received"]["bits_per_second"]) / 1e6
        finally:
            server.kill()
            server.wait()


def measure(name: str, congestion: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Rounds of iperf3 and ours in turn, then ours with cuts."""
    link = LINKS[name]
    with Namespaces(2) as namespaces:
        bench = Bench(namespaces, link, congestion, folder)
        idle_ms = bench.ours("idle")["control_ms"]
        iperf: dict[int, list[float]] = {streams: [] for streams in IPERF_STREAMS}
        ours: dict[str, list[dict[str, Any]]] = {"up": [], "down": []}
        seconds = max(5, min(IPERF_S_MAX, round(1.2 * link.blob_bytes * 8 / link.mbit_per_s / 1e6)))
        for _ in range(rounds):
            for streams, direction in zip(IPERF_STREAMS, ("up", "down", ""), strict=True):
                iperf[streams].append(bench.iperf(streams, seconds))
                if direction:
                    ours[direction].append(bench.ours(direction))
        with_cuts = {direction: bench.ours(direction, cuts=CUTS) for direction in ours}
    best = max(_median(values) for values in iperf.values())
    row: dict[str, Any] = {
        "link": name,
        "link_mbit_per_s": link.mbit_per_s,
        "rtt_ms": link.round_trip_ms,
        "loss": link.loss,
        "congestion": congestion,
        "blob_bytes": link.blob_bytes,
        "iperf_mbit_per_s": {str(streams): [round(each, 2) for each in values] for streams, values in iperf.items()},
        "control_rtt_idle_p50_ms": _quantile(idle_ms, 0.5),
        "control_rtt_idle_p99_ms": _quantile(idle_ms, 0.99),
    }
    for direction, runs in ours.items():
        rate = _median([link.blob_bytes * 8 / run["seconds"] / 1e6 for run in runs])
        busy_ms = [each for run in runs for each in run["control_ms"]]
        row |= {
            f"{direction}_mbit_per_s": round(rate, 2),
            f"{direction}_share_of_iperf_best": round(rate / best, 3),
            f"{direction}_streams": runs[-1]["streams"],
            f"{direction}_control_rtt_p50_ms": _quantile(busy_ms, 0.5),
            f"{direction}_control_rtt_p99_ms": _quantile(busy_ms, 0.99),
            f"{direction}_control_questions": len(busy_ms),
            f"{direction}_twice_share": round(max(0, with_cuts[direction]["received"] / link.blob_bytes - 1), 5),
        }
    return row


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else 0.0


def _line(row: dict[str, Any]) -> str:
    iperf = " / ".join(f"{_median(values):.1f}" for values in row["iperf_mbit_per_s"].values())
    parts = [
        f"{row['link']:>5} {row['congestion']:>5} {row['link_mbit_per_s']:g} Mbit/s, {row['rtt_ms']:g} ms,"
        f" {row['loss']:.1%}: iperf3 {iperf}; idle control p50 {row['control_rtt_idle_p50_ms']:.0f}"
        f" p99 {row['control_rtt_idle_p99_ms']:.0f} ms"
    ]
    for way in ("up", "down"):
        parts.append(
            f"{way:>12}: {row[f'{way}_mbit_per_s']:.2f} Mbit/s = {row[f'{way}_share_of_iperf_best']:.1%} of its best,"
            f" {row[f'{way}_streams']} streams, {row[f'{way}_twice_share']:.2%} twice after {CUTS} cuts,"
            f" control p50 {row[f'{way}_control_rtt_p50_ms']:.0f} p99 {row[f'{way}_control_rtt_p99_ms']:.0f} ms"
        )
    return "\n".join(parts)


def why_not() -> str:
    """What is wanting on this machine, in one line; empty if nothing is."""
    if reason := why_no_namespaces():
        return reason
    for tool, package in (("iperf3", "iperf3"), ("ss", "iproute2")):
        if shutil.which(tool) is None:
            return f"the `{tool}` command is wanted (package {package})"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="fast,slow,piece", help=", ".join(LINKS))
    parser.add_argument("--congestion", default="bbr,cubic")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the rows as one object on the last line")
    for hidden in ("role", "folder", "blob", "url", "direction"):
        parser.add_argument(f"--{hidden}", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.role:
        digest, _, size = asked.blob.partition(":")
        ref = BlobRef(Digest(digest), int(size))
        end = (
            serve(Path(asked.folder), asked.congestion, ref)
            if asked.role == "serve"
            else dial(Path(asked.folder), asked.congestion, ref, asked.url, asked.direction)
        )
        asyncio.run(end)
        return 0
    links, controls = asked.links.split(","), asked.congestion.split(",")
    if unknown := [name for name in links if name not in LINKS]:
        parser.error(f"--links {unknown[0]!r}; there are {', '.join(LINKS)}")
    if reason := why_not():
        print(f"link_use: {reason}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="geo_diloco-link-") as folder:
        for name in links:
            for congestion in controls:
                rows.append(measure(name, congestion, asked.rounds, Path(folder)))
                print(_line(rows[-1]), flush=True)
    if asked.json:
        print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
