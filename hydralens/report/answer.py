"""The answer in plain sentences, each computed from the run's numbers and true whichever way they fall."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from hydralens.figures.findings import PAPER, knockout, preview, previews_by_task, strongest_probe
from hydralens.figures.style import count, number, percent
from hydralens.report.result import RunResult
from hydralens.scores import all_probes

LISTED = 12  # heads in the table


@dataclass(frozen=True)
class Verdict:
    """One question with its answer; ``status`` is for the eye only, the sentences say it too."""

    question: str
    status: Literal["yes", "partly", "no", "unknown"]
    sentences: list[str]


@dataclass(frozen=True)
class HeadRow:
    """One row of the table of best heads."""

    name: str
    kv_head: int
    score: float
    share: float  # of the best head's score
    probe: str
    effect: float
    low: float
    high: float
    kept: bool


@dataclass(frozen=True)
class Chip:
    """A kept head: its number in its layer, and whether a signal or the tie-break chose it."""

    head: int
    signal: bool


def headline(run: RunResult) -> list[str]:
    """Which and how many heads, how many of them for a reason, and what that leaves of the cache."""
    mask, chosen = run.mask, run.mask.selection
    kind = "query head" if mask.space == "query" else "KV head"
    rule = f"rule {chosen.rule}" if mask.ratio is None else f"ratio {mask.ratio}, rule {chosen.rule}"
    sentences = [f"{chosen.k} of {count(mask.array.numel(), kind)} keep full attention ({rule}); the others can become linear."]
    if chosen.n_with_signal == chosen.k:
        sentences.append("Every one of them carries a measured signal.")
    else:
        sentences.append(
            f"{chosen.n_with_signal} of them {'carries' if chosen.n_with_signal == 1 else 'carry'} a measured signal; "
            f"the other {chosen.k - chosen.n_with_signal} only fill the budget, by tie-break: {chosen.tie_break}."
        )
    sentences.append(f"They read {percent(mask.kv_share)} of the KV heads, so that share of the KV cache survives.")
    return sentences


def verdicts(run: RunResult) -> list[Verdict]:
    return [_certainty(run), _stability(run), _knockout(run), _preview(run)]


def best_heads(run: RunResult) -> list[HeadRow]:
    """The best-scored heads with signal, at most twelve."""
    scores, best, kept = run.scores, strongest_probe(run.scores), run.mask.to_query().array
    top = float(scores.composite.max())
    rows = []
    for layer, head in scores.top(min(LISTED, scores.n_with_signal)):
        score = float(scores.composite[layer, head])
        effect, low, high = (float(values[layer, head]) for values in (best.value, best.low, best.high))
        probe = best.labels[int(best.index[layer, head])]
        rows.append(HeadRow(f"L{layer}H{head}", head // run.model.group, score, max(0.0, score / top), probe, effect, low, high, bool(kept[layer, head])))
    return rows


def kept_heads(run: RunResult) -> dict[int, list[Chip]]:
    """Every kept query head, by layer."""
    rows: dict[int, list[Chip]] = {}
    for layer, head in run.mask.to_query().array.nonzero().tolist():
        rows.setdefault(layer, []).append(Chip(head, bool(run.scores.composite[layer, head] != 0)))
    return rows


# --- one question each ---------------------------------------------------------------------------------------------


def _certainty(run: RunResult) -> Verdict:
    question = "Are the effects real?"
    rows = best_heads(run)
    if not rows:
        return Verdict(question, "no", ["No head has a score: the probes found nothing, and the whole mask is tie-break."])
    low = torch.tensor([row.low for row in rows])
    pairs = [effects.n_pairs for effects in all_probes(run.scores.made_from).values()]
    per_probe = f"{min(pairs)}" if min(pairs) == max(pairs) else f"{min(pairs)} to {max(pairs)}"
    if bool(low.isnan().all()):
        return Verdict(question, "unknown", [f"With {count(min(pairs), 'pair')} in a probe there is no interval to give; use more pairs."])
    sure = int((low > 0).sum())
    sentences = [
        f"For {sure} of the {count(len(rows), 'best head')} the 95% interval of its largest effect lies above 0.",
        f"That is {per_probe} pairs in each of {count(len(pairs), 'probe')}. The probe is each head's own strongest, which flatters it.",
    ]
    return Verdict(question, "yes" if sure == len(rows) else "partly" if 2 * sure >= len(rows) else "no", sentences)


def _stability(run: RunResult) -> Verdict:
    question = "Would other prompts give the same heads?"
    if not run.stability:
        return Verdict(question, "unknown", ["Not measured in this run."])
    k, overlap, spearman = (run.stability[key] for key in ("k", "top_k_overlap", "spearman"))
    sentences = [f"Scored on each half of the pairs alone, {round(overlap * k)} of the top {int(k)} heads are the same ({percent(overlap)})."]
    without = 1 - run.scores.n_with_signal / run.scores.composite.numel()
    if not math.isnan(spearman):
        why = f"; {percent(without)} of all scores are zero, so the order below the top is noise" if without > 0.5 else ""
        sentences.append(f"The rank correlation over all heads is {number(spearman)}{why}.")
    if overlap < 0.75:
        sentences.append("The list is not settled: use more pairs before relying on single heads.")
    return Verdict(question, "yes" if overlap >= 0.75 else "partly" if overlap >= 0.5 else "no", sentences)


def _knockout(run: RunResult) -> Verdict:
    question = "Does the model need these heads?"
    if run.knockout is None:
        return Verdict(question, "unknown", ["Not measured in this run."])
    result = knockout(run.knockout)
    sentences = [
        f"{result.finding}.",
        f"That is {count(result.n_prompts, 'prompt')} and {count(result.n_draws, 'random draw')}; "
        f"the 95% interval with the best-scored heads removed is {percent(result.low)} to {percent(result.high)}.",
    ]
    if result.beats_random:
        sentences.append("So the scores find heads that this task cannot do without.")
    else:
        sentences.append("So these prompts do not show that the scored heads matter more than others.")
    if result.baseline < 0.5:
        sentences.append(f"The unchanged model gets only {percent(result.baseline)} right, which leaves little to lose.")
    return Verdict(question, "yes" if result.beats_random else "no", sentences)


def _preview(run: RunResult) -> Verdict:
    question = "Is this mask better than a random one?"
    if run.preview is None:
        return Verdict(question, "unknown", ["Not measured in this run."])
    result = preview(run.preview)
    sentences = [
        f"{result.finding}.",
        f"That is {count(result.n_prompts, 'prompt')} and {count(result.n_draws, 'random draw')}, without training: "
        "heads outside the mask see only attention sinks and a recent window. "
        f"The 95% interval of the selected heads is {percent(result.low)} to {percent(result.high)}.",
    ]
    tasks = previews_by_task(run.preview)
    if len(tasks) > 1:
        each = "; ".join(f"{task.task} {percent(task.selected)} (random {percent(task.random)}, all heads {percent(task.full)})" for task in tasks)
        sentences.append(f"By task, selected heads: {each}.")
    papers = run.preview[run.preview["mask"] == PAPER]
    if len(papers):
        right = (papers["accuracy"] * papers["n_prompts"]).sum() / papers["n_prompts"].sum()
        sentences.append(f"A mask of the same size from HydraHead's composite of direct effects keeps {percent(right)}.")
    if result.none >= result.full - 0.1:
        sentences.append(f"With no full head at all {percent(result.none)} are right, so these prompts hardly need far context and cannot tell masks apart.")
    elif result.beats_random and result.selected < result.full - 0.1:
        sentences.append("It is better than random and still short of all heads: the rest is for training, or for a larger budget, to win back.")
    return Verdict(question, "yes" if result.beats_random else "no", sentences)
