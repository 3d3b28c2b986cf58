"""The paper's central experiment at toy size, and what its models are worth afterwards.

    python examples/study/central.py --minutes 9     # again and again, until it says that nothing is missing
    python examples/study/central.py --list          # the trials, as commands of `geo-diloco simulate train`

Eight learners train under the failures of 1.2 million chips (an interruption a year for each), drawn by `geo-diloco
simulate goodput --write-plan`; `trials.py` says which ways to train, and on how much. Each model that was trained is
exported as `geo-diloco export` does it, loaded again and trained on another task (`finetune.py`). Every finished trial
is a line of `results/central/trials.jsonl`; what is there is not run again. `report.py` makes the tables.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
from errands import Errand, alone, run_errands
from plan import TOKENS_PER_SECOND
from run import RESULTS, loss_in_words
from trials import LEARNERS, REFERENCE, SEQUENCES, SHARES, Trial, all_trials, plan_command

if TYPE_CHECKING:
    from torch import nn

    from geo_diloco.config import FaultPlan
    from geo_diloco.manifest import RunManifest

FILE = Path("central") / "trials.jsonl"
NEEDED = ("key", "trial", "date", "cpu_s", "heldout", "accuracy", "tokens_trained", "virtual_ms", "finetuned")
"""What the tables are made of."""
NUM_POINTS = 10


def read_trials(folder: Path) -> dict[str, dict[str, Any]]:
    """Finished trials by key."""
    path = folder / FILE
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            row = json.loads(line)
            found[row["key"]] = {name: row[name] for name in NEEDED} | row
        except (ValueError, KeyError, TypeError):
            sys.exit(f"{path}, line {number}: no result; a run was cut off there: delete the line and run it again")
    return found


def missing(folder: Path) -> list[Trial]:
    there = read_trials(folder)
    return [trial for trial in all_trials() if trial.key not in there]


def run_trial(trial: Trial) -> dict[str, Any]:
    """In a process of its own: torch has one thread there."""
    from geo_diloco.sim.train.arms import arms_from, base_manifest
    from geo_diloco.sim.train.comparing import run_arm
    from geo_diloco.sim.train.fleet import Fleet, Machine

    began = time.process_time()
    base = base_manifest(
        num_learners=LEARNERS,
        tokens=trial.tokens or 1,
        lockstep=False,
        model=trial.model,
        seconds=trial.seconds or None,
    )
    kind, _, settings = trial.arm.partition(":")
    written = f"{kind}:sequences={SEQUENCES}" + (f",{settings}" if settings else "")
    (arm,) = arms_from([written], base, num_learners=LEARNERS)
    machines = (Machine(step_ms=160, up_mbit=10_000, down_mbit=10_000, delay_ms=1),) * LEARNERS
    models: list[nn.Module] = []
    with tempfile.TemporaryDirectory() as scratch:
        plan, plan_digest = drawn_plan(trial.seed, Path(scratch))
        fleet = Fleet(machines=machines, plan=plan)
        result = run_arm(arm, fleet, trial.seed, num_points=NUM_POINTS, ended=models.append).to_json()
        finetuned = _finetuned(models[0], arm.seeded(trial.seed), Path(scratch), with_untrained=trial.arm == REFERENCE)
    return {
        "key": trial.key,
        "trial": trial.command,
        "plan": " ".join(["geo-diloco", *plan_command(trial.seed), f"plan-{trial.seed}.toml"]),
        "plan_digest": plan_digest,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cpu_s": round(time.process_time() - began, 1),
        **{name: value for name, value in result.items() if name != "wall_s"},
        "finetuned": finetuned,
    }


def drawn_plan(seed: int, scratch: Path) -> tuple[FaultPlan, str]:
    """The plan that the command writes, and the digest of its file."""
    from geo_diloco.config import load_fault_plan

    path = scratch / f"plan-{seed}.toml"
    subprocess.run(
        [sys.executable, "-m", "geo_diloco", *plan_command(seed), str(path)], check=True, capture_output=True
    )
    return load_fault_plan(path, num_learners=LEARNERS), hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _finetuned(model: nn.Module, manifest: RunManifest, scratch: Path, *, with_untrained: bool) -> dict[str, Any]:
    from finetune import finetune

    from geo_diloco.training.models import build_model

    found: dict[str, Any] = {"exported": finetune(exported(model, manifest, scratch / "export"))}
    if with_untrained:
        found["untrained"] = finetune(lambda: build_model(manifest.model, with_weights=True))
    return found


def exported(model: nn.Module, manifest: RunManifest, to: Path) -> Callable[[], nn.Module]:
    """Write what `geo-diloco export` writes; returned is what loads it, as its README says."""
    from geo_diloco.numerics.fragments import gather, layout_from_module, named_trainable
    from geo_diloco.training.checkpoint import export_model
    from geo_diloco.training.models import build_model

    layout = layout_from_module(model, num_fragments=1)
    export_model([gather(named_trainable(model), layout, 0)], layout, manifest, to)

    def load() -> nn.Module:
        if manifest.model.factory is not None:
            from safetensors.torch import load_file

            built = build_model(manifest.model)
            built.load_state_dict(load_file(to / "model.safetensors"))
            return built
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(str(to), local_files_only=True)
        return loaded

    return load


def errand_of(trial: Trial) -> Errand:
    """Under faults less is trained in the same time than without; the fine-tuning is a moment beside it."""
    share = {"decoupled": 0.9, "elastic-data-parallel": 0.55, "data-parallel": 0.23}
    by_time = round(share.get(trial.arm, 1.0) * SHARES[trial.model].tokens)
    budget = "tokens" if trial.tokens else "time"
    return Errand(
        words=f"central {trial.model} {trial.arm} by {budget} seed {trial.seed}",
        tokens=trial.tokens or by_time,
        tokens_per_second=TOKENS_PER_SECOND[trial.model],
        call=run_trial,
        args=(trial,),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="what there is to run")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    given = parser.parse_args()
    if not 1 <= given.jobs <= 64:
        parser.error(f"--jobs {given.jobs}: wanted a number from 1 to 64")
    if not 0 < given.minutes < 1e6:
        parser.error(f"--minutes {given.minutes:g}: wanted a number above 0")
    if given.list:
        there = read_trials(given.results)
        for trial in all_trials():
            print(f"{'done   ' if trial.key in there else 'missing'} {trial.command}")
        return
    try:
        with alone(given.results / FILE) as lines:
            errands = [errand_of(trial) for trial in missing(given.results)]
            failed = run_errands(errands, lines, num_jobs=given.jobs, minutes=given.minutes, told=loss_in_words)
    except KeyboardInterrupt:
        sys.exit(130)
    left = len(missing(given.results))
    print(f"central: {f'{left} trials are missing, start it again' if left else 'nothing is missing'}")
    if failed:
        sys.exit(f"central: {failed} of them FAILED")


if __name__ == "__main__":
    main()
