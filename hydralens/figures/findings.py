"""What the data say, computed: the numbers and the verdicts that titles and the report put into words."""

from dataclasses import dataclass
from functools import lru_cache

import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy.stats import binomtest
from torch import Tensor

from hydralens.errors import InputError
from hydralens.figures.style import count, listed, percent
from hydralens.patching.effects import HeadEffects
from hydralens.scores import HeadScores, all_probes

KNOCKOUT_COLUMNS = ("k", "order", "draw", "accuracy", "ci_low", "ci_high", "margin", "n_prompts")
PREVIEW_COLUMNS = ("mask", "draw", "task", "accuracy", "ci_low", "ci_high", "margin", "n_prompts")
FULL, SELECTED, RANDOM, NONE, PAPER = "all heads full", "selected", "random", "no head full", "paper's composite"


# --- heads ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def interval(effects: HeadEffects) -> tuple[Float[Tensor, "layer head"], Float[Tensor, "layer head"]]:
    """``effects.interval()``, resampled once for all the figures and sentences that show it."""
    return effects.interval()


def half_share(values: Float[Tensor, "layer head"]) -> list[tuple[int, int]]:
    """The fewest heads that carry half of the positive total, strongest first; empty if nothing is positive."""
    positive = values.detach().double().cpu().nan_to_num().clamp(min=0).flatten()
    if positive.sum() == 0:
        return []
    strongest = positive.argsort(descending=True, stable=True)
    share = positive[strongest].cumsum(0) / positive.sum()
    n = int((share < 0.5).sum()) + 1
    return [divmod(cell, values.shape[1]) for cell in strongest[:n].tolist()]


def half_share_finding(values: Float[Tensor, "layer head"], what: str) -> str:
    heads = half_share(values)
    if not heads:
        return f"No head has a positive {what}"
    layers = list(dict.fromkeys(layer for layer, _ in heads))
    where = f"of layer {layers[0]}" if len(layers) == 1 else f"of layers {listed(sorted(layers))}" if len(layers) <= 4 else f"in {len(layers)} layers"
    return f"{count(len(heads), 'head')} {where} {'carries' if len(heads) == 1 else 'carry'} half of the {what}"


@dataclass(frozen=True, eq=False)
class StrongestProbe:
    """For every head the probe it matters most for, and its effect there; all ``[layer, head]``."""

    labels: list[str]
    index: Int[Tensor, "layer head"]  # into labels
    value: Float[Tensor, "layer head"]
    low: Float[Tensor, "layer head"]
    high: Float[Tensor, "layer head"]


def strongest_probe(scores: HeadScores) -> StrongestProbe:
    """Where each head's effect, of the kind its score is made from, is largest. A maximum over probes: its interval is that of the one probe."""
    probes = all_probes(scores.made_from)
    values = torch.stack([effects.values for effects in probes.values()])
    intervals = [interval(effects) for effects in probes.values()]
    index = values.nan_to_num(-torch.inf).argmax(0)
    pick = [stack.gather(0, index[None])[0] for stack in (values, torch.stack([low for low, _ in intervals]), torch.stack([high for _, high in intervals]))]
    return StrongestProbe(list(probes), index, *pick)


def importance(scores: HeadScores) -> Float[Tensor, "layer head"]:
    """Mean receiver effect over a capability's probes; the larger capability counts. Negative effects are 0."""
    means = [torch.stack([effects.values.nan_to_num() for effects in probes.values()]).mean(0) for probes in scores.receivers.values()]
    return torch.stack(means).amax(0).clamp(min=0)


def gini(values: Float[Tensor, "layer head"]) -> Float[Tensor, "layer"]:
    """Gini coefficient of each row of non-negative values: 0 = all heads alike, (n - 1) / n = one head has it all; NaN for a row of zeros."""
    n = values.shape[1]
    weights = 2 * torch.arange(1, n + 1) - n - 1
    return (values.double().sort(1).values * weights).sum(1) / (n * values.double().sum(1))


# --- knock-out -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Knockout:
    """The knock-out curve at the smallest ``k`` with nearly the largest difference between scored and random removal.

    That ``k`` is chosen after the fact. The verdict allows for it: two 95% intervals that do not even overlap are a test at
    about 0.6% (their difference is at least 2.8 standard errors), a fair level for the best of some eight values of ``k``.
    """

    k: int
    baseline: float
    scored: float
    low: float
    high: float
    random: float  # mean over draws
    n_draws: int
    n_prompts: int
    beats_random: bool  # the intervals do not overlap

    @property
    def finding(self) -> str:
        if self.beats_random:
            return (
                f"Removing the {count(self.k, 'best-scored head')} takes accuracy from {percent(self.baseline)} to {percent(self.scored)}; "
                f"removing {count(self.k, 'random head')} leaves {percent(self.random)}"
            )
        return (
            f"Removing the best-scored heads does not clearly hurt more than removing random ones: {percent(self.scored)} "
            f"against {percent(self.random)} right at {count(self.k, 'head')}"
        )


