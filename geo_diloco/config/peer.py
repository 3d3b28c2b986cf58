"""This machine's own settings. Nothing here can change what the run agreed on.

Flags win over `GEO_DILOCO_*` environment values, which win over a file; each value remembers where it came from, so
that a mistake is named as the person wrote it.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from platformdirs import user_state_path
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from geo_diloco.config.mistakes import read_toml, sentence
from geo_diloco.config.quantities import AMOUNT_FORM, RATE_FORM, bytes_per_day, bytes_per_s
from geo_diloco.errors import ConfigError

ENVIRONMENT_PREFIX = "GEO_DILOCO_"
CONFIG_FILE_VARIABLE = "GEO_DILOCO_CONFIG"
"""Names a TOML file of settings, like `--config`."""

_ListenAddress = Annotated[str, Field(pattern=r"^[^\s/]+$", description="an address of this machine to listen on")]
_BOOTSTRAP = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/tcp/\d{1,5}/p2p/[1-9A-HJ-NP-Za-km-z]{40,70}")
BOOTSTRAPS_MAX = 15
"""An invite has room for 16, and one of them is the founder's own."""
_CONTACT = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(\d{1,5})")
CONTACTS_MAX = 16
CONTACT_FORM = "HOST:PORT of a peer's HTTP side, such as 192.0.2.7:31340"
_Port = Annotated[int, Field(ge=0, le=65535)]


NO_LIMIT = "none"


def _read_rate(said: object) -> object:
    return 0 if said == NO_LIMIT else bytes_per_s(said) if isinstance(said, str) else said


def _read_amount(said: object) -> object:
    return 0 if said == NO_LIMIT else bytes_per_day(said) if isinstance(said, str) else said


_Rate = Annotated[int, BeforeValidator(_read_rate), Field(ge=0, description=RATE_FORM)]
_Amount = Annotated[int, BeforeValidator(_read_amount), Field(ge=0, description=AMOUNT_FORM)]


