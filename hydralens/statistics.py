"""How sure are the results: tests against zero, agreement of head maps, how many pairs are enough, intervals and the positive control.

Head maps are zero-inflated: most heads do nothing, so that ranks over all heads are mostly the order of noise or of exact zeros. That is why
agreement is always given twice, by the overlap of the best ``k`` heads and by a correlation over all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int, Shaped
from scipy.stats import false_discovery_control, fisher_exact, rankdata
from torch import Tensor

from hydralens.errors import InputError, check_word
from hydralens.models.lens import LensModel
from hydralens.patching.effects import HeadEffects
from hydralens.probes.needles import retrieval
from hydralens.scores import HeadScores, all_probes
from hydralens.scoring import PAIRS_AT_MOST, score_heads

EXACT = 12  # pairs up to which all 2^n sign patterns are tried
FLIPS = 100_000  # random sign patterns otherwise: one head of five thousand can still pass a correction over all of them
BLOCK = 1024  # sign patterns in one matrix product
ALTERNATIVES = ("two-sided", "greater")
LEVEL = 0.05  # of the positive control, and the false-discovery rate at which heads are reported
CONTROL_COLUMNS = ("k", "order", "draw", "accuracy", "n_prompts")

Alternative = Literal["two-sided", "greater"]


# --- which effects are not zero ------------------------------------------------------------------------------------


def sign_flip_p(
    per_pair: Float[Tensor, "pair layer head"], alternative: Alternative = "two-sided", n_flips: int = FLIPS, seed: int = 0
) -> Float[Tensor, "layer head"]:
    """Sign-flip test, head by head, of the null that a pair's effect is as likely ``+x`` as ``-x`` (so: mean 0).

    Up to twelve pairs all sign patterns are tried and p is exact; above, ``n_flips`` random ones and the observed one, so that p is valid
    and never 0. The smallest p that can come out is ``smallest_p``: with six pairs 0.031 (two-sided), which no correction over hundreds of
    heads lets pass; ten pairs are 0.002.

    Args:
        per_pair: one effect a pair; pairs that do not count left out (``effects.per_pair[effects.kept]``).
        alternative: ``"two-sided"``, or ``"greater"``: the mean is above 0.

    Returns:
        float64; NaN for a head with a NaN in any pair, and for all where there are no pairs.

    Raises:
        InputError: an unknown alternative.
    """
    check_word("alternative", alternative, ALTERNATIVES)
    n_pairs = len(per_pair)
    if n_pairs == 0:
        return torch.full(per_pair.shape[1:], torch.nan, dtype=torch.float64)
    values = per_pair.double().flatten(1)
    if n_pairs <= EXACT:
        signs = torch.tensor(list(product((1.0, -1.0), repeat=n_pairs)), dtype=torch.float64)
    else:
        signs = torch.from_numpy(np.random.default_rng(seed).choice((1.0, -1.0), size=(n_flips, n_pairs)))

    def statistic(sums: Tensor) -> Tensor:
        return sums.abs() if alternative == "two-sided" else sums

    # A pattern that gives the observed sum must count, however its terms were added up.
    least = statistic(values.sum(0)) - 1e-9 * values.abs().sum(0)
    as_large = sum((statistic(block @ values) >= least).double().sum(0) for block in signs.split(BLOCK))
    p = as_large / len(signs) if n_pairs <= EXACT else (as_large + 1) / (len(signs) + 1)
    return p.masked_fill(values.isnan().any(0), torch.nan).reshape(per_pair.shape[1:])


def smallest_p(n_pairs: int, alternative: Alternative = "two-sided", n_flips: int = FLIPS) -> float:
    """The smallest p that ``sign_flip_p`` can give: ``2 / 2^n`` or ``1 / 2^n`` up to twelve pairs, ``1 / (n_flips + 1)`` above."""
    return 2.0 ** ((alternative == "two-sided") - n_pairs) if n_pairs <= EXACT else 1 / (n_flips + 1)


def false_discovery(p: Float[Tensor, "layer head"], method: Literal["bh", "by"] = "bh") -> Float[Tensor, "layer head"]:
    """q: the false-discovery rate at which a head would just be reported, over the heads that have a p; NaN stays NaN.

    Args:
        method: ``"bh"`` (Benjamini and Hochberg 1995; for independent or positively dependent tests), ``"by"`` (Benjamini and Yekutieli
            2001; for any dependence, and stricter).

    Raises:
        InputError: an unknown method.
    """
    check_word("method", method, ("bh", "by"))
    known = p.isfinite()
    q = torch.full(p.shape, torch.nan, dtype=torch.float64)
    q[known] = torch.from_numpy(false_discovery_control(p[known].double().numpy(), method=method))
    return q


def significance(effects: HeadEffects, alternative: Alternative = "two-sided", method: Literal["bh", "by"] = "bh") -> pd.DataFrame:
    """``effects.to_frame()`` with the columns p (sign-flip test) and q (false-discovery rate over these heads). For scores see ``pooled``."""
    p = sign_flip_p(effects.per_pair[effects.kept], alternative)
    return effects.to_frame().assign(p=p.flatten().numpy(), q=false_discovery(p, method).flatten().numpy())


def pooled(scores: HeadScores) -> HeadEffects:
    """The effects a composite is made from, of all probes together: one row a prompt that counts, every prompt with equal weight.

    One probe's few pairs cannot pass a correction over all heads; the prompts of all probes can. Probes of one name share their clean prompts,
    pair by pair, whatever the corruption; their mean is one row, so that no prompt is counted twice.
    """
    prompts: dict[tuple[str, str, int], list[tuple[HeadEffects, int]]] = {}
    for effect in all_probes(scores.made_from).values():
        for pair in effect.kept.nonzero()[:, 0].tolist():
            prompts.setdefault((effect.capability, effect.probe, pair), []).append((effect, pair))

    def rows(field: str) -> Tensor:
        return torch.stack([torch.stack([getattr(effect, field)[pair] for effect, pair in same]).float().mean(0) for same in prompts.values()])

    every = torch.ones(len(prompts), dtype=torch.bool)
    means = {field: rows(field) for field in ("per_pair", "clean_metric", "corrupt_metric")}
    like = next(iter(all_probes(scores.made_from).values()))
    return replace(like, **means, kept=every, answered=every, probe="all probes", capability=" and ".join(scores.made_from), corruption="all")


# --- agreement of head maps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How alike two head maps are.

    Attributes:
        k: heads in the top.
        top_k_overlap: share of the top ``k`` in common, 0 to 1; two unrelated maps share ``k / n_heads`` on average.
        jaccard: the same heads as a share of their union.
        spearman, pearson: over all heads; NaN where a map is constant. With many zeros Spearman says little about the top: ties and
            noise among the heads that do nothing outnumber it.
        zeros_a, zeros_b: heads whose value is exactly 0.
    """

    k: int
    top_k_overlap: float
    jaccard: float
    spearman: float
    pearson: float
    zeros_a: int
    zeros_b: int


