"""What can be done with a run's folder while nothing runs: replay its tape, export its model."""

from __future__ import annotations

from pathlib import Path

from geo_diloco.config import PeerConfig
from geo_diloco.manifest import FragmentId
from geo_diloco.node.founding import bring_to_head, take_up
from geo_diloco.node.redoing import MergeRedo, Refold, difference_to_chain
from geo_diloco.node.rundir import RunDir, read_manifest
from geo_diloco.tape import ReplayResult
from geo_diloco.tape import replay as replay_tape
from geo_diloco.training.checkpoint import check_export_folder, export_model


def export(run_dir: Path, to: Path) -> Path:
    """Write a founder's or standby's Theta, brought to the head of its chain, as a `save_pretrained` folder.

    Raises RunDirError if the folder is in use or is no founder's, ConfigError if `to` can't be written or is not empty.
    """
    check_export_folder(to)
    parts = take_up(run_dir, PeerConfig(), quiet=True, at_rest=True)
    try:
        bring_to_head(parts)
        theta = [parts.outer.theta(FragmentId(p)) for p in range(parts.layout.num_fragments)]
        return export_model(theta, parts.layout, parts.manifest, to)
    finally:
        parts.log.close()
        parts.chain.close()
        parts.run_dir.release()


def replay(tape: Path) -> ReplayResult:
    """Feed a tape to fresh cores; where it lies in a run's folder, also redo the updates held there, digest by digest,
    and the merges whose contributions were kept.

    Only reads, so the run may be going on. Raises TapeError if the tape can't be read, or if an update can't be redone
    or does not make the state its commit says, RunDirError for a damaged folder.
    """
    folder = RunDir(tape.parent)
    if not (folder.manifest.exists() and folder.chain.exists()):
        return replay_tape(tape)
    manifest = read_manifest(folder)
    refold = Refold(folder, manifest)
    redo = MergeRedo(refold, manifest)
    result = replay_tape(tape, watch=redo.watch if refold.holds_momentum else None)
    result.merges_redone, result.merges_missing = redo.num_redone, redo.num_missing
    if result.divergence is None:
        result.divergence = difference_to_chain(folder, redo.sealed)
    if result.divergence is None:
        result.updates_checked = refold.redo_all()
    return result
