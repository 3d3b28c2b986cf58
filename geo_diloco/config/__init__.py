"""What people write, checked once: run manifests, and this machine's settings. Pydantic reads no file elsewhere."""

from __future__ import annotations

from geo_diloco.config.faults import Fault, FaultPlan, fault_plan_text, load_fault_plan
from geo_diloco.config.fleets import FleetFile, FleetMachine, load_fleet
from geo_diloco.config.manifests import (
    changed_manifest,
    load_manifest,
    manifest_from_bytes,
    manifest_from_toml,
    manifest_template,
)
from geo_diloco.config.peer import (
    PeerConfig,
    checked_contacts,
    is_loopback,
    load_peer_config,
    peer_config_from,
    split_announce,
    state_root,
)

__all__ = [
    "Fault",
    "FaultPlan",
    "FleetFile",
    "FleetMachine",
    "PeerConfig",
    "changed_manifest",
    "checked_contacts",
    "fault_plan_text",
    "is_loopback",
    "load_fault_plan",
    "load_fleet",
    "load_manifest",
    "load_peer_config",
    "manifest_from_bytes",
    "manifest_from_toml",
    "manifest_template",
    "peer_config_from",
    "split_announce",
    "state_root",
]