def agreement(a: Float[Tensor, "layer head"], b: Float[Tensor, "layer head"], k: int) -> Agreement:
    """Compare two head maps.

    Where heads tie for the last places of a top ``k`` (zeros, mostly), the overlap is its mean over all ways to break the ties, in each map
    for itself: two maps that both run out of heads with signal do not agree by sharing a tie-break. NaN ranks last and enters no correlation.

    Raises:
        InputError: maps of different shapes, or no top ``k`` in them.
    """
    if a.shape != b.shape:
        raise InputError(f"the head maps have shapes {tuple(a.shape)} and {tuple(b.shape)}; only maps of one model can be compared")
    if not 1 <= k <= a.numel():
        raise InputError(f"k is {k}; it must be from 1 to the number of heads, {a.numel()}")
    overlap = float((_in_top(a, k) * _in_top(b, k)).sum()) / k
    known = (a.isfinite() & b.isfinite()).flatten()
    x, y = (values.flatten()[known].double().numpy() for values in (a, b))
    return Agreement(k, overlap, overlap / (2 - overlap), _pearson(rankdata(x), rankdata(y)), _pearson(x, y), int((a == 0).sum()), int((b == 0).sum()))


def _in_top(values: Float[Tensor, "layer head"], k: int) -> Float[Tensor, "cell"]:
    """For each head the chance to be among the best ``k`` when ties are broken at random."""
    flat = values.flatten().double().nan_to_num(-torch.inf)
    last = flat.topk(k).values[-1]
    above, tied = flat > last, flat == last
    return above + tied * (k - above.sum()) / tied.sum()


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(x, y)[0, 1]) if len(x) and np.ptp(x) and np.ptp(y) else float("nan")


def fewest_pairs(scores: HeadScores | HeadEffects) -> int:
    """The fewest pairs that count in any of the effects a map is made from; halves need two, a curve of ``pairs_curve`` with two points four."""
    return min(effect.n_pairs for effect in _sources(scores))


