"""The directory on hivemind's DHT; the one home of hivemind.

`DHTNode` runs in our own event loop: `hivemind.DHT` would fork a process, block without a time limit and hang for
ever if that process died. p2pd is started by `p2pd.py` and handed to hivemind by its control socket. hivemind is
imported on first use, in a thread: it brings torch and takes seconds. Of it only what a DHT needs is imported, for its
averaging, experts and optimizers take as long again. What its import changes in the whole process (torch's way to share
tensors, the name of a log level) is put back, for the training script beside us relies on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from geo_diloco.errors import DirectoryError
from geo_diloco.runtime import records
from geo_diloco.runtime.directory import DirectoryRules, Found, Greeting, OnStatus
from geo_diloco.runtime.identity import Identity, verify
from geo_diloco.runtime.p2pd import Daemon, DaemonOptions, StateFolder, unusable
from geo_diloco.runtime.records import PeerRecord, by_claim, maddr_of

__all__ = ["Directory", "PeerRecord", "by_claim", "maddr_of"]

WAIT_S = 8.0
"""Longest time for one question to one DHT peer. hivemind's own 3 s lose most joins on a long, lossy link."""
SHUT_S = 0.3
"""Longest time for hivemind's own goodbye to p2pd, which ends right after it."""
_MALFORMED: tuple[type[Exception], ...] = (
    importlib.import_module("google.protobuf.message").Error,
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
)
"""How hivemind fails on an answer that is not what it should be."""


class Directory(DirectoryRules):
    """One peer's place in the DHT; `start` is the way in."""

    @classmethod
    async def start(
        cls,
        *,
        initial_peers: Sequence[str],
        listen: Sequence[str],
        announce: Sequence[str] = (),
        identity_path: Path | None = None,
        identity: Identity | None = None,
        client_mode: bool = False,
        state_dir: Path,
        on_status: OnStatus | None = None,
    ) -> Directory:
        """Begins to join through any of `initial_peers` (multiaddrs ending in /p2p/...), trying until one answers;
        whoever needs that waits for it (`wait_joined`).

        `identity` signs what is published; `identity_path` keeps the libp2p identity, created if missing. Without
        `initial_peers` this is the first peer of a new DHT. `state_dir` belongs to this directory alone. Raises
        DirectoryError if p2pd can't be started here or an address can't be read.
        """
        home = await asyncio.to_thread(_import_hivemind)
        _check_maddrs(initial_peers=initial_peers, listen=listen, announce=announce)
        if identity_path is not None:
            try:
                await asyncio.to_thread(_create_identity, identity_path)
            except OSError as error:
                raise unusable(identity_path.parent, error) from error
        options = DaemonOptions(
            binary=home / "hivemind_cli" / "p2pd",
            listen=tuple(listen),
            announce=tuple(announce),
            identity_path=identity_path,
            client_mode=client_mode,
        )
        self = cls(
            HivemindOverlay(options, StateFolder(state_dir), identity),
            bootstraps=initial_peers,
            peer=identity.peer_id if identity is not None else None,
            as_client=client_mode,
            on_status=on_status or (lambda _: None),
        )
        try:
            await self.begin()
        except BaseException:
            await self.close()
            raise
        return self


