"""A mixture of experts (Mixtral): the same run with another model family.

    python examples/03_mixture_of_experts.py            # everything on this machine, under a minute
    python examples/03_mixture_of_experts.py INVITE     # what each learner does

Only the manifest differs from `02_dense.py`. Deltas are merged by radial direction, tensor by tensor; transformers 5
keeps all experts of a layer in one tensor, so they share a direction.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import geo_diloco

MANIFEST = Path(__file__).with_name("mixture_of_experts.toml")


def found_and_train(folder: Path, num_learners: int = 2) -> None:
    with geo_diloco.found(MANIFEST, run_dir=folder / "founder") as founder:
        learn = [sys.executable, __file__, founder.invite]
        learners = [subprocess.Popen([*learn, str(folder / f"learner-{i}")]) for i in range(num_learners)]
        founder.wait_finished()
        for learner in learners:
            learner.wait()
        for _, loss, seconds in founder.status()["heldout"]:
            print(f"after {seconds:5.1f} s: held-out loss of Theta {loss:.3f} nats/byte")


def learn(invite: str, run_dir: str | None = None) -> None:
    torch.set_num_threads(1)
    with geo_diloco.join(invite, run_dir=run_dir, threads=1) as peer:
        model = peer.build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=peer.manifest.inner.learning_rate)
        learner = peer.learner(model, optimizer)
        for batch in peer.data():
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if learner.step(tokens=batch.numel(), loss=loss):
                break
        print(f"learner: {learner.num_steps} steps, last local loss {loss.item():.3f} nats/byte")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        learn(*sys.argv[1:3])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            found_and_train(Path(temporary))