def split_half(scores: HeadScores | HeadEffects, k: int, n_splits: int = 20, seed: int = 0) -> dict[str, float]:
    """Agreement of the maps of two random halves of the pairs, over ``n_splits`` splits.

    Each half is scored by the same method from half the pairs, so this is a lower bound on how well all pairs reproduce. All corruptions of a
    prompt go to the same half, if the same pairs count in all of them.

    Returns:
        k, n_splits, and mean, smallest and largest over the splits of both measures: top_k_overlap, top_k_overlap_low, top_k_overlap_high,
        spearman, spearman_low, spearman_high.

    Raises:
        InputError: a probe has fewer than two pairs that count, or there is no top ``k``.
    """
    splits = _splits(scores, k, n_splits, seed)
    summary: dict[str, float] = {"k": k, "n_splits": n_splits}
    for measure in ("top_k_overlap", "spearman"):
        values = splits[measure]
        summary |= {measure: float(values.mean()), f"{measure}_low": float(values.min()), f"{measure}_high": float(values.max())}
    return summary


def stability(scores_by: Mapping[str, HeadScores], k: int) -> pd.DataFrame:
    """Agreement of every two conditions (seeds, context lengths, needle depths, fillers), see ``vary``.

    Returns:
        Columns a, b (names of conditions) and those of ``Agreement``; one row per two conditions, and one with ``a == b`` per condition whose
        probes have two pairs or more: the mean agreement of random halves of its own pairs, which is what chance alone leaves.

    Raises:
        InputError: fewer than two conditions, scores of different shapes, or no top ``k``.
    """
    if len(scores_by) < 2:
        raise InputError(f"stability compares conditions; {len(scores_by)} given, give at least two")
    rows: list[dict] = []
    for name, scores in scores_by.items():
        if fewest_pairs(scores) > 1:
            rows.append({"a": name, "b": name} | _splits(scores, k).mean().to_dict())
    for a, b in combinations(scores_by, 2):
        rows.append({"a": a, "b": b} | asdict(agreement(scores_by[a].composite, scores_by[b].composite, k)))
    return pd.DataFrame(rows).astype({"k": int})


def vary(
    model: LensModel,
    conditions: Mapping[str, Mapping[str, Any]],
    method: str = "restriction",
    pairs_at_most: int = PAIRS_AT_MOST,
    verbose: bool = False,
    **shared: Any,
) -> dict[str, HeadScores]:
    """Scores from the retrieval probes of each condition, for ``stability``.

    Args:
        conditions: name -> arguments of ``probes.retrieval``: ``{"seed 0": {"seed": 0}, "seed 1": {"seed": 1}}``; ``n_tokens``, ``depth`` and
            ``haystack`` vary context length, needle depth and filler.
        method, pairs_at_most: how heads are scored, see ``score_heads``.
        shared: arguments of ``probes.retrieval`` that all conditions share.

    Raises:
        InputError: wrong arguments of the probes.
        ProbeNotSolvedError: the model solves no probe of a condition.
    """
    probes = {name: retrieval(model, **{**shared, **arguments}) for name, arguments in conditions.items()}
    return {name: score_heads(model, asked, method=method, pairs_at_most=pairs_at_most, verbose=verbose) for name, asked in probes.items()}


