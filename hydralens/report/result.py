"""Everything a run found, as the report takes it."""

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from hydralens.head_mask import HeadMask
from hydralens.models.info import ModelInfo
from hydralens.scores import HeadScores
from hydralens.similarity import Similarity
from hydralens.statistics import ControlResult, positive_control


@dataclass(frozen=True, eq=False)
class RunResult:
    """What a run found. Parts that were not measured are ``None`` or empty, and the report says so.

    Attributes:
        model: which model.
        scores: every head's score and the effects behind it; ``scores.solved`` tells which probes the model answers.
        mask: the chosen heads.
        layer_similarity, head_similarity: cosine matrices.
        knockout: columns k, order, draw, accuracy, ci_low, ci_high, margin, n_prompts (see ``figures.knockout_curve``).
        preview: columns mask, draw, task, accuracy, ci_low, ci_high, margin, n_prompts (see ``figures.mask_preview``).
        solved: one entry a probe asked: probe, corruption, capability, n_pairs, n_solved, used.
        stability: what ``statistics.split_half`` returns.
        settings: how it was made (command, seeds, versions, wall seconds per phase); nested mappings are shown flat.
    """

    model: ModelInfo
    scores: HeadScores
    mask: HeadMask
    layer_similarity: Similarity | None = None
    head_similarity: Similarity | None = None
    knockout: pd.DataFrame | None = None
    preview: pd.DataFrame | None = None
    solved: list[dict] = field(default_factory=list)
    stability: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def control(self) -> ControlResult | None:
        """The knock-out curve as a positive control."""
        return None if self.knockout is None else positive_control(self.knockout)
