"""What others build on: public names, commands and their flags. A change here is meant, and goes into CHANGELOG.md."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import geo_diloco
from geo_diloco.cli.app import app

PUBLIC_NAMES = [
    "GeoDilocoError",
    "Invite",
    "Learner",
    "Peer",
    "PeerConfig",
    "RunManifest",
    "fetch_status",
    "found",
    "join",
    "load_manifest",
    "model_factory",
]

PEER_FLAGS = [
    *("--announce", "--bootstrap", "--config", "--dht-host", "--dht-port", "--host", "--log-level", "--port"),
    *("--congestion", "--max-down", "--max-up", "--mirror", "--quota"),
]
COMMANDS: dict[str, list[str]] = {
    "demo": ["--chaos", "--json", "--learners", "--minutes", "--plain", "--run-dir"],
    "bootstrap": ["--announce", "--host", "--json", "--port", "--state-dir"],
    "init": ["--force"],
    "start": sorted([*PEER_FLAGS, "--data-dir", "--json", "--keep-contributions", "--run-dir", "--threads"]),
    "join": sorted(
        [
            *PEER_FLAGS,
            "--data-dir",
            "--device",
            "--dtype",
            "--elector",
            "--contact",
            "--keep-contributions",
            "--no-train",
            "--pace",
            "--run-dir",
            "--save-every-s",
            "--threads",
        ]
    ),
    "status": ["--contact", "--json"],
    "handover": ["--to"],
    "amend": ["--contact", "--key", "--set", "--wait"],
    "reform": ["--contact", "--dry-run", "--electors", "--force", "--key", "--yes"],
    "export": ["--to"],
    "replay": ["--json"],
    "bench": [],
    "simulate": [],
}
SIMULATE_TRAIN = sorted(
    [
        *("--arm", "--model", "--learners", "--speeds", "--step-ms", "--up", "--down", "--delay-ms"),
        *("--tokens", "--seconds", "--seed", "--seeds", "--faults", "--lockstep", "--json"),
        *("--add-at", "--out", "--plot"),
    ]
)
SIMULATE_PROTOCOL = ["--hosts", "--jobs", "--json", "--scenario", "--seconds", "--seed", "--seeds"]


def _group() -> Any:
    return typer.main.get_command(app)


def test_public_names_are_these() -> None:
    assert geo_diloco.__all__ == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(geo_diloco, name).__doc__


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'leader'"):
        _ = geo_diloco.leader


def test_importing_the_package_costs_no_heavy_library() -> None:
    code = "import sys, json, geo_diloco; print(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(ran.stdout))
    assert not loaded & {"torch", "hivemind", "transformers", "pydantic", "aiohttp", "numpy", "typer"}


def test_commands_are_these() -> None:
    assert _group().list_commands(None) == list(COMMANDS)


def _flags(command: Any) -> list[str]:
    options = [option for parameter in command.params for option in parameter.opts]
    return sorted(option for option in options if option.startswith("--") and option != "--help")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("bench", "simulate")])
def test_flags_of_each_command_are_these(command: str) -> None:
    assert _flags(_group().get_command(None, command)) == COMMANDS[command]


@pytest.mark.parametrize(("simulator", "flags"), [("train", SIMULATE_TRAIN), ("protocol", SIMULATE_PROTOCOL)])
def test_flags_of_the_simulators_are_these(simulator: str, flags: list[str]) -> None:
    assert _flags(_group().get_command(None, "simulate").get_command(None, simulator)) == flags


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0, result.output
    assert f"geo-diloco {command}" in result.output or "Usage: root" in result.output


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"  {command} " in result.output
