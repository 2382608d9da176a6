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
from hydralens.scores import Effects, HeadScores, all_probes
from hydralens.statistics import LEVEL, ControlResult, pooled, significance, smallest_p

KNOCKOUT_COLUMNS = ("k", "order", "draw", "accuracy", "ci_low", "ci_high", "margin", "n_prompts")
PREVIEW_COLUMNS = ("mask", "draw", "task", "accuracy", "ci_low", "ci_high", "margin", "n_prompts")
NEVER_NEGATIVE = ("copy_paste", "headkv", "attention_mass", "zero_shot_kl", "induction", "echo", "duo_attention")  # methods
FULL, SELECTED, RANDOM, NONE, PAPER = "all heads full", "selected", "random", "no head full", "paper's composite"


# --- heads ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def interval(effects: HeadEffects) -> tuple[Float[Tensor, "layer head"], Float[Tensor, "layer head"]]:
    """``effects.interval()``, resampled once for all the figures and sentences that show it."""
    return effects.interval()


@lru_cache(maxsize=16)
def all_prompts(scores: HeadScores) -> HeadEffects:
    """``pooled(scores)``, made once."""
    return pooled(scores)


@lru_cache(maxsize=16)
def tested(effects: HeadEffects) -> pd.DataFrame:
    """``significance(effects)``, computed once for all the figures and sentences that show it."""
    return significance(effects)


def quantity(effects: HeadEffects) -> str:
    """What one value is called: IE where activations were patched, otherwise the method's score."""
    return "IE" if effects.direction in ("noise", "denoise") else f"{effects.mode} score"


def measurement(effects: HeadEffects) -> str:
    """How the values were measured, for captions."""
    if quantity(effects) == "IE":
        return f"{effects.mode} effect of {effects.component}, {effects.direction}, positions {effects.positions}"
    return f"{quantity(effects)}, {effects.positions}"


def can_be_negative(effects: HeadEffects) -> bool:
    """Attention masses, gates and divergences cannot, so that being above 0 says nothing of a head."""
    return effects.mode not in NEVER_NEGATIVE


def too_few(effects: HeadEffects) -> bool:
    """No head passes the test against 0, and none could alone, whatever its values: the pairs are too few for so many heads."""
    heads = tested(effects)
    return bool(smallest_p(effects.n_pairs) * len(heads) > LEVEL and not (heads["q"] < LEVEL).any())


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


def direct(scores: HeadScores) -> Effects:
    """Direct effects, or what the method measures where a detector was called by itself."""
    return scores.receivers or scores.measured


# --- knock-out -----------------------------------------------------------------------------------------------------


def knockout_finding(control: ControlResult) -> str:
    """What the positive control says, as a title; whether it passed is decided there and nowhere else."""
    scored, random, baseline = (percent(share) for share in (control.scored, control.random, control.baseline))
    if control.passed:
        return (
            f"Removing the {count(control.k, 'best-scored head')} takes accuracy from {baseline} to {scored}; "
            f"removing {count(control.k, 'random head')} leaves {random}"
        )
    if not control.could_pass:
        return f"The whole model answers {baseline} of {count(control.n_prompts, 'prompt')}, too few to tell what removing heads costs"
    return f"Removing the best-scored heads does not clearly hurt more than removing random ones: {scored} against {random} right at {count(control.k, 'head')}"


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
    need_columns(frame, PREVIEW_COLUMNS, "preview")
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


def need_columns(frame: pd.DataFrame, columns: tuple[str, ...], name: str) -> None:
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise InputError(f"the {name} frame lacks {listed(missing)}; it needs {', '.join(columns)}")
