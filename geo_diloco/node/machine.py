"""What this machine is called, and what it computes on."""

from __future__ import annotations

import hashlib
import platform
import socket
import uuid
from contextlib import suppress
from pathlib import Path

import torch

from geo_diloco.errors import ConfigError
from geo_diloco.manifest import RunId
from geo_diloco.protocol.seat import HelloFacts


def hello_facts(
    address: str = "", device: torch.device | None = None, *, pace_ms: int = 0, limits: str = ""
) -> HelloFacts:
    """Said to the syncer, for `status`. Whose inner steps are drawn out to `pace_ms` says so, and who holds back its
    line."""
    from geo_diloco import __version__

    name = socket.gethostname()[:64]
    host = name if device is None else f"{name} ({device})"
    host += f", paced to {pace_ms} ms a step" if pace_ms else ""
    host += f", {limits}" if limits else ""
    software = f"geo_diloco {__version__}, torch {torch.__version__}, {platform.system()}"
    return HelloFacts(host=host, software=software, address=address)


def machine_name(run: RunId) -> str:
    """What tells this machine from others inside one run, and nothing outside it: 16 hex characters."""
    card = uuid.getnode()
    is_random = bool(card >> 40 & 1)  # it found no network card and made one up, for this process alone
    facts = [run, socket.gethostname(), "" if is_random else f"{card:x}"]
    with suppress(OSError, UnicodeDecodeError):
        facts.append(Path("/etc/machine-id").read_text("ascii").strip())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def pick_device(wanted: str) -> torch.device:
    """`auto` takes an accelerator if there is one. Raises ConfigError for one that is not there."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {wanted}: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"--device {wanted}: not available on this machine")
    return device


def pick_dtype(wanted: str) -> torch.dtype:
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32
