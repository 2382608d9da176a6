"""How heads of one layer differ: how unequal they are, how many are critical and how many replaceable, and how they attend (HydraHead, Table 16)."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from hydralens.detectors.rows import score_rows
from hydralens.errors import InputError
from hydralens.models.lens import LensModel
from hydralens.patching.pairs import unpad
from hydralens.patching.restriction import SINKS
from hydralens.probes.base import Probe
from hydralens.scores import THRESHOLD, Effects, HeadScores, by_label

REPLACEABLE = THRESHOLD / 2  # the paper does not give its lower threshold; it leaves 12 of 448 heads between the two, so they lie close together


@dataclass(frozen=True, eq=False)
class HeadProfile:
    """Importance of every head and what it says of each layer.

    Attributes:
        importance: float32 ``[layer, head]``: mean effect over a capability's probes, of the capability where that is larger; NaN where unmeasured.
        critical_from, replaceable_below: the thresholds; a head between them is neither.
    """

    importance: Float[Tensor, "layer head"]
    critical_from: float = THRESHOLD
    replaceable_below: float = REPLACEABLE

    @property
    def gini(self) -> Float[Tensor, "layer"]:
        """Gini coefficient of each layer's importances, negative ones as 0, float64; NaN for a layer of which no head has any."""
        return gini(self.importance.nan_to_num().clamp(min=0))

    @property
    def critical(self) -> Bool[Tensor, "layer head"]:
        return self.importance >= self.critical_from

    @property
    def replaceable(self) -> Bool[Tensor, "layer head"]:
        """Heads with hardly any effect; also those that work against the answer, which no mask is made to keep."""
        return self.importance < self.replaceable_below

    @property
    def mixed_layers(self) -> list[int]:
        """Layers that hold a critical and a replaceable head, so that no choice of whole layers can be right for both."""
        return (self.critical.any(1) & self.replaceable.any(1)).nonzero().flatten().tolist()

    @property
    def finding(self) -> str:
        """The paper's statistics in one sentence."""
        n, unequal = self.importance.numel(), self.gini[self.gini.isfinite()]
        counts = f"{int(self.critical.sum())} of {n} heads are critical and {int(self.replaceable.sum())} replaceable, both in {len(self.mixed_layers)} layers"
        return f"{counts}; Gini {unequal.mean():.2f} ({unequal.min():.2f} to {unequal.max():.2f})" if len(unequal) else counts

    def to_frame(self) -> pd.DataFrame:
        """One row a layer: layer, gini, n_critical, n_between, n_replaceable, mixed."""
        critical, replaceable = self.critical.sum(1), self.replaceable.sum(1)
        known = self.importance.isfinite().sum(1)
        mixed = torch.zeros(len(known), dtype=torch.bool)
        mixed[self.mixed_layers] = True
        columns = {"gini": self.gini, "n_critical": critical, "n_between": known - critical - replaceable, "n_replaceable": replaceable, "mixed": mixed}
        return pd.DataFrame({"layer": range(len(known)), **{name: values.numpy() for name, values in columns.items()}})


def head_profile(scores: HeadScores, critical: float = THRESHOLD, replaceable: float = REPLACEABLE) -> HeadProfile:
    """The profile of a model's heads from direct effects, or from what the method measures where there are none (HydraHead).

    Args:
        critical: importance from which a head is critical; 0.01 in the paper.
        replaceable: importance below which it is replaceable.

    Raises:
        InputError: ``replaceable`` lies above ``critical``.
    """
    if replaceable > critical:
        raise InputError(f"replaceable is {replaceable} and critical {critical}; a replaceable head must have less importance than a critical one")
    return HeadProfile(strength(scores.receivers or scores.measured), critical, replaceable)


def strength(effects: Effects) -> Float[Tensor, "layer head"]:
    """Mean effect over a capability's probes; the larger capability counts. NaN where no capability has an effect."""
    means = [torch.stack([effect.values for effect in probes.values()]).mean(0) for probes in effects.values()]
    largest = torch.stack(means).nan_to_num(-torch.inf).amax(0)
    return largest.where(largest.isfinite(), torch.nan)


def gini(values: Float[Tensor, "layer head"]) -> Float[Tensor, "layer"]:
    """Gini coefficient of each row of non-negative values: 0 = all heads alike, (n - 1) / n = one head has it all; NaN for a row of zeros."""
    n = values.shape[1]
    weights = 2 * torch.arange(1, n + 1) - n - 1
    return (values.double().sort(1).values * weights).sum(1) / (n * values.double().sum(1))


# --- how heads attend ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttentionProfile:
    """How heads attend while the answer is written.

    Attributes:
        entropy: float32 ``[layer, head]``: entropy of the attention weights in nats, mean over answer tokens; ``exp`` of it is how many tokens share it.
        sink_mass: float32 ``[layer, head]``: attention on the first ``n_sinks`` positions, 0..1.
        n_sinks: positions that count as sinks.
        n_rows: answer tokens the means are over.
        model_id: which model.
    """

    entropy: Float[Tensor, "layer head"]
    sink_mass: Float[Tensor, "layer head"]
    n_sinks: int
    n_rows: int
    model_id: str = ""

    def to_frame(self) -> pd.DataFrame:
        """One row a head: layer, head, entropy, sink_mass."""
        layers, heads = torch.ones_like(self.entropy).nonzero().T
        columns = {"layer": layers, "head": heads, "entropy": self.entropy.flatten(), "sink_mass": self.sink_mass.flatten()}
        return pd.DataFrame({name: values.numpy() for name, values in columns.items()})


@torch.no_grad()
def attention_profile(model: LensModel, probes: Sequence[Probe], *, sinks: int = SINKS, verbose: bool = False) -> AttentionProfile:
    """Entropy and sink mass of every head on the rows that predict the answer, clean prompts only, every answer token counting once.

    Attention maps are never made, only these rows of them.

    Raises:
        InputError: no probes, or two with one label.
    """
    model.warn_of_bypassed_hooks()

    def entropy_and_sinks(rows: Float[Tensor, "row head pos"], v: Tensor, index: int, which: slice) -> Float[Tensor, "row head 2"]:
        return torch.stack((torch.special.entr(rows).sum(-1), rows[..., :sinks].sum(-1)), -1)

    total, n_rows = torch.zeros(model.info.n_layers, model.info.n_heads, 2, dtype=torch.float64), 0
    for probe in by_label(probes).values():
        for index in tqdm(range(probe.n_pairs), desc=f"attention: {probe.label}", disable=not verbose, leave=False):
            pair = unpad(probe, index, model.device)
            found, _ = score_rows(model.anatomy, pair.clean, pair.read, entropy_and_sinks)
            total += found.double().sum(1).cpu()
            n_rows += len(pair.read)
    entropy, sink_mass = (total / n_rows).float().unbind(-1)
    return AttentionProfile(entropy, sink_mass, sinks, n_rows, model.info.id)
