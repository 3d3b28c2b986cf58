"""A dense language model: found a run here, train it with two learners, see Theta's held-out loss fall.

    python examples/02_dense.py            # everything on this machine, under a minute
    python examples/02_dense.py INVITE     # what each learner does: join, train, leave

The run's rules are in `dense.toml`, so `geo-diloco start examples/dense.toml` founds the same run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import geo_diloco

MANIFEST = Path(__file__).with_name("dense.toml")


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
