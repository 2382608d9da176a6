"""From effects to scores: what each head is worth per probe, per capability and overall (HydraHead Eq. 11-12)."""

from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hydralens.models.info import ModelInfo
from hydralens.patching.effects import HeadEffects


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Scores of every query head, with the effects they were made from.

    Attributes:
        model: which model.
        receivers: capability -> probe label -> direct effects (HydraHead Eq. 10); a label is ``name/corruption``.
        composite: float32 ``[layer, head]``, the score that selection uses, 0 where a head carries no signal.
        probes: one entry per probe as ``head_mask.json`` lists them: name, capability, n_pairs, n_tokens, seed, direction, metric.
        senders: the same shape of mapping for effects through the receivers (path patching); empty when not measured.
        method: how ``composite`` was made.
        threshold: the effect above which a head counts for a probe (0.01 in the paper).
    """

    model: ModelInfo
    receivers: dict[str, dict[str, HeadEffects]]
    composite: Float[Tensor, "layer head"]
    probes: list[dict]
    senders: dict[str, dict[str, HeadEffects]] = field(default_factory=dict)
    method: str = "composite"
    threshold: float = 0.01

    @property
    def signal(self) -> Bool[Tensor, "layer head"]:
        """Heads with a non-zero score."""
        return self.composite != 0

    @property
    def n_with_signal(self) -> int:
        """How many heads have a non-zero score; only about a tenth do, so most of a large mask is tie-break."""
        return int(self.signal.sum())

    @property
    def rank(self) -> Int[Tensor, "layer head"]:
        """0 for the best head; ties by lower layer, then lower head."""
        order = self.composite.flatten().argsort(descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order))
        return rank.reshape(self.composite.shape)

    def top(self, k: int) -> list[tuple[int, int]]:
        """The ``k`` best heads, best first, as ``(layer, head)``."""
        order = self.composite.flatten().argsort(descending=True, stable=True)[:k].tolist()
        return [divmod(cell, self.model.n_heads) for cell in order]
