"""The directory on the real DHT, with real processes on loopback."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from geo_diloco.errors import DirectoryError
from geo_diloco.manifest import BootId, PeerId, RunId, Seq, Term
from geo_diloco.runtime.bootstrap import run_bootstrap
from geo_diloco.runtime.dht import Directory, PeerRecord, by_claim
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.p2pd import FOLDER_PREFIX, StateFolder

pytestmark = pytest.mark.integration

RUN = RunId("ab" * 20)
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]

CHILD = """
import asyncio, sys, time
from pathlib import Path
folder, bootstrap, skew_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
clock = time.time
time.time = lambda: clock() + skew_s
from geo_diloco.manifest import BootId, RunId, Seq, Term
from geo_diloco.runtime.dht import Directory, PeerRecord
from geo_diloco.runtime.identity import Identity

async def main():
    identity = Identity.generate()
    directory = await Directory.start(
        initial_peers=[bootstrap], listen=["/ip4/127.0.0.1/tcp/0"], identity=identity, state_dir=folder,
        on_status=lambda status: print("status", status, flush=True),
    )
    await directory.wait_joined()
    run = RunId("ab" * 20)
    record = PeerRecord(run=run, peer=identity.peer_id, roles=("learner",), address="", term=Term(0),
                        boot=BootId("00"), head_seq=Seq(0), wire_version=1)
    await directory.publish(run, record)
    print("found", len(await directory.find(run)), identity.peer_id, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await directory.close()
    assert "hivemind.averaging" not in sys.modules, "only what a DHT needs is imported"
    print("closed", flush=True)

asyncio.run(main())
"""


def record_of(identity: Identity, role: str = "learner", *, term: int = 0, address: str = "") -> PeerRecord:
    return PeerRecord(
        run=RUN,
        peer=identity.peer_id,
        roles=(role,),
        address=address,
        term=Term(term),
        boot=BootId("00"),
        head_seq=Seq(0),
        wire_version=1,
    )


@dataclasses.dataclass
class Site:
    """Starts directories in folders of their own and closes them at the end."""

    folder: Path
    stack: AsyncExitStack
    told: list[str] = dataclasses.field(default_factory=list)
    count: int = 0

    async def start(self, *bootstraps: str, listen: list[str] = LOOPBACK, **more: Any) -> Directory:
        self.count += 1
        more.setdefault("state_dir", self.folder / f"directory-{self.count}")
        directory = await Directory.start(initial_peers=bootstraps, listen=listen, on_status=self.told.append, **more)
        self.stack.push_async_callback(directory.close)
        await directory.wait_joined()
        return directory


@asynccontextmanager
async def site_at(folder: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        yield Site(folder, stack)


def run(scenario: Callable[[Site], Awaitable[None]], folder: Path) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(100), site_at(folder) as site:
            await scenario(site)

    asyncio.run(all_of_it())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_of(state_dir: Path) -> list[psutil.Process]:
    """The watchdog and p2pd of a directory, by the folder that both were given."""
    return processes_with(noted_in(state_dir))


def noted_in(state_dir: Path) -> str:
    """The folder of sockets in use."""
    return (state_dir / "p2pd-folder").read_text().partition("\n")[0]


def processes_with(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(marker in argument for argument in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def p2pd_of(state_dir: Path) -> psutil.Process:
    (p2pd,) = [process for process in processes_of(state_dir) if process.cmdline()[0].endswith("p2pd")]
    return p2pd


async def wait_until(condition: Callable[[], bool], *, within_s: float) -> float:
    """Returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"not within {within_s} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


# ---- publishing and finding ------------------------------------------------------------------------------------


def test_a_late_joiner_finds_who_published_before_and_whoever_leaves_is_gone_at_once(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        bootstrap = await site.start()
        founder_id, learner_id = Identity.generate(), Identity.generate()
        founder = await site.start(bootstrap.visible_maddrs[0], identity=founder_id)
        syncer = record_of(founder_id, "syncer", term=1, address="127.0.0.1:31340")
        assert await founder.publish(RUN, syncer)
        learner = await site.start(bootstrap.visible_maddrs[0], identity=learner_id, client_mode=True)
        assert await learner.publish(RUN, record_of(learner_id))
        late = await site.start(bootstrap.visible_maddrs[0], client_mode=True)
        listed = await late.find(RUN)
        assert listed == [record_of(learner_id), syncer]
        assert by_claim(listed)[0] == syncer
        assert await late.find(RunId("cd" * 20)) == []
        newer = dataclasses.replace(syncer, head_seq=Seq(9))
        assert await founder.publish(RUN, newer)
        assert await late.find(RUN) == [newer, record_of(learner_id)]
        began = time.monotonic()
        await founder.close()
        assert time.monotonic() - began < 2
        assert await late.find(RUN) == [record_of(learner_id)]

    run(scenario, tmp_path)


def test_records_survive_the_death_of_the_bootstrap_once_others_hold_them(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        bootstrap = await site.start()
        first_id = Identity.generate()
        first = await site.start(bootstrap.visible_maddrs[0], identity=first_id)
        second = await site.start(bootstrap.visible_maddrs[0])
        assert await first.publish(RUN, record_of(first_id))
        await bootstrap.close()
        assert await second.find(RUN) == [record_of(first_id)]

    run(scenario, tmp_path)


class Impostor:
    """Claims one peer's id and signs with another's key."""

    def __init__(self, claimed: PeerId) -> None:
        self.peer_id = claimed
        self._own = Identity.generate()

    def sign(self, data: bytes) -> str:
        return self._own.sign(data)


def test_a_forged_record_is_taken_by_nobody_and_spoils_nothing(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        bootstrap = await site.start()
        victim_id, other_id = Identity.generate(), Identity.generate()
        other = await site.start(bootstrap.visible_maddrs[0], identity=other_id)
        assert await other.publish(RUN, record_of(other_id))
        forger: Any = await site.start(bootstrap.visible_maddrs[0], identity=Impostor(victim_id.peer_id))
        forged = PeerRecord(**{**dataclasses.asdict(record_of(other_id, "syncer")), "peer": victim_id.peer_id})
        assert not await forger.publish(RUN, forged)
        node = forger._overlay._node  # and now with its own check switched off, so that it serves the forgery itself
        node.protocol.record_validator.validate = lambda record: True
        await forger.publish(RUN, forged)
        assert forged in await forger.find(RUN)
        reader = await site.start(bootstrap.visible_maddrs[0], client_mode=True)
        assert await reader.find(RUN) == [record_of(other_id)]

    run(scenario, tmp_path)


# ---- joining ---------------------------------------------------------------------------------------------------


async def _serve(folder: Path, listen: list[str], ready: asyncio.Future[list[str]]) -> None:
    await run_bootstrap(listen=listen, announce=[], state_dir=folder, on_ready=ready.set_result)


@asynccontextmanager
async def serving(folder: Path, port: int) -> AsyncIterator[str]:
    """A bootstrap for as long as the context lasts; yields its address."""
    ready: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(_serve(folder, [f"/ip4/127.0.0.1/tcp/{port}"], ready))
    try:
        await asyncio.wait((ready, task), return_when=asyncio.FIRST_COMPLETED)
        yield (await ready)[0]
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_bootstrap_keeps_its_address_and_is_found_again_after_it_was_down(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        port = free_port()
        async with serving(tmp_path / "boot", port) as maddr:
            assert f"/ip4/127.0.0.1/tcp/{port}/p2p/Qm" in maddr
        assert (tmp_path / "boot" / "identity.key").stat().st_mode & 0o777 == 0o600
        first_id = Identity.generate()
        joining = asyncio.create_task(site.start(maddr, identity=first_id))
        await wait_until(lambda: bool(site.told), within_s=20)
        assert site.told == [f"no bootstrap answers, trying again: {maddr}: connection refused"]
        async with serving(tmp_path / "boot", port) as again:
            assert again == maddr
            first = await joining
            assert await first.publish(RUN, record_of(first_id))
        assert not await first.publish(RUN, record_of(first_id)), "nobody else is there to take it"
        async with serving(tmp_path / "boot", port):
            assert await first.publish(RUN, record_of(first_id))
            second = await site.start(maddr)
            assert await second.find(RUN) == [record_of(first_id)]

    run(scenario, tmp_path)


def test_one_dead_bootstrap_among_two_costs_nothing_and_is_named(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        bootstrap = await site.start()
        (alive,) = bootstrap.visible_maddrs
        dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{alive.rpartition('/')[2]}"
        await site.start(dead, alive)
        assert site.told[-1].startswith(f"joined through 1 of 2 bootstraps; {dead}: ")

    run(scenario, tmp_path)


def test_a_bootstrap_with_another_identity_is_not_joined(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        bootstrap, other = await site.start(), await site.start()
        (maddr,), (wrong,) = bootstrap.visible_maddrs, other.visible_maddrs
        mixed = maddr.rpartition("/")[0] + "/" + wrong.rpartition("/")[2]
        joining = asyncio.create_task(site.start(mixed))
        await wait_until(lambda: bool(site.told), within_s=20)
        assert site.told[0].startswith("no bootstrap answers") and "peer id" in site.told[0]
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining

    run(scenario, tmp_path)


def test_what_is_wrong_on_this_machine_is_said_at_once(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        bootstrap = await site.start(state_dir=tmp_path / "first")
        (maddr,) = bootstrap.visible_maddrs
        with pytest.raises(DirectoryError, match="address already in use"):
            await site.start(listen=[maddr.rpartition("/p2p/")[0]])
        with pytest.raises(DirectoryError, match=r"not an address of the form .*IDENTITY"):
            await site.start("/ip4/127.0.0.1/tcp/1")
        with pytest.raises(DirectoryError, match="not an address of the form"):
            await site.start(listen=["localhost:31330"])
        with pytest.raises(DirectoryError, match="give the port"):
            await site.start(announce=LOOPBACK)
        with pytest.raises(DirectoryError, match="no address to listen on"):
            await site.start(listen=[])

    run(scenario, tmp_path)


def test_a_name_can_be_announced_and_dialled(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        port = free_port()
        announced = f"/dns4/localhost/tcp/{port}"
        bootstrap = await site.start(listen=[f"/ip4/0.0.0.0/tcp/{port}"], announce=[announced])
        (maddr,) = bootstrap.visible_maddrs
        assert maddr.startswith(f"{announced}/p2p/")
        assert (await site.start(maddr)).num_contacts == 1

    run(scenario, tmp_path)


# ---- processes -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def child(folder: Path, bootstrap: str, *, skew_s: float = 0) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore:`torch.jit:DeprecationWarning",
        "-c",
        CHILD,
        str(folder),
        bootstrap,
        str(skew_s),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def told_by(process: asyncio.subprocess.Process, word: str) -> str:
    """The rest of its next line that begins with `word`."""
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode():
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise AssertionError(f"the child ended before it said {word!r}")


def test_nothing_survives_a_clean_close(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        bootstrap = await site.start()
        async with child(tmp_path / "child", bootstrap.visible_maddrs[0]) as process:
            await told_by(process, "found")
            noted = noted_in(tmp_path / "child")
            assert len(processes_with(noted)) == 2 and Path(noted).name.startswith(FOLDER_PREFIX)
            assert process.stdin is not None
            process.stdin.close()
            began = time.monotonic()
            assert await told_by(process, "closed") == ""
            assert time.monotonic() - began < 1.5
            assert not processes_with(noted), "gone before close returns"
            assert await process.wait() == 0
        assert not (tmp_path / "child" / "p2pd-folder").exists()
        assert await bootstrap.find(RUN) == [], "it said goodbye"

    run(scenario, tmp_path)


def test_no_p2pd_survives_the_sigkill_of_its_owner(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        bootstrap = await site.start()
        async with child(tmp_path / "child", bootstrap.visible_maddrs[0]) as process:
            await told_by(process, "found")
            noted = noted_in(tmp_path / "child")
            assert len(processes_with(noted)) == 2
            process.send_signal(signal.SIGKILL)
            await wait_until(lambda: not processes_with(noted), within_s=3)
            await wait_until(lambda: not os.path.exists(noted), within_s=1)
        again = await site.start(bootstrap.visible_maddrs[0], state_dir=tmp_path / "child")
        assert again.num_contacts >= 1

    run(scenario, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does this")
def test_p2pd_does_not_outlive_a_killed_watchdog_and_is_started_again(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        bootstrap = await site.start()
        peer_id = Identity.generate()
        peer = await site.start(bootstrap.visible_maddrs[0], identity=peer_id, state_dir=tmp_path / "peer")
        p2pd = p2pd_of(tmp_path / "peer")
        watchdog, noted = p2pd.parent(), Path(noted_in(tmp_path / "peer"))
        assert watchdog is not None and watchdog.memory_info().rss < 20e6
        watchdog.kill()
        await wait_until(lambda: not p2pd.is_running(), within_s=3)
        assert await peer.publish(RUN, record_of(peer_id))
        assert await bootstrap.find(RUN) == [record_of(peer_id)]
        assert p2pd_of(tmp_path / "peer").pid != p2pd.pid
        assert noted not in list(noted.parent.iterdir())
        assert "p2pd ended and is started again" in " ".join(site.told)

    run(scenario, tmp_path)


@pytest.mark.parametrize("is_chosen", [True, False], ids=["a port of its own", "any free port"])
def test_a_bootstrap_whose_p2pd_is_killed_comes_back_at_the_same_address(tmp_path: Path, is_chosen: bool) -> None:
    async def scenario(site: Site) -> None:
        async with serving(tmp_path / "boot", free_port() if is_chosen else 0) as maddr:
            killed = p2pd_of(tmp_path / "boot")
            killed.kill()
            await wait_until(lambda: not killed.is_running(), within_s=3)
            assert (await site.start(maddr)).num_contacts == 1

    run(scenario, tmp_path)


def test_the_next_start_sweeps_what_a_power_cut_left(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state")
    left = tmp_path / f"{FOLDER_PREFIX}left"
    left.mkdir()
    (left / "p2pd.sock").touch()
    state.write_note(left)
    script = "import time; print('up', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, f"-listen=/unix{left}/p2pd.sock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stale:
        # Until it has begun to run, its arguments may not be there to be found.
        assert stale.stdout is not None and stale.stdout.readline() == "up\n"
        state.sweep()
        # On a machine that is busy it may not have been scheduled before patience was over.
        assert stale.wait(timeout=2) in (-signal.SIGTERM, -signal.SIGKILL)
    assert not left.exists() and not state.note.exists()
    state.sweep()
    state.release()


def test_a_copied_folder_leaves_the_p2pd_of_its_original_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = StateFolder(tmp_path / "original")
    sockets = tmp_path / f"{FOLDER_PREFIX}at-work"
    sockets.mkdir()
    original.write_note(sockets)
    shutil.copytree(original.path, tmp_path / "copy")
    monkeypatch.setattr("geo_diloco.runtime.p2pd._end_processes", lambda marker: pytest.fail(f"sought {marker!r}"))
    copy = StateFolder(tmp_path / "copy")
    copy.sweep()
    assert sockets.exists() and not copy.note.exists()
    copy.release()
    original.release()


@pytest.mark.parametrize("sockets", [f"/tmp/{FOLDER_PREFIX}left", "/", "", "/home"])
def test_a_torn_note_or_one_of_no_folder_of_ours_sweeps_nothing(
    tmp_path: Path, sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_diloco.runtime.p2pd._end_processes", lambda marker: pytest.fail(f"sought {marker!r}"))
    state = StateFolder(tmp_path / "state")
    state.write_note(Path(sockets))
    whole = state.note.read_text()
    is_ours = FOLDER_PREFIX in sockets
    for size in range(len(whole) if is_ours else len(whole) + 1):
        state.note.write_text(whole[:size])
        state.sweep()
    state.release()


def test_a_state_folder_in_use_is_refused_by_name(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        bootstrap = await site.start()
        async with child(tmp_path / "child", bootstrap.visible_maddrs[0]) as process:
            await told_by(process, "found")
            with pytest.raises(DirectoryError, match=r"child is in use by another process"):
                await site.start(bootstrap.visible_maddrs[0], state_dir=tmp_path / "child")

    run(scenario, tmp_path)


@pytest.mark.parametrize("skew_s", [120, -120])
def test_a_peer_whose_clock_is_two_minutes_wrong_finds_and_is_found(tmp_path: Path, skew_s: float) -> None:
    async def scenario(site: Site) -> None:
        bootstrap = await site.start()
        right_id = Identity.generate()
        right = await site.start(bootstrap.visible_maddrs[0], identity=right_id)
        assert await right.publish(RUN, record_of(right_id))
        async with child(tmp_path / "child", bootstrap.visible_maddrs[0], skew_s=skew_s) as process:
            side = "ahead of" if skew_s > 0 else "behind"
            assert f"clock is 120 s {side} the directory's" in await told_by(process, "status")
            count, wrong_peer = (await told_by(process, "found")).split()
            assert count == "2"
            assert {record.peer for record in await right.find(RUN)} == {right_id.peer_id, wrong_peer}

    run(scenario, tmp_path)
