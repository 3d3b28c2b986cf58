"""`--help` is for people in a hurry, and must not load what trains."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HELP_S_MAX = 0.5
COMMANDS = [
    *("", "demo", "bootstrap", "init", "start", "join", "status", "export", "replay", "bench"),
    *("simulate", "simulate train", "simulate protocol"),
]
HEAVY = ("torch", "hivemind", "transformers", "aiohttp", "numpy", "rich.live")
CODE = """
import sys
sys.argv = ["geo-diloco", *{arguments!r}]
from geo_diloco.cli.app import main
try:
    main()
except SystemExit as exc:
    assert not exc.code, exc.code
print("LOADED", *[name for name in {heavy!r} if name in sys.modules])
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_nothing_heavy(command: str) -> None:
    arguments = [*command.split(), "--help"]
    code = CODE.format(arguments=arguments, heavy=HEAVY)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1].split() == ["LOADED"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_quick(command: str) -> None:
    """Best of three, in processor seconds: on an idle machine they are what a person waits, on a busy one they stay."""
    arguments = [*command.split(), "--help"]
    times = []
    for _ in range(3):
        began = _processor_s_of_children()
        subprocess.run([sys.executable, "-m", "geo_diloco", *arguments], capture_output=True, check=True)
        times.append(_processor_s_of_children() - began)
        if times[-1] < HELP_S_MAX:
            break
    assert min(times) < HELP_S_MAX, times


def _processor_s_of_children() -> float:
    used = os.times()
    return used.children_user + used.children_system
