"""The answer in plain sentences, each computed from the run's numbers and true whichever way they fall."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from hydralens.figures.findings import PAPER, all_prompts, can_be_negative, preview, previews_by_task, quantity, strongest_probe, tested, too_few
from hydralens.figures.style import count, number, percent
from hydralens.report.result import RunResult
from hydralens.scores import all_probes
from hydralens.statistics import LEVEL, fewest_pairs, smallest_p

LISTED = 12  # heads in the table
DETECTORS = {  # method -> what a head with a high score does
    "copy_paste": "looks at the very token that the model says next",
    "headkv": "has its strongest attention on the needle",
    "attention_mass": "looks at the needle while the answer is read",
    "locos": "writes what it reads from the needle towards the answer",
    "logit_attribution": "writes towards the answer and away from the counterfactual answer",
    "ablation_drop": "cannot be removed without answers going wrong",
    "zero_shot_kl": "changes what the model says next when it is limited to the first tokens and a recent window",
    "induction": "looks at what followed the present token before",
    "echo": "looks at earlier occurrences of the present token",
    "duo_attention": "is kept from the first tokens and a recent window by a trained gate",
}


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
        filling = chosen.k - chosen.n_with_signal
        sentences.append(
            f"{chosen.n_with_signal} of them {'carries' if chosen.n_with_signal == 1 else 'carry'} a measured signal; "
            f"{'one only fills' if filling == 1 else f'the other {filling} only fill'} the budget, by tie-break: {chosen.tie_break}."
        )
    sentences.append(f"They read {percent(mask.kv_share)} of the KV heads, so that share of the KV cache survives.")
    return sentences


def verdicts(run: RunResult) -> list[Verdict]:
    """How sure the answer is, question by question."""
    return [_certainty(run), _stability(run), _control(run), _preview(run)]


def in_short(run: RunResult) -> list[str]:
    """The answer and how sure it is, a line each."""
    return headline(run) + [verdict.sentences[0] for verdict in verdicts(run)]


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
    rows, effects = best_heads(run), all_prompts(run.scores)
    if not rows:
        return Verdict(question, "no", ["No head has a score: the probes found nothing, and the whole mask is tie-break."])
    status, sentences = _tested(run)
    low = torch.tensor([row.low for row in rows])
    pairs = [effects.n_pairs for effects in all_probes(run.scores.made_from).values()]
    per_probe = f"{min(pairs)}" if min(pairs) == max(pairs) else f"{min(pairs)} to {max(pairs)}"
    if not bool(low.isnan().any()):
        sentences.append(
            f"For {int((low > 0).sum())} of the {count(len(rows), 'best head')} the 95% interval of its largest {quantity(effects)} lies above 0, "
            f"with {per_probe} pairs in each of {count(len(pairs), 'probe')}; the probe is each head's own strongest, which flatters it."
        )
    return Verdict(question, status, sentences)


def _tested(run: RunResult) -> tuple[Literal["yes", "partly", "no", "unknown"], list[str]]:
    """Which heads differ from zero over the prompts of all probes together."""
    effects = all_prompts(run.scores)
    heads, n, least = tested(effects), effects.n_pairs, smallest_p(effects.n_pairs)
    if not can_be_negative(effects):
        return "unknown", [f"Values of {effects.mode} are never negative, so that being above zero says nothing of a head."]
    if too_few(effects):
        return "no", [
            f"Too few pairs for any head to pass a test against zero: {count(n, 'prompt')} allow no p below {least:.2g}, and {len(heads)} heads are tested.",
            f"One head alone would need a p of {LEVEL / len(heads):.2g}, {percent(LEVEL)} divided by the number of heads; use more pairs.",
        ]
    sure = torch.tensor((heads["q"] < LEVEL).to_numpy()).reshape(run.scores.composite.shape)
    kept = run.mask.to_query().array & (run.scores.composite != 0)
    sure_kept, n_kept, n_sure = int((sure & (effects.values > 0) & kept).sum()), int(kept.sum()), int(sure.sum())
    sentences = [
        f"{sure_kept} of {count(n_kept, 'kept head')} with a signal {'lies' if sure_kept == 1 else 'lie'} clearly above zero, "
        f"at a false-discovery rate of {percent(LEVEL)} over {count(len(heads), 'head')}.",
        f"That is a sign-flip test over the {count(n, 'prompt')} of all probes together, by which {count(n_sure, 'head')} in all "
        f"{'differs' if n_sure == 1 else 'differ'} from zero, in either direction.",
    ]
    return "yes" if sure_kept == n_kept > 0 else "partly" if 2 * sure_kept >= n_kept > 0 else "no", sentences


def _stability(run: RunResult) -> Verdict:
    question = "Would other prompts give the same heads?"
    if not run.stability:
        few = fewest_pairs(run.scores) < 2
        return Verdict(question, "unknown", ["Not measured: two halves need two pairs in every probe; use more." if few else "Not measured in this run."])
    k, overlap, low, high, spearman = (run.stability[key] for key in ("k", "top_k_overlap", "top_k_overlap_low", "top_k_overlap_high", "spearman"))
    sentences = [
        f"Scored on half of the pairs and on the other half, {round(overlap * k)} of the top {count(int(k), 'head')} agree ({percent(overlap)}).",
        f"That is the mean of {count(int(run.stability['n_splits']), 'random split')}, which give {percent(low)} to {percent(high)}. "
        "Each half has half the pairs, so that all of them reproduce better.",
    ]
    without = 1 - run.scores.n_with_signal / run.scores.composite.numel()
    if not math.isnan(spearman):
        why = f"; {percent(without)} of all scores are zero, so the order below the top is noise" if without > 0.5 else ""
        sentences.append(f"The rank correlation over all heads is {number(spearman)}{why}.")
    if overlap < 0.75:
        sentences.append("The list is not settled: use more pairs before relying on single heads.")
    return Verdict(question, "yes" if overlap >= 0.75 else "partly" if overlap >= 0.5 else "no", sentences)


def _control(run: RunResult) -> Verdict:
    question = "Does the model need these heads?"
    control = run.control
    if control is None:
        return Verdict(question, "unknown", ["Not measured in this run."])
    sizes = f", corrected for the {control.n_sizes} numbers of heads that were tried" if control.n_sizes > 1 else ""
    sentences = [
        control.sentence,
        f"Random heads are of the same layers, {count(control.n_draws, 'draw')}; p is of Fisher's exact test{sizes}.",
    ]
    if control.passed:
        sentences.append("So the scores find heads that this task cannot do without.")
    return Verdict(question, "yes" if control.passed else "no" if control.could_pass else "unknown", sentences)


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
        right, asked = round((papers["accuracy"] * papers["n_prompts"]).sum()), int(papers["n_prompts"].sum())
        roles = "receivers and senders" if run.scores.senders else "receivers"
        clear = "" if result.low <= right / asked <= result.high else ("fewer" if right / asked < result.low else "more")
        sentences.append(
            f"A mask of the same size from HydraHead's composite of {roles} keeps {percent(right / asked)}: "
            f"{f'clearly {clear} than the selected one' if clear else 'these prompts cannot tell the two apart'}."
        )
    if result.none >= result.full - 0.1:
        sentences.append(f"With no full head at all {percent(result.none)} are right, so these prompts hardly need far context and cannot tell masks apart.")
    elif result.beats_random and result.selected < result.full - 0.1:
        sentences.append("It is better than random and still short of all heads: the rest is for training, or for a larger budget, to win back.")
    return Verdict(question, "yes" if result.beats_random else "no", sentences)
