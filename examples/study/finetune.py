"""What a trained model is worth to somebody else: its export is loaded, and trained on for a moment on another task.

Language models: C++, the headers of torch's own c10 (1.7 MB in 231 files; whoever has this package has them), which
differ from what they were trained on, Python. A fifth of the files, by the hash of their names, is held out.
The vision transformer: digits turned by a quarter, of which it sees 200 images with labels; 297 others are held out.

One recipe for all, chosen before anything was compared and never tuned: AdamW at 1e-3 after five steps of warm-up, 50
steps, batches of 8 sequences of 128 bytes, or of 32 images. A seed draws the batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from geo_diloco.training.digits import digits
from geo_diloco.training.evaluate import causal_loss, heldout_loss

STEPS = 50
WARMUP_STEPS = 5
LEARNING_RATE = 1e-3
SEQUENCE, BATCH, NUM_HELD_OUT = 128, 8, 256
IMAGES, IMAGE_BATCH = 200, 32
SEEDS = (0, 1, 2)


@cache
def headers(*, held_out: bool) -> Tensor:
    """Windows int64 [n, 128] of C++."""
    root = Path(torch.__file__).parent / "include" / "c10"
    paths = sorted(root.rglob("*.h"), key=lambda path: path.relative_to(root).as_posix())
    chosen = [path for path in paths if _is_held_out(path.relative_to(root).as_posix()) == held_out]
    text = b"\n".join(path.read_bytes() for path in chosen)
    windows = np.frombuffer(text, dtype=np.uint8)[: len(text) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)
    if held_out:
        windows = windows[np.linspace(0, len(windows) - 1, NUM_HELD_OUT).round().astype(np.int64)]
    return torch.from_numpy(windows.astype(np.int64))


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 256 // 5


@cache
def turned_digits(*, held_out: bool) -> tuple[Tensor, Tensor]:
    """Images [n, 8, 8] and labels."""
    images, labels = digits(held_out=held_out)
    turned = torch.rot90(images, 1, (1, 2)).contiguous()
    return (turned, labels) if held_out else (turned[:IMAGES], labels[:IMAGES])


def is_vision(model: nn.Module) -> bool:
    return hasattr(model, "heldout_accuracy")


def measure(model: nn.Module) -> dict[str, float]:
    """On the new task, held out: `loss`, and of images `accuracy`."""
    if not is_vision(model):
        return {"loss": heldout_loss(model, torch.split(headers(held_out=True), 32))}
    images, labels = turned_digits(held_out=True)
    model.eval()
    with torch.no_grad():
        scores = model(images)
    model.train()
    right = (scores.argmax(dim=1) == labels).float().mean()
    return {"loss": float(cross_entropy(scores, labels)), "accuracy": float(right)}


def finetune(load: Callable[[], nn.Module]) -> dict[str, list[dict[str, float]]]:
    """`before`, of the model as it is loaded, once; `after`, seed by seed."""
    return {"before": [measure(load())], "after": [_tuned(load(), seed) for seed in SEEDS]}


def _tuned(model: nn.Module, seed: int) -> dict[str, float]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    chance = np.random.default_rng([seed, 7])
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / (WARMUP_STEPS + 1))
        loss = _loss(model, chance)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return measure(model)


def _loss(model: nn.Module, chance: np.random.Generator) -> Tensor:
    if is_vision(model):
        images, labels = turned_digits(held_out=False)
        rows = torch.from_numpy(chance.integers(0, len(images), IMAGE_BATCH))
        return cross_entropy(model(images[rows]), labels[rows])
    windows = headers(held_out=False)
    return causal_loss(model, windows[torch.from_numpy(chance.integers(0, len(windows), BATCH))])
