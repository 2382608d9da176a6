"""From scores to a mask: how many heads keep full attention, and which (HydraHead, Tables 6 and 7).

Every rule is exact and ends in a stated tie-break. Heads that could not be measured (a NaN score) are never chosen, and a
layer without a measured head counts for no rule.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate
from typing import Any, Literal, get_args

import numpy as np
import torch

from hydralens.errors import InputError
from hydralens.head_mask import HeadMask, parse_ratio
from hydralens.scores import HeadScores

Rule = Literal[
    "global",
    "global-constrained",
    "global-spread",
    "per-layer",
    "layer-random",
    "global-random",
    "random-constrained",
    "fixed",
    "layers-top",
    "layers-even",
    "kv-group",
]
RULES: tuple[str, ...] = get_args(Rule)
DEFAULT_RATIO = "7:1"
TIE_BREAK = "score desc, mean raw effect over probes desc, lower layer, lower head"


def heads_for_ratio(ratio: str, total: int) -> int:
    """Full heads among ``total`` at ``"r:1"`` (linear : full): ``total / (r + 1)``, halves up.

    Raises:
        InputError: not of the form r:1 with r above zero, or no head is left.
    """
    k = math.floor(total / (parse_ratio(ratio) + 1) + Fraction(1, 2))
    if k == 0:
        raise InputError(f"ratio {ratio!r} leaves 0 of {total} heads; the highest ratio that leaves one is {2 * total - 1}:1")
    return k


def select_heads(
    scores: HeadScores,
    ratio: str | None = None,
    k: int | None = None,
    rule: Rule = "global",
    *,
    seed: int = 0,
    max_gap: int = 4,
) -> HeadMask:
    """Choose the heads that keep full attention.

    Args:
        scores: ``composite`` decides; a head's mean raw effect over all probes breaks ties, then the lower layer, then the lower head.
        ratio: ``"r:1"``, linear : full heads; K is ``n_layers * n_heads / (r + 1)``, halves up. Default ``"7:1"`` unless ``k`` is given.
        k: the number of full heads, instead of ``ratio``.
        rule: one of

            ================== =====================================================================================================
            global             the K best heads of the model
            global-constrained the best K with at least one in every layer; what that costs: ``selection_report``
            global-spread      the best K with at most ``max_gap`` consecutive layers without a full head
            per-layer          the best K / n_layers of each layer; the remainder to the best heads still left, one a layer
            layer-random       the same numbers, random heads
            global-random      K random heads
            random-constrained one random head in every layer, the others random
            fixed              heads 0 .. K / n_layers - 1 of every layer; the remainder is the next head in evenly spaced layers
            layers-top         whole layers, highest sum of scores first; K is rounded to whole layers, halves up
            layers-even        whole layers, evenly spaced; K is rounded likewise
            kv-group           whole KV groups, highest sum of scores first, as many as the ratio leaves KV heads
                               (``n_layers * n_kv_heads / (r + 1)``, halves up): the most score that a KV cache of that size can keep
            ================== =====================================================================================================
        seed: for the random rules (numpy ``default_rng``); recorded in the mask.
        max_gap: for ``global-spread``.

    Raises:
        InputError: a ratio that is not r:1, ratio and k together, more heads than there are or were measured, fewer than the rule needs,
            an unknown rule, a negative seed.
    """
    model = scores.model
    total = model.n_layers * model.n_heads
    if rule not in RULES:
        raise InputError(f"rule {rule!r} is unknown; choose one of {', '.join(RULES)}")
    if ratio is not None and k is not None:
        raise InputError(f"ratio {ratio!r} and k={k} are two budgets; give one of them")
    if k is None:
        ratio = ratio or DEFAULT_RATIO
        k = heads_for_ratio(ratio, total)
    if type(k) is not int or not 1 <= k <= total:
        raise InputError(f"k is {k!r}, but the model has {model.n_layers} layers x {model.n_heads} heads; give a whole number from 1 to {total}")

    if seed < 0:
        raise InputError(f"seed is {seed}; give a whole number from 0 on")

    order = _order(scores)
    if k > len(order):
        raise InputError(f"k is {k}, but only {len(order)} of {total} heads were measured (the others' scores are NaN); choose at most {len(order)}")
    random = np.random.default_rng(seed).permutation(order)
    by_score, by_chance = _worth(order, scores), {int(cell): len(random) - place for place, cell in enumerate(random)}
    label, tie_break = rule, TIE_BREAK
    match rule:
        case "global":
            chosen = order[:k]
        case "global-constrained":
            chosen = _spread(by_score, k, 0, model.n_heads)
        case "global-spread":
            chosen, label = _spread(by_score, k, max_gap, model.n_heads), f"{rule}(max_gap={max_gap})"
        case "per-layer":
            chosen = _per_layer(order, k, model.n_heads)
        case "layer-random":
            chosen = _per_layer(random, k, model.n_heads)
        case "global-random":
            chosen = random[:k]
        case "random-constrained":
            chosen = _spread(by_chance, k, 0, model.n_heads)
        case "fixed":
            chosen, tie_break = _fixed(order, k, model.n_heads), "none, scores are not used"
        case "layers-top" | "layers-even":
            layers = [cells for cells in _blocks(order, model.n_heads) if len(cells) == model.n_heads]
            n = _rounded(k, model.n_heads)
            if not 1 <= n <= len(layers):
                raise InputError(f"rule {rule}: k={k} is {n} whole layers of {model.n_heads} heads, there are {len(layers)}; choose another ratio or rule")
            label = rule if n * model.n_heads == k else f"{rule}(k {k} rounded to {n * model.n_heads})"
            tie_break = f"score summed over the layer; equal sums: summed rank by {TIE_BREAK}" if rule == "layers-top" else "none, scores are not used"
            chosen = _best_blocks(layers, by_score, n) if rule == "layers-top" else [cell for place in _even(n, len(layers)) for cell in layers[place]]
        case "kv-group":
            groups = [cells for cells in _blocks(order, model.group) if len(cells) == model.group]
            n = _rounded(k, model.group) if ratio is None else heads_for_ratio(ratio, model.n_layers * model.n_kv_heads)
            if not 1 <= n <= len(groups):
                raise InputError(f"rule {rule}: k={k} is {n} KV groups of {model.group} heads, {len(groups)} were measured; choose another ratio or rule")
            label, tie_break = f"{rule}({n} KV heads)", f"score summed over the group; equal sums: summed rank by {TIE_BREAK}"
            chosen = _best_blocks(groups, by_score, n)
    if "random" in rule:
        label, tie_break = f"{rule}(seed={seed})", f"random order, numpy default_rng({seed})"

    full = torch.zeros(total, dtype=torch.bool)
    full[torch.as_tensor(np.array(chosen))] = True
    full = full.reshape(model.n_layers, model.n_heads)
    return HeadMask.of(full, model, rule=label, tie_break=tie_break, ratio=ratio, scores=scores.composite, probes=scores.probes)


def selection_report(scores: HeadScores, mask: HeadMask) -> dict[str, Any]:
    """What a mask keeps and what its rule cost, beside the same number of globally best heads.

    Keys: ``rule``; ``n_full``; ``head_share``; ``n_with_signal``; ``score_kept`` and ``score_global``, the summed scores of the full heads and of as
    many globally best ones; ``cost``, the share of ``score_global`` given up; ``n_forced``, full heads that are not among the best;
    ``layers_without_full``; ``kv_heads_kept``; ``kv_share``, the surviving part of the KV cache.

    Raises:
        InputError: the mask is another model's.
    """
    mask.check_model(scores.model)
    full = mask.to_query().array
    chosen = set(full.flatten().nonzero().flatten().tolist())
    best = _order(scores)[: len(chosen)].tolist()
    value = scores.composite.double().nan_to_num().flatten()
    kept, ceiling = float(value[sorted(chosen)].sum()), float(value[sorted(best)].sum())
    return {
        "rule": mask.selection.rule,
        "n_full": len(chosen),
        "head_share": len(chosen) / full.numel(),
        "n_with_signal": mask.selection.n_with_signal,
        "score_kept": kept,
        "score_global": ceiling,
        "cost": 1 - kept / ceiling if ceiling else 0.0,
        "n_forced": len(chosen - set(best)),
        "layers_without_full": int((~full.any(-1)).sum()),
        "kv_heads_kept": int(mask.kept_kv_heads.sum()),
        "kv_share": mask.kv_share,
    }


# --- orders: a cell is layer * n_heads + head --------------------------------------------------------------------------


def _order(scores: HeadScores) -> np.ndarray:
    """Measured cells, best first."""
    composite = scores.composite.double().flatten().numpy()
    if np.isinf(composite).any():
        raise InputError("scores.composite has an infinite value; scores must be finite, or NaN for heads that could not be measured")
    effects = [effect.values.double().flatten() for probes in scores.receivers.values() for effect in probes.values()]
    raw = torch.stack(effects).nanmean(0).nan_to_num(nan=-math.inf).numpy() if effects else np.zeros_like(composite)
    cells = np.flatnonzero(~np.isnan(composite))
    return cells[np.lexsort((cells, -raw[cells], -composite[cells]))]


def _worth(order: np.ndarray, scores: HeadScores) -> dict[int, int]:
    """An exact integer per cell whose sums compare by summed score first and by summed rank second.

    Sums of floats depend on their order, which would make rounding the tie-break; a float32 is a whole number of 2^-149.
    """
    composite, n = scores.composite.flatten().tolist(), len(order)
    return {int(cell): int(math.ldexp(composite[cell], 149)) * n * n + n - place for place, cell in enumerate(order)}


def _blocks(cells: Iterable[int], size: int) -> list[list[int]]:
    """The cells by block of ``size`` (a layer, a KV group), in model order; within a block in the given order."""
    blocks = defaultdict(list)
    for cell in cells:
        blocks[int(cell) // size].append(int(cell))
    return [blocks[block] for block in sorted(blocks)]


# --- rules ---------------------------------------------------------------------------------------------------------


def _spread(worth: dict[int, int], k: int, max_gap: int, n_heads: int) -> list[int]:
    """The ``k`` cells of the highest summed worth with at most ``max_gap`` consecutive layers without one, by dynamic programming over layers."""
    layers = _blocks(sorted(worth, key=worth.__getitem__, reverse=True), n_heads)
    if max_gap < 0:
        raise InputError(f"max_gap is {max_gap}; give the number of consecutive layers that may go without a full head, 0 or more")
    if k < (needed := len(layers) // (max_gap + 1)):
        raise InputError(
            f"at most {max_gap} of {len(layers)} layers in a row without a full head takes {needed} heads, k is {k}; lower the ratio or allow more"
        )
    best = {(0, 0): (0, ())}  # (layers since the last full head, heads so far) -> (worth, heads taken per layer, last first)
    for cells in layers:
        sums = list(accumulate(worth[cell] for cell in cells))
        step = {(gap + 1, taken): (total, (0, counts)) for (gap, taken), (total, counts) in best.items() if gap < max_gap}
        ahead = {}  # whatever the gap was, a full head here ends it
        for (_, taken), state in best.items():
            if taken not in ahead or state[0] > ahead[taken][0]:
                ahead[taken] = state
        for taken, (total, counts) in ahead.items():
            for n, gain in enumerate(sums[: k - taken], 1):
                if (0, taken + n) not in step or total + gain > step[0, taken + n][0]:
                    step[0, taken + n] = (total + gain, (n, counts))
        best = step
    _, counts = max((state for (_, taken), state in best.items() if taken == k), key=lambda state: state[0])
    chosen = []
    for cells in reversed(layers):
        n, counts = counts
        chosen += cells[:n]
    return chosen


def _per_layer(order: Iterable[int], k: int, n_heads: int) -> list[int]:
    """Every layer's first, every layer's second, ... until ``k``; the last round goes to the first in ``order``."""
    seen, ranked = defaultdict(int), []
    for place, cell in enumerate(order):
        ranked.append((seen[cell // n_heads], place, int(cell)))
        seen[cell // n_heads] += 1
    return [cell for _, _, cell in sorted(ranked)[:k]]


def _fixed(cells: np.ndarray, k: int, n_heads: int) -> list[int]:
    """The lowest heads of every layer, the last round in evenly spaced layers."""
    layers = sorted({int(cell) // n_heads for cell in cells})
    extra = {layers[place] for place in _even(k % len(layers), len(layers))}
    return _per_layer(sorted(map(int, cells), key=lambda cell: (cell % n_heads, cell // n_heads not in extra, cell)), k, n_heads)


def _best_blocks(blocks: list[list[int]], worth: dict[int, int], n: int) -> list[int]:
    """The ``n`` blocks of the highest summed worth; equal ones in model order."""
    return [cell for cells in sorted(blocks, key=lambda cells: -sum(worth[cell] for cell in cells))[:n] for cell in cells]


def _even(n: int, total: int) -> list[int]:
    """``n`` evenly spaced places of ``total``, each in the middle of its share."""
    return [(2 * place + 1) * total // (2 * n) for place in range(n)]


def _rounded(k: int, size: int) -> int:
    """``k / size``, halves up."""
    return (2 * k + size) // (2 * size)
