"""What an intervention did, head by head and pair by pair, with its uncertainty."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class HeadEffects:
    """Normalised effects (IE) of one intervention on every head: 0 = none, 1 = this head alone accounts for clean minus corrupt.

    Attributes:
        per_pair: float32 ``[pair, layer, head]``, signed; NaN where the path is impossible and for pairs not kept.
        component: ``"z"``, ``"q"`` (query heads) or ``"k"``, ``"v"`` (the head axis counts KV heads).
        mode, direction, positions: how it was measured (``"direct"``/``"total"``, ``"noise"``/``"denoise"``, where).
        clean_metric, corrupt_metric: float32 ``[pair]``, the metric of the two unpatched runs.
        kept: ``[pair]``, False for pairs whose clean minus corrupt metric is too small to divide by.
        answered: ``[pair]``, whether the unpatched clean run gives the first answer token the highest logit.
        probe, capability, corruption, readout: what was asked and how the answer was scored.
        through: for path patching, the receivers' inputs that the effect goes through.
        n_heads: query heads per layer (the head axis has ``n_heads`` or, for k and v, ``n_kv_heads`` columns).
        n_kv_heads: KV heads per layer.
        estimate: float32 ``[pair, layer, head]``, the attribution by which the heads to measure were chosen; None where all were measured.
    """

    per_pair: Float[Tensor, "pair layer head"]
    component: str
    mode: str
    direction: str
    positions: str
    clean_metric: Float[Tensor, "pair"]
    corrupt_metric: Float[Tensor, "pair"]
    kept: Bool[Tensor, "pair"]
    answered: Bool[Tensor, "pair"]
    n_heads: int
    n_kv_heads: int
    probe: str = ""
    capability: str = ""
    corruption: str = ""
    readout: str = "span"
    through: str = ""
    estimate: Float[Tensor, "pair layer head"] | None = None

    @property
    def values(self) -> Float[Tensor, "layer head"]:
        """Mean IE over the kept pairs, float32; NaN where impossible."""
        return self.per_pair[self.kept].mean(0)

    @property
    def n_pairs(self) -> int:
        """Pairs that count."""
        return int(self.kept.sum())

    def interval(self, confidence: float = 0.95, n_resamples: int = 1000, seed: int = 0) -> tuple[Float[Tensor, "layer head"], Float[Tensor, "layer head"]]:
        """Bootstrap percentile interval of ``values`` over the kept pairs: ``(low, high)``, each ``[layer, head]``.

        With fewer than two pairs there is nothing to resample and both bounds are NaN.
        """
        kept = self.per_pair[self.kept].double()
        if len(kept) < 2:
            unknown = torch.full(self.per_pair.shape[1:], torch.nan)
            return unknown, unknown.clone()
        # A resample is a vector of multiplicities, so that all resampled means are one matrix product.
        draws = np.random.default_rng(seed).multinomial(len(kept), np.full(len(kept), 1 / len(kept)), size=n_resamples)
        means = torch.from_numpy(draws / len(kept)) @ kept.flatten(1)
        tail = (1 - confidence) / 2
        low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)
        return low.reshape(kept.shape[1:]).float(), high.reshape(kept.shape[1:]).float()

    def to_frame(self) -> pd.DataFrame:
        """Long form, one row per head.

        Columns: probe, capability, corruption, layer, head, kv_head, component, mode, direction, positions, value, ci_low, ci_high,
        n_pairs; and estimate, the mean over the kept pairs, where there is one. For k and v ``head`` is the KV head itself.
        """
        low, high = self.interval()
        n_layers, n_columns = self.values.shape
        layers, heads = np.divmod(np.arange(n_layers * n_columns), n_columns)
        group = 1 if self.component in ("k", "v") else self.n_heads // self.n_kv_heads
        frame = pd.DataFrame(
            {
                "probe": self.probe,
                "capability": self.capability,
                "corruption": self.corruption,
                "layer": layers,
                "head": heads,
                "kv_head": heads // group,
                "component": self.component,
                "mode": self.mode,
                "direction": self.direction,
                "positions": self.positions,
                "value": self.values.flatten().numpy(),
                "ci_low": low.flatten().numpy(),
                "ci_high": high.flatten().numpy(),
                "n_pairs": self.n_pairs,
            }
        )
        return frame if self.estimate is None else frame.assign(estimate=self.estimate[self.kept].mean(0).flatten().numpy())

    def select(self, pairs: Tensor) -> "HeadEffects":
        """The same effects with only the given pairs (indices or a boolean mask)."""
        rows = ("per_pair", "clean_metric", "corrupt_metric", "kept", "answered")
        estimate = None if self.estimate is None else self.estimate[pairs]
        return replace(self, **{row: getattr(self, row)[pairs] for row in rows}, estimate=estimate)

    @staticmethod
    def join(parts: Sequence["HeadEffects"]) -> "HeadEffects":
        """What ``select`` takes apart: the same experiment's effects on other pairs, one after the other."""
        rows = ("per_pair", "clean_metric", "corrupt_metric", "kept", "answered")
        estimate = None if parts[0].estimate is None else torch.cat([part.estimate for part in parts])
        return replace(parts[0], **{row: torch.cat([getattr(part, row) for part in parts]) for row in rows}, estimate=estimate)

    def split(self) -> tuple[dict[str, Tensor], dict[str, str | int | None]]:
        """Tensors and plain fields apart, as files hold them; ``HeadEffects(**tensors, **fields)`` joins them again."""
        tensors = {name: value.contiguous() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return tensors, {name: value for name, value in vars(self).items() if name not in tensors}