def pairs_curve(scores: HeadScores | HeadEffects, k: int, sizes: Sequence[int] | None = None, n_draws: int = 20, seed: int = 0) -> pd.DataFrame:
    """How many pairs are enough: agreement of the map from ``n`` pairs a probe with that of ``n`` other pairs, and with that of all pairs.

    Agreement with other pairs is the honest measure: what a second run of that size would give. The ``n`` pairs are among all pairs, so
    agreement with all is too good, and 1 where ``n`` is all of them.

    Args:
        sizes: pairs per probe; default 1, 2, 4, .. and the most of which there are two sets. Two sets exist up to half the fewest pairs that
            a probe has; larger sizes are compared with all pairs only.

    Returns:
        One row per (n_pairs, against, draw), against ``"other pairs"`` or ``"all pairs"``, with the columns of ``Agreement``.

    Raises:
        InputError: a size that is not from 1 to the fewest pairs of a probe, or no top ``k``.
    """
    most = fewest_pairs(scores)
    if sizes is None:
        sizes = sorted({1, *(2**i for i in range(most.bit_length()) if 2 ** (i + 1) <= most), max(1, most // 2)})
    for n in sizes:
        if not 1 <= n <= most:
            raise InputError(f"sizes has {n} pairs; it must be from 1 to the fewest pairs that count in a probe, {most}")
    everything = _map(scores, torch.arange(_longest(scores)), slice(None))
    rows: list[dict] = []
    for draw, order in enumerate(_orders(scores, n_draws, seed)):
        for n in sizes:
            mine = _map(scores, order, slice(0, n))
            others = {"all pairs": everything}
            if 2 * n <= most:
                others["other pairs"] = _map(scores, order, slice(n, 2 * n))
            rows += [{"n_pairs": n, "against": name, "draw": draw} | asdict(agreement(mine, other, k)) for name, other in others.items()]
    return pd.DataFrame(rows).sort_values(["against", "n_pairs", "draw"], ignore_index=True)


def _splits(scores: HeadScores | HeadEffects, k: int, n_splits: int = 20, seed: int = 0) -> pd.DataFrame:
    """One row a split: the agreement of its two halves."""
    fewest = fewest_pairs(scores)
    if fewest < 2:
        raise InputError(f"a probe has {fewest} pairs that count, and two halves need at least 2; use more pairs (n_pairs)")
    halves = ([_map(scores, order, slice(half, None, 2)) for half in (0, 1)] for order in _orders(scores, n_splits, seed))
    return pd.DataFrame([asdict(agreement(a, b, k)) for a, b in halves])


def _map(scores: HeadScores | HeadEffects, order: Int[Tensor, "pair"], part: slice) -> Float[Tensor, "layer head"]:
    """The map from a part of every probe's pairs that count, taken in ``order``. One order for all probes keeps a prompt's corruptions together."""

    def choose(effect: HeadEffects) -> HeadEffects:
        mine = order[order < len(effect.kept)]
        return effect.select(mine[effect.kept[mine]][part])

    return scores.select(choose).composite if isinstance(scores, HeadScores) else choose(scores).values


def _orders(scores: HeadScores | HeadEffects, n: int, seed: int) -> Iterator[Int[Tensor, "pair"]]:
    generator = np.random.default_rng(seed)
    return (torch.from_numpy(generator.permutation(_longest(scores))) for _ in range(n))


def _sources(scores: HeadScores | HeadEffects) -> list[HeadEffects]:
    """All effects that the map is made from."""
    if isinstance(scores, HeadEffects):
        return [scores]
    roles = [scores.measured] if scores.measured else [scores.receivers, scores.senders]
    return [effect for role in roles for effect in all_probes(role).values()]


def _longest(scores: HeadScores | HeadEffects) -> int:
    return max(len(effect.kept) for effect in _sources(scores))


# --- accuracies ----------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float


def clustered_bootstrap(
    values: Shaped[Any, "item"], clusters: Shaped[Any, "item"], n_resamples: int = 10_000, seed: int = 0, confidence: float = 0.95
) -> Interval:
    """Mean of ``values`` and its bootstrap percentile interval when items come in clusters: several questions about one haystack, say.

    Whole clusters are drawn with replacement, so that what a cluster's items share is not counted as often as there are items. The interval is
    somewhat too narrow below about twenty clusters. It has no width where all clusters are alike (all answers right): that says that nothing
    was seen to vary, not that nothing does; a share of ``3 / n_clusters`` of them could still be otherwise. With one cluster it is NaN.

    Args:
        values: one number an item (1 for a right answer, 0 for a wrong one), any array-like.
        clusters: each item's cluster, by any label.

    Raises:
        InputError: no items, or not one cluster for each.
    """
    values, clusters = np.asarray(values, dtype=float), np.asarray(clusters)
    if values.ndim != 1 or len(values) == 0 or clusters.shape != values.shape:
        raise InputError(f"values and clusters have shapes {values.shape} and {clusters.shape}; both must be [item], with at least one item")
    index = np.unique(clusters, return_inverse=True)[1]
    totals, sizes = np.bincount(index, values), np.bincount(index)
    mean = float(values.mean())
    if len(sizes) < 2:
        return Interval(mean, float("nan"), float("nan"))
    draws = np.random.default_rng(seed).multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), size=n_resamples)
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws @ totals / (draws @ sizes), [tail, 1 - tail])
    return Interval(mean, float(low), float(high))