class PeerConfig(BaseModel):
    """This machine's business; nothing in it can change what the run agreed on."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    run_dir: Path | None = None
    """Where this peer keeps its files; by default a folder per run among this user's state."""
    host: _ListenAddress = "127.0.0.1"
    port: _Port = 31340
    """TCP port of the HTTP side; 0 takes any free one."""
    announce: Annotated[
        str,
        Field(
            pattern=r"^$|^([^\s:/\[\]]+|\[[0-9A-Fa-f:]+\])(:\d{1,5})?$",
            description="HOST or HOST:PORT, as others reach this machine",
        ),
    ] = ""
    bootstraps: Annotated[
        tuple[str, ...],
        Field(description=f"up to {BOOTSTRAPS_MAX} multiaddresses such as /ip4/192.0.2.1/tcp/31330/p2p/Qm..."),
    ] = ()
    """Where the directory can be reached; a learner's come with its invite."""
    contacts: Annotated[tuple[str, ...], Field(description=f"up to {CONTACTS_MAX} of the form {CONTACT_FORM}")] = ()
    """Peers of the run that may be asked for the way into it where no bootstrap answers, besides those that are known
    here from an earlier time."""
    dht_host: _ListenAddress = "127.0.0.1"
    """Of the DHT side; `load_peer_config` takes `host` unless it is told otherwise."""
    dht_port: _Port = 0
    """TCP port of the DHT side; 0 takes any free one."""
    device: Annotated[
        str,
        Field(pattern=r"^(auto|cpu|mps|cuda(:\d{1,3})?)$", description='"auto", "cpu", "cuda", "cuda:N" or "mps"'),
    ] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; weights stay float32."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Of torch; 0 leaves it to torch."""
    data_dir: Path | None = None
    """Reads the training data from here instead of the manifest's source."""
    save_every_s: Annotated[float, Field(ge=0.5, le=86400)] = 10.0
    """Seconds between a learner's checkpoints."""
    pace_ms: Annotated[int, Field(ge=0, le=3_600_000)] = 0
    """An inner step takes at least so long: for benchmarks, in place of compute; `--pace`. 0 is no limit."""
    elector: bool = True
    """Let this disk guard the chain and vote on who serves, if the syncer wants so."""
    keep_contributions: bool = False
    """While syncer: keep the contributions of its commits, so that a replay can redo the merges."""
    max_up: _Rate = 0
    """Bulk that this machine sends, in bytes per second; written as `10mbit` or `1.2MB/s`. 0, `none`: no limit."""
    max_down: _Rate = 0
    """The same, of what it receives."""
    quota: _Amount = 0
    """Bytes of bulk a day, both directions together, after which this peer is no mirror until midnight UTC; written as
    `50GB/day`. 0 is no limit."""
    mirror: bool = True
    """Serve updates and snapshots to others, if they can reach this machine."""
    congestion: Literal["auto", "bbr", "cubic", "system"] = "auto"
    """Congestion control of this machine's connections; `auto` is BBR where the kernel offers it."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("run_dir", "data_dir", mode="after")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        if path is None:
            return None
        expanded = Path(os.path.expanduser(path))
        if str(expanded).startswith("~"):
            raise ValueError("nobody's home")
        return expanded

    @field_validator("announce", mode="after")
    @classmethod
    def _has_a_port_if_any(cls, announce: str) -> str:
        port = re.search(r":(\d{1,5})$", announce)
        if port is not None and not 0 < int(port[1]) < 65536:
            raise ValueError("no such port")
        return announce

    @field_validator("bootstraps", "contacts", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("bootstraps", mode="after")
    @classmethod
    def _are_multiaddresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        if len(addresses) > BOOTSTRAPS_MAX or not all(_BOOTSTRAP.fullmatch(address) for address in addresses):
            raise ValueError("not the multiaddresses of bootstraps")
        return addresses

    @field_validator("contacts", mode="after")
    @classmethod
    def _are_addresses(cls, contacts: tuple[str, ...]) -> tuple[str, ...]:
        if len(contacts) > CONTACTS_MAX or not all(map(_is_contact, contacts)):
            raise ValueError("not the addresses of peers")
        return contacts


_FLAG_NAMES = {"bootstraps": "--bootstrap", "contacts": "--contact", "pace_ms": "--pace"}


def load_peer_config(
    flags: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
    file: Path | None = None,
    flag_names: Mapping[str, str] = _FLAG_NAMES,
) -> PeerConfig:
    """The settings of this process. `flags`, by field name, are those that were given, or None; `flag_names` says how
    a person wrote them where it is not as one would think.

    Raises ConfigError.
    """
    if file is None and environment.get(CONFIG_FILE_VARIABLE):
        file = Path(environment[CONFIG_FILE_VARIABLE])
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if file is not None:
        values = read_toml(file, ConfigError)
        origins = {key: f"{file}: {key}" for key in values}
    for variable, text in sorted(environment.items()):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable != CONFIG_FILE_VARIABLE and text:
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            values[key], origins[key] = text, variable
    for key, value in flags.items():
        if value is not None:
            values[key], origins[key] = value, flag_names.get(key, f"--{key.replace('_', '-')}")
    if "host" in values:
        values.setdefault("dht_host", values["host"])
    try:
        return PeerConfig.model_validate(values)
    except ValidationError as exc:
        raise ConfigError(sentence(exc, PeerConfig, origins=origins)) from exc


def peer_config_from(settings: Mapping[str, Any]) -> PeerConfig:
    """The settings that a script gave as keyword arguments; it alone speaks, no environment. Raises ConfigError."""
    given = {key: value for key, value in settings.items() if value is not None}
    return load_peer_config(given, environment={}, flag_names={key: key for key in given})


def checked_contacts(contacts: Sequence[str] | None) -> tuple[str, ...]:
    """What was given as `--contact` beside an invite. Raises ConfigError."""
    return load_peer_config({"contacts": tuple(contacts or ())}, environment={}).contacts


def _is_contact(address: str) -> bool:
    form = _CONTACT.fullmatch(address)
    return form is not None and 0 < int(form[1]) < 65536


def split_announce(announce: str) -> tuple[str, int]:
    """Host, without brackets, and port of HOST or HOST:PORT; 0 if there is none."""
    host, colon, port = announce.rpartition(":")
    if not colon or (announce.startswith("[") and announce.endswith("]")):
        return announce.strip("[]"), 0
    return host.strip("[]"), int(port)


def state_root() -> Path:
    """Where this user's runs, demos and bootstrap identity are kept. Raises ConfigError for a user without a home."""
    root = user_state_path("geo_diloco")
    if root.parts[0].startswith("~"):  # it would become a folder named "~" in whichever folder this is
        raise ConfigError(
            "HOME is not set, and this user has none: set it or XDG_STATE_HOME, or name each folder by flag"
        )
    return root


def is_loopback(address: str) -> bool:
    """Whether a host, `host:port` or multiaddress stays on this machine. A name that isn't known to counts as not."""
    parts = address.split("/")
    host = parts[2] if address.startswith("/") and len(parts) > 2 else address
    if host.count(":") == 1:
        host = host.partition(":")[0]
    elif host.startswith("["):
        host = host[1:].partition("]")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
