"""A vision transformer with a data loader of one's own: nothing in a run is about text.

    python examples/04_vision.py            # everything on this machine, under a minute
    python examples/04_vision.py INVITE     # what each learner does

The model comes from a factory (`vit_digits.py`), which also knows how Theta is measured. Each learner draws images
as it likes; `tokens` is whatever the run counts its work in, here images.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from vit_digits import digits

import geo_diloco

MANIFEST = Path(__file__).with_name("vision.toml")
BATCH_SIZE = 32


def found_and_train(folder: Path, num_learners: int = 2) -> None:
    with geo_diloco.found(MANIFEST, run_dir=folder / "founder") as founder:
        learn = [sys.executable, __file__, founder.invite]
        learners = [subprocess.Popen([*learn, str(folder / f"learner-{i}")]) for i in range(num_learners)]
        founder.wait_finished()
        for learner in learners:
            learner.wait()
        for _, loss, seconds in founder.status()["heldout"]:
            print(f"after {seconds:5.1f} s: held-out loss of Theta {loss:.3f} nats/image")


def learn(invite: str, run_dir: str | None = None) -> None:
    torch.set_num_threads(1)
    torch.seed()  # each learner draws its own images
    images, labels = digits(held_out=False)
    with geo_diloco.join(invite, run_dir=run_dir, threads=1) as peer:
        model = peer.build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=peer.manifest.inner.learning_rate)
        learner = peer.learner(model, optimizer)
        while True:
            chosen = torch.randint(len(labels), (BATCH_SIZE,))
            scores = model(images[chosen])
            loss = torch.nn.functional.cross_entropy(scores, labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if learner.step(tokens=BATCH_SIZE, loss=loss):
                break
        right = (scores.argmax(dim=1) == labels[chosen]).float().mean()
        print(f"learner: {learner.num_steps} steps, last batch: loss {loss.item():.3f}, {right:.0%} right")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        learn(*sys.argv[1:3])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            found_and_train(Path(temporary))