class HivemindOverlay:
    """hivemind's DHTNode on a p2pd of our own."""

    def __init__(self, options: DaemonOptions, state: StateFolder, identity: Identity | None) -> None:
        self._options = options
        self._listen = options.listen
        """Where it listens from the next start of p2pd on: at the ports that it was given by the first."""
        self._state = state
        self._validator = _validator(identity)
        self._daemon: Daemon | None = None
        self._p2p: Any = None
        self._node: Any = None
        self._is_client = options.client_mode
        self._visible: list[str] = []

    @property
    def is_alive(self) -> bool:
        return self._node is not None and self._daemon is not None and self._daemon.is_alive

    @property
    def num_contacts(self) -> int:
        return len(self._node.protocol.routing_table.uid_to_peer_id) if self._node is not None else 0

    @property
    def visible_maddrs(self) -> list[str]:
        return list(self._visible)

    def last_words(self) -> str:
        return self._daemon.last_words() if self._daemon is not None else ""

    async def wait_ended(self) -> None:
        if self._daemon is not None:
            await self._daemon.wait_ended()

    def time(self) -> float:
        from hivemind.utils import timed_storage

        return float(timed_storage.get_dht_time())

    def shift_time(self, seconds: float) -> None:
        """For all of this process."""
        from hivemind.utils import timed_storage

        clock = timed_storage.get_dht_time
        _set_clock(lambda: float(clock()) + seconds)

    async def open(self, *, as_client: bool) -> None:
        from hivemind.p2p import P2P
        from hivemind.utils.multiaddr import Multiaddr

        await self._shut()
        await asyncio.to_thread(self._state.sweep)
        self._is_client = as_client
        self._daemon = await self._start_daemon()
        async with _translated():
            self._p2p = await P2P.replicate(Multiaddr(self._daemon.socket))
            visible = [str(maddr) for maddr in await self._p2p.get_visible_maddrs()]
            self._visible = sorted(visible, key=lambda maddr: maddr.startswith(("/ip4/127.", "/ip6/::1/")))
            self._listen = tuple(_at_port_of(self._visible, maddr) for maddr in self._listen)
            self._node = await self._create_node()

    async def _start_daemon(self) -> Daemon:
        """Where it was before, which is what others know; if that is somebody else's by now, where it may be."""
        again = dataclasses.replace(self._options, listen=self._listen)
        try:
            return await Daemon.start(again, self._state)
        except DirectoryError:
            if again == self._options:
                raise
        self._listen = self._options.listen
        return await Daemon.start(self._options, self._state)

    async def become_client(self) -> None:
        self._is_client = True
        async with _translated():
            await self._node.shutdown()
            self._node = await self._create_node()

    async def greet(self, maddr: str) -> Greeting:
        from hivemind.dht.routing import DHTID
        from hivemind.p2p import PeerID
        from hivemind.proto import dht_pb2
        from hivemind.utils.multiaddr import Multiaddr

        await _probe(maddr)
        protocol = self._node.protocol
        async with _translated():
            address, peer = Multiaddr(maddr), Multiaddr(maddr)["p2p"]
            peer_id = PeerID.from_base58(peer)
            if peer_id == self._p2p.peer_id:
                raise DirectoryError("is this peer itself")
            await self._p2p._client.connect(peer_id, [address.decapsulate(Multiaddr(f"/p2p/{peer}"))])
            asked = self.time()
            request = dht_pb2.PingRequest(peer=protocol.node_info, validate=True)
            answer = await protocol.get_stub(peer_id).rpc_ping(request, timeout=WAIT_S)
            clock_s = answer.dht_time - (asked + self.time()) / 2
            if not answer.peer.node_id:
                raise DirectoryError("is a client of the directory, not a bootstrap")
            await protocol.update_routing_table(DHTID.from_bytes(answer.peer.node_id), peer_id, responded=True)
        return Greeting(sees_us=answer.available, clock_s=clock_s)

    async def settle(self) -> None:
        async with _translated():
            await self._node.find_nearest_nodes([self._node.node_id])

    async def store(self, key: str, body: bytes, expiration: float, *, subkey: str) -> bool:
        async with _translated():
            return bool(await self._node.store(key, body, expiration, subkey=subkey))

    async def get(self, key: str) -> list[Found]:
        async with _translated():
            found = await self._node.get(key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return []
        return [
            Found(subkey=subkey, body=item.value, expiration=item.expiration_time)
            for subkey, item in found.value.items()
        ]

    async def close(self) -> None:
        try:
            await self._shut()
        finally:
            self._state.release()

    async def _create_node(self) -> Any:
        from hivemind.dht import DHTNode

        return await DHTNode.create(
            p2p=self._p2p,
            client_mode=self._is_client,
            wait_timeout=WAIT_S,
            record_validator=self._validator,
            cache_locally=False,
            cache_refresh_before_expiry=0,
        )

    async def _shut(self) -> None:
        node, p2p, daemon = self._node, self._p2p, self._daemon
        self._node = self._p2p = self._daemon = None
        try:
            with contextlib.suppress(TimeoutError, DirectoryError):
                async with asyncio.timeout(SHUT_S), _translated():
                    if node is not None and daemon is not None and daemon.is_alive:
                        await node.shutdown()
                    if p2p is not None:
                        await p2p.shutdown()
        finally:
            if daemon is not None:
                await daemon.close()


def _at_port_of(visible: Sequence[str], listen: str) -> str:
    """`listen`, if the system was to choose its port, with the one that it chose."""
    ports = [target[1] for maddr in visible if (target := records.tcp_of_maddr(maddr)) is not None]
    return f"{listen.removesuffix('0')}{ports[0]}" if listen.endswith("/tcp/0") and ports else listen


def load_library() -> None:
    """Import what `Directory.start` needs. It takes seconds on a busy machine, and who calls this from the main thread
    can be interrupted in them; a thread of a pool, where it happens otherwise, is waited for."""
    _import_hivemind()


def _import_hivemind() -> Path:
    """Returns its folder."""
    import torch.multiprocessing as sharing

    strategy = sharing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    hivemind = package_alone("hivemind")
    importlib.import_module("hivemind.dht")
    timed_storage = importlib.import_module("hivemind.utils.timed_storage")
    if timed_storage.get_dht_time is time.time:
        _set_clock(_steady_clock())
    sharing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    logging.addLevelName(logging.WARNING, "WARNING")
    if "HIVEMIND_LOGLEVEL" not in os.environ:
        logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    return Path(str(hivemind.__file__)).parent


def _steady_clock() -> Callable[[], float]:
    """The wall's clock as of now, and from here on one that nobody sets: others would not believe the records of a
    machine whose clock was set by ten minutes, and keep the ones that it made before."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    began = time.time() - time.clock_gettime(clock)
    return lambda: began + time.clock_gettime(clock)


def _set_clock(clock: Callable[[], float]) -> None:
    """hivemind's clock is a function whose name several of its modules hold."""
    for name in ("utils.timed_storage", "utils", "dht.routing", "dht.node", "dht.protocol"):
        module: Any = importlib.import_module(f"hivemind.{name}")
        module.get_dht_time = clock


class _Unread(ModuleType):
    """A package whose `__init__` is run when somebody asks for a name that it would define.

    As `importlib.util.LazyLoader` has it, which is of no use for a package: it reads it at the first submodule.
    """

    def __getattr__(self, name: str) -> Any:
        is_being_imported = f"{self.__name__}.{name}" in sys.modules
        if is_being_imported or (name.startswith("__") and name not in ("__all__", "__version__")):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def package_alone(name: str) -> ModuleType:
    """A package without what its `__init__` imports; a script that also uses it finds it whole."""
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        package = importlib.util.module_from_spec(spec)
        package.__class__ = _Unread
        sys.modules[name] = package
    return sys.modules[name]


def _validator(identity: Identity | None) -> Any:
    """The check on records that every participant passes to hivemind. Without an identity it can't sign."""
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase

    class SignedByItsPeer(RecordValidatorBase):  # type: ignore[misc]
        def validate(self, record: DHTRecord) -> bool:
            return not records.refusal(record.key, record.subkey, record.value, record.expiration_time, verify=verify)

        def sign_value(self, record: DHTRecord) -> bytes:
            if identity is None:
                return bytes(record.value)
            return records.sign_value(
                record.key, record.subkey, record.value, record.expiration_time, sign=identity.sign
            )

        def strip_value(self, record: DHTRecord) -> bytes:
            return records.strip_value(record.value)

    return SignedByItsPeer()


@contextlib.asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """What hivemind raises, its talk with p2pd included, as DirectoryError; TimeoutError stays what it is."""
    from hivemind.p2p import P2PDaemonError, P2PHandlerError

    try:
        yield
    except TimeoutError:
        raise
    except (P2PDaemonError, P2PHandlerError, *_MALFORMED, OSError, EOFError, RuntimeError) as error:
        raise DirectoryError(" ".join(str(error).split())[:300] or type(error).__name__) from error


def _create_identity(path: Path) -> None:
    """A libp2p private key, readable by its owner only, if there is none yet."""
    from hivemind.proto import crypto_pb2
    from hivemind.utils.crypto import RSAPrivateKey

    if path.exists():
        return
    key = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=RSAPrivateKey().to_bytes())
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.SerializeToString())
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _check_maddrs(*, initial_peers: Sequence[str], listen: Sequence[str], announce: Sequence[str]) -> None:
    """Raises DirectoryError that names the first address that can't be used."""
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    if not listen:
        raise DirectoryError("no address to listen on; use for example /ip4/127.0.0.1/tcp/0")
    for maddr in (*initial_peers, *listen, *announce):
        needs_identity = maddr in initial_peers
        try:
            parsed = Multiaddr(maddr)
            if needs_identity:
                PeerID.from_base58(parsed["p2p"])
        except (ValueError, LookupError) as error:
            wanted = "/ip4/ADDRESS/tcp/PORT" + ("/p2p/IDENTITY" if needs_identity else "")
            raise DirectoryError(f"{maddr!r} is not an address of the form {wanted}") from error
        if maddr in announce and maddr.endswith("/tcp/0"):
            raise DirectoryError(f"{maddr!r} can't be announced: give the port that others can reach")


async def _probe(maddr: str) -> None:
    """Opens and closes a TCP connection: the plainest reason why a bootstrap can't be reached.

    It also keeps libp2p from dialling in vain, for which it would wait longer and longer before it dials again.
    """
    target = records.tcp_of_maddr(maddr)
    if target is not None:
        _, writer = await asyncio.open_connection(*target)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
