"""Where a run is asked how it is: first where its syncer most likely is, and in the directory only after that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.errors import ConfigError, DirectoryError
from geo_diloco.manifest import RunManifest
from geo_diloco.node import asking
from geo_diloco.node.rundir import RunDir, default_root
from geo_diloco.runtime.contacts import Contacts, write_contacts
from geo_diloco.runtime.dht import Directory
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.store import BlobStore
from tests.unit.runtime.samples import RUN, RememberingPort, served

LOCAL = Invite(run=RUN, bootstraps=("/ip4/127.0.0.1/tcp/1/p2p/Qm1",))


@pytest.fixture(autouse=True)
def _own_state_and_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    async def start(**settings: Any) -> None:
        raise DirectoryError("the directory is asked")

    monkeypatch.setattr(Directory, "start", start)


def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[RememberingPort], None]) -> dict[str, Any]:
    """Of a run whose syncer listens at the default port of the invite's machine."""

    async def go() -> dict[str, Any]:
        async with served(BlobStore(tmp_path / "blobs")) as it:
            change(it.port)
            monkeypatch.setattr(asking, "DEFAULT_HTTP_PORT", int(it.url.rpartition(":")[2]))
            return await asyncio.to_thread(asking.fetch_status, LOCAL)

    return asyncio.run(go())


def test_a_syncer_at_the_default_port_of_an_invites_machine_is_asked_without_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(tmp_path, monkeypatch, lambda port: None)["role"] == "syncer"


@pytest.mark.parametrize(
    "change", [{"role": "follower"}, {"manifest": RunManifest(nonce="11" * 16).canonical_bytes()}], ids=str
)
def test_who_does_not_serve_that_run_is_no_answer(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DirectoryError, match="the directory is asked"):
        ask(tmp_path, monkeypatch, lambda port: [setattr(port, key, value) for key, value in change.items()] and None)


def test_who_says_nothing_is_waited_for_only_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LIKELY_S", 0.05)

    async def go() -> None:
        gone = asyncio.Event()

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            gone.set()

        listener = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        monkeypatch.setattr(asking, "DEFAULT_HTTP_PORT", listener.sockets[0].getsockname()[1])
        with pytest.raises(DirectoryError, match="the directory is asked"):
            await asyncio.to_thread(asking.fetch_status, LOCAL)
        async with asyncio.timeout(10):
            await gone.wait()
        listener.close()

    asyncio.run(go())


def test_likely_places_are_the_own_founder_and_the_default_port_of_the_invites_machines() -> None:
    maddrs = ("/dns4/b.example/tcp/31330/p2p/Qm1", "/ip6/::2/tcp/4/p2p/Qm2", "/dns4/b.example/tcp/5/p2p/Qm3")
    invite = Invite(run=RUN, bootstraps=maddrs)
    assert asking.likely_urls(invite, Contacts()) == ["http://b.example:31340", "http://[::2]:31340"]
    root = default_root(RUN)
    root.mkdir(parents=True)
    (root / "ports.json").write_text(json.dumps({"http": 7, "dht": 8, "host": "0.0.0.0"}))
    assert asking.likely_urls(invite, Contacts())[0] == "http://127.0.0.1:7"
    known = Contacts(("c.example:9",))
    assert asking.likely_urls(invite, known)[:2] == ["http://c.example:9", "http://127.0.0.1:7"]


def ask_through(tmp_path: Path, *ports: RememberingPort, names_next: bool = False) -> dict[str, Any]:
    """Of a run that has these peers, of which the first is given as contact. `names_next`: as its syncer, the last."""

    async def go() -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            urls = []
            for number, port in enumerate(ports):
                store = BlobStore(tmp_path / f"blobs-{number}")
                urls.append((await stack.enter_async_context(served(store, port))).url.removeprefix("http://"))
            if names_next:
                ports[0].more_status["election"] = {"syncer": ["ab" * 32, urls[-1]], "offers": [{"address": 7}, None]}
            return await asyncio.to_thread(asking.fetch_status, LOCAL, [urls[0]])

    return asyncio.run(go())


def test_a_contact_is_asked_without_a_directory(tmp_path: Path) -> None:
    assert ask_through(tmp_path, RememberingPort())["role"] == "syncer"


def test_whom_a_contact_names_as_syncer_is_asked(tmp_path: Path) -> None:
    assert (
        ask_through(tmp_path, RememberingPort(role="standby"), RememberingPort(), names_next=True)["role"] == "syncer"
    )


def test_contacts_that_peers_of_this_machine_have_kept_are_asked(tmp_path: Path) -> None:
    async def go() -> dict[str, Any]:
        async with served(BlobStore(tmp_path / "blobs")) as it:
            folder = RunDir(default_root(RUN))
            folder.root.mkdir(parents=True)
            write_contacts(folder.contacts, Contacts((it.url.removeprefix("http://"),)))
            return await asyncio.to_thread(asking.fetch_status, LOCAL)

    assert asyncio.run(go())["role"] == "syncer"


def test_damaged_contacts_are_no_contacts() -> None:
    folder = RunDir(default_root(RUN))
    folder.root.mkdir(parents=True)
    folder.contacts.write_bytes(b"\0")
    assert asking.known_contacts(RUN, ("a.example:1",)) == Contacts(("a.example:1",))


def test_where_no_bootstrap_answers_a_standby_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "WITH_STANDBY_S", 0.05)

    class Shut:
        def learn(self, maddrs: object) -> None: ...
        async def close(self) -> None: ...
        async def wait_joined(self) -> None:
            await asyncio.Event().wait()

    async def start(**settings: Any) -> Shut:
        return Shut()

    monkeypatch.setattr(Directory, "start", start)
    assert ask_through(tmp_path, RememberingPort(role="standby"))["role"] == "standby"
    monkeypatch.setattr(asking, "LIMIT_S", 0.05)
    with pytest.raises(DirectoryError, match=r"no bootstrap has answered yet; --contact HOST:PORT names a peer"):
        asking.fetch_status(LOCAL)


def test_a_contact_that_is_no_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--contact = \[\"a.example\"\]; allowed is up to 16 of the form HOST:PORT"):
        asking.fetch_status(LOCAL, ["a.example"])