def knockout(frame: pd.DataFrame) -> Knockout:
    """Read a knock-out frame.

    Raises:
        InputError: a column is missing, nothing was removed, or scored and random rows share no ``k``.
    """
    _need_columns(frame, KNOCKOUT_COLUMNS, "knock-out")
    scored = frame[(frame["order"] == "scored") & (frame["k"] > 0)].set_index("k")
    random = frame[(frame["order"] == "random") & (frame["k"] > 0)].groupby("k")[["accuracy", "ci_low"]]
    intact = frame[frame["k"] == 0]
    shared = scored.index.intersection(random.mean().index).sort_values()
    if len(shared) == 0 or len(intact) == 0:
        raise InputError('the knock-out frame needs a row with k = 0 and rows with order "scored" and "random" at the same k > 0')
    gap = random.mean().loc[shared, "accuracy"] - scored.loc[shared, "accuracy"]
    k = int((gap >= 0.9 * gap.max() if gap.max() > 0 else gap == gap.max()).idxmax())
    at, drawn = scored.loc[k], random.get_group(k)
    return Knockout(
        k=k,
        baseline=float(intact["accuracy"].mean()),
        scored=float(at["accuracy"]),
        low=float(at["ci_low"]),
        high=float(at["ci_high"]),
        random=float(drawn["accuracy"].mean()),
        n_draws=len(drawn),
        n_prompts=int(at["n_prompts"]),
        beats_random=bool(drawn["ci_low"].mean() > at["ci_high"]),
    )


# --- preview -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preview:
    """Accuracy of one task, or of all tasks' prompts together, under the four masks; ``nan`` where a mask was not run."""

    task: str
    full: float
    selected: float
    low: float
    high: float
    random: float  # mean over draws
    n_draws: int
    none: float
    n_prompts: int
    beats_random: bool  # random's mean lies below selected's interval, and every draw below selected

    @property
    def finding(self) -> str:
        if self.beats_random:
            return (
                f"The selected heads keep {percent(self.selected)} of prompts right; random heads keep {percent(self.random)}, all heads {percent(self.full)}"
            )
        return (
            f"The selected heads do not clearly beat random ones: {percent(self.selected)} against {percent(self.random)} of prompts right "
            f"(all heads {percent(self.full)})"
        )


def preview(frame: pd.DataFrame) -> Preview:
    """All tasks of a preview frame together, every prompt counting once.

    Raises:
        InputError: a column is missing, or there are no ``selected`` or no ``random`` rows.
    """
    _need_columns(frame, PREVIEW_COLUMNS, "preview")
    if not {SELECTED, RANDOM} <= set(frame["mask"]):
        raise InputError(f'the preview frame needs rows with mask "{SELECTED}" and "{RANDOM}"; it has {listed(sorted(set(frame["mask"])))}')
    right = (frame["accuracy"] * frame["n_prompts"]).round()
    totals = frame.assign(right=right).groupby(["mask", "draw"])[["right", "n_prompts"]].sum()
    accuracy = totals["right"] / totals["n_prompts"]
    selected, draws = totals.loc[SELECTED].iloc[0], accuracy[RANDOM]
    # Wilson's interval: at 0 or all of a handful of prompts it is still an interval.
    interval = binomtest(int(selected["right"]), int(selected["n_prompts"])).proportion_ci(method="wilson")
    mine = float(selected["right"] / selected["n_prompts"])
    mean = {mask: float(accuracy[mask].mean()) if mask in accuracy.index.levels[0] else float("nan") for mask in (FULL, RANDOM, NONE)}
    return Preview(
        task=listed(list(dict.fromkeys(frame["task"]))),
        full=mean[FULL],
        selected=mine,
        low=interval.low,
        high=interval.high,
        random=mean[RANDOM],
        n_draws=len(draws),
        none=mean[NONE],
        n_prompts=int(selected["n_prompts"]),
        beats_random=bool(mean[RANDOM] < interval.low and draws.max() < mine),
    )


def previews_by_task(frame: pd.DataFrame) -> list[Preview]:
    """One ``Preview`` a task, in the frame's order."""
    return [preview(frame[frame["task"] == task]) for task in dict.fromkeys(frame["task"])]


def _need_columns(frame: pd.DataFrame, columns: tuple[str, ...], name: str) -> None:
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise InputError(f"the {name} frame lacks {listed(missing)}; it needs {', '.join(columns)}")
