"""A language model of bytes without transformers, whose import takes a process longer than such a run trains."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor, nn

import geo_diloco


class TinyLanguage(nn.Module):
    """Guesses the next byte from the last few; called as a causal language model of Hugging Face is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.mix = nn.Conv1d(width, 2 * width, kernel_size=4)
        self.norm = nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, 256)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        reach = self.mix.kernel_size[0]
        seen = nn.functional.pad(self.embed(input_ids).transpose(1, 2), (reach - 1, 0))
        logits = self.head(self.norm(nn.functional.gelu(self.mix(seen)).transpose(1, 2)))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


@geo_diloco.model_factory
def tiny_language(width: int) -> nn.Module:
    return TinyLanguage(width)
