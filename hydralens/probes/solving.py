"""Does the model answer the probe at all? Asked before any head is scored."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hydralens.models.lens import LensModel
from hydralens.probes.base import Probe


@dataclass(frozen=True, eq=False)
class Solved:
    """How the model answers the clean prompts.

    Attributes:
        name, corruption: which probe.
        correct_first: ``[pair]``, whether the first answer token has the highest logit of the vocabulary.
        correct_all: ``[pair]``, whether every answer token has, each after the right tokens before it (teacher-forced).
        margin: float32 ``[pair]``, logit of the first answer token minus the best other logit.
    """

    name: str
    corruption: str
    correct_first: Bool[Tensor, "pair"]
    correct_all: Bool[Tensor, "pair"]
    margin: Float[Tensor, "pair"]

    @property
    def n_pairs(self) -> int:
        return len(self.correct_first)

    @property
    def accuracy_first(self) -> float:
        """Share of pairs with the right first token."""
        return float(self.correct_first.float().mean())

    @property
    def accuracy_all(self) -> float:
        """Share of pairs with the whole answer right."""
        return float(self.correct_all.float().mean())

    def __str__(self) -> str:
        first, whole = int(self.correct_first.sum()), int(self.correct_all.sum())
        return f"{self.name}/{self.corruption}: the model answers {first} of {self.n_pairs} pairs (first token), {whole} of {self.n_pairs} (whole answer)"


def solve(model: LensModel, probe: Probe) -> Solved:
    """Run the clean prompts, one at a time, and compare the model's choices with the answer."""
    first, whole, margin = [], [], []
    for pair in range(probe.n_pairs):
        row, scored = slice(pair, pair + 1), probe.scored[pair]
        logits = model.read_logits(probe.clean[row], probe.attention_mask[row], probe.read_positions[row])[0, scored]  # [n vocab]
        answer = probe.answer[pair, scored]
        right = logits.argmax(-1) == answer
        first.append(right[0])
        whole.append(right.all())
        margin.append(lead(logits[0], answer[0]))
    return Solved(probe.name, probe.corruption, torch.stack(first), torch.stack(whole), torch.stack(margin))


def lead(logits: Float[Tensor, "vocab"], token: Int[Tensor, ""]) -> Float[Tensor, ""]:
    """Logit of ``token`` minus the best other; positive where it is the argmax."""
    return logits[token] - logits.index_fill(0, token[None], -torch.inf).max()