def clustered_difference(
    a: Shaped[Any, "item"], b: Shaped[Any, "item"], clusters: Shaped[Any, "item"], n_resamples: int = 10_000, seed: int = 0, confidence: float = 0.95
) -> Interval:
    """Mean of ``a - b``, item by item, with its interval as in ``clustered_bootstrap``: two masks asked the same questions, say.

    Raises:
        InputError: no items, or not one ``a``, ``b`` and cluster for each.
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if a.shape != b.shape:
        raise InputError(f"a and b have shapes {a.shape} and {b.shape}; a paired difference needs the same items in both")
    return clustered_bootstrap(a - b, clusters, n_resamples, seed, confidence)


# --- positive control ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ControlResult:
    """Does removing the heads that were found hurt clearly more than removing random ones?

    Attributes:
        k: heads removed, the fewest for which it is clear; if for none, those for which it is clearest.
        baseline, scored, random: accuracy of the whole model, without the ``k`` best-scored heads and without ``k`` random ones (mean of draws).
        p: of the difference at ``k``, corrected for all sizes that were tried.
        n_prompts, n_draws, n_sizes: prompts asked, random draws at ``k``, values of ``k``.
        could_pass: the model solves enough prompts for the loss of all of them to be clear. If not, the control says nothing.
        at_ceiling: the whole model is right on every prompt, so that small damage may not show.
        passed: ``p < 0.05``, and every random draw at ``k`` leaves more right answers.
    """

    k: int
    baseline: float
    scored: float
    random: float
    p: float
    n_prompts: int
    n_draws: int
    n_sizes: int
    could_pass: bool
    at_ceiling: bool
    passed: bool

    @property
    def sentence(self) -> str:
        """The result in one line."""
        if not (self.could_pass or self.passed):
            return (
                f"The positive control cannot tell: the whole model answers {self.baseline:.0%} of {self.n_prompts} prompts, too few to lose; "
                "use more prompts, or shorter ones."
            )
        numbers = f"{self.scored:.0%} of {self.n_prompts} prompts right without the {self.k} best-scored, {self.random:.0%} without {self.k} random"
        numbers += f", {self.baseline:.0%} with all (p = {self.p:.2g})."
        if self.passed:
            return f"The positive control passed: removing the heads found hurts. {numbers}"
        easy = " Every prompt was solved to begin with, so a harder probe might still show damage." if self.at_ceiling else ""
        return f"The positive control failed: removing the heads found does not clearly hurt more than removing others. {numbers}{easy}"


def positive_control(knockout: pd.DataFrame) -> ControlResult:
    """Read the frame of ``validation.knockout_curve`` as a test.

    At each ``k`` Fisher's exact test, one-sided, compares right and wrong answers without the best-scored heads and without random ones, with
    Holm's correction over the ``k``. The random draws are asked the same prompts, so their mean counts as one set of prompts, rounded down to
    whole answers; that both sides are asked the same prompts is not used. Both make the test careful, never bold.

    Args:
        knockout: columns k, order (``"scored"`` or ``"random"``), draw, accuracy, n_prompts; others are ignored.

    Raises:
        InputError: a column is missing, there is no row with ``k = 0``, or scored and random rows share no ``k``.
    """
    missing = [column for column in CONTROL_COLUMNS if column not in knockout.columns]
    if missing:
        raise InputError(f"the knock-out frame lacks {', '.join(missing)}; it needs {', '.join(CONTROL_COLUMNS)}")
    intact, removed = knockout[knockout["k"] == 0], knockout[knockout["k"] > 0]
    scored = removed[removed["order"] == "scored"].set_index("k")["accuracy"]
    random = removed[removed["order"] == "random"].groupby("k")["accuracy"]
    sizes = sorted(set(scored.index) & set(random.groups))
    if not sizes or intact.empty:
        raise InputError('the knock-out frame needs a row with k = 0 and rows with order "scored" and "random" at the same k > 0')
    n, baseline = int(intact["n_prompts"].iloc[0]), float(intact["accuracy"].iloc[0])
    p = dict(zip(sizes, _holm([_fewer_right(scored[k], random.get_group(k).mean(), n) for k in sizes]), strict=True))
    clear = [k for k in sizes if p[k] < LEVEL and scored[k] < random.get_group(k).min()]
    k = clear[0] if clear else min(sizes, key=p.get)
    return ControlResult(
        k=k,
        baseline=baseline,
        scored=float(scored[k]),
        random=float(random.get_group(k).mean()),
        p=p[k],
        n_prompts=n,
        n_draws=len(random.get_group(k)),
        n_sizes=len(sizes),
        could_pass=len(sizes) * _fewer_right(0, baseline, n) < LEVEL,
        at_ceiling=baseline == 1,
        passed=bool(clear),
    )


def _fewer_right(a: float, b: float, n: int) -> float:
    """p of Fisher's exact test that accuracy ``a`` is below ``b``, each of ``n`` prompts."""
    right_a, right_b = round(a * n), int(b * n + 1e-9)
    return float(fisher_exact([[right_a, n - right_a], [right_b, n - right_b]], alternative="less").pvalue)


def _holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979)."""
    ordered = np.argsort(p)
    corrected = np.empty(len(p))
    corrected[ordered] = np.maximum.accumulate(np.array(p)[ordered] * np.arange(len(p), 0, -1)).clip(max=1)
    return corrected.tolist()
