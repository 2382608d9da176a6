"""Does the mask mean anything? Two checks on prompts that were not used for scoring, each beside random heads.

``knockout_curve``: retrieval accuracy as the best heads are ablated (HydraHead Fig. 9b). ``mask_preview``: accuracy when every
head outside the mask sees only attention sinks and a recent window, without any training.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from scipy.stats import binomtest
from torch import Tensor
from tqdm.auto import tqdm

from hydralens.errors import InputError
from hydralens.models.forward import Attention, trace
from hydralens.models.lens import LensModel
from hydralens.patching.ablation import mean_z
from hydralens.patching.batching import in_batches
from hydralens.patching.pairs import Pair, unpad
from hydralens.patching.restriction import SINKS, WINDOW, restricted_attention
from hydralens.patching.sweep import default_batch_tokens
from hydralens.probes.base import Probe
from hydralens.probes.solving import lead

Heads = list[tuple[int, int]]


def knockout_curve(
    model: LensModel, ranking: Heads, probes: Sequence[Probe], counts: Sequence[int], n_draws: int = 3, seed: int = 0, verbose: bool = False
) -> pd.DataFrame:
    """Accuracy with the first ``k`` heads of ``ranking`` mean-ablated, for each ``k`` in ``counts``, beside random heads of the same layers.

    The mean is taken over the probes' own clean prompts. A random draw takes as many heads from each layer as the ranking does,
    none of them among the ranking's first ``k``; where a layer has too few others, the rest comes from other layers, as far as they have any.

    Returns:
        One row per (k, order, draw): k, order (``scored`` or ``random``), draw, accuracy (first answer token by argmax),
        ci_low, ci_high (95 % Wilson), margin (logits, answer minus best other token), n_prompts.
    """
    generator = np.random.default_rng(seed)
    sets = [(k, "scored", 0, ranking[:k]) for k in counts]
    sets += [(k, "random", draw, _others_of_same_layers(ranking[:k], model, generator)) for k in counts if k for draw in range(n_draws)]
    removed = torch.zeros(len(sets), model.info.n_layers, model.info.n_heads, dtype=torch.bool)
    for row, (*_, heads) in enumerate(sets):
        for cell in heads:
            removed[row][cell] = True
    margins = ablated_margins(model, removed, probes, verbose).numpy()
    return pd.DataFrame([{"k": k, "order": order, "draw": draw} | _summary(own) for (k, order, draw, _), own in zip(sets, margins, strict=True)])


def ablated_margins(model: LensModel, removed: Bool[Tensor, "set layer head"], probes: Sequence[Probe], verbose: bool = False) -> Float[Tensor, "set prompt"]:
    """Lead of the first answer token over the best other, in logits, with each set of heads mean-ablated; the mean is over the probes' clean prompts."""
    anatomy, reference = model.anatomy, mean_z(model, probes)

    def without(rows: Sequence[int]) -> Attention:
        own = removed[rows].to(model.device)

        def attention(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            z = anatomy.layers[index].attend(q, k, v)
            return torch.where(own[:, index, :][:, None, :, None], reference[index].to(z), z)

        return attention

    return _margins(model, tqdm(list(_pairs(model, probes)), desc="knock-out", disable=not verbose), len(removed), without)


def mask_preview(
    model: LensModel,
    masks: Mapping[str, Sequence[Bool[Tensor, "layer head"]]],
    probes: Sequence[Probe],
    window: int = WINDOW,
    sinks: int = SINKS,
    verbose: bool = False,
) -> pd.DataFrame:
    """Accuracy when heads outside a mask see only ``sinks`` and the last ``window`` positions, at every position of the prompt.

    Only the prompts that need far context are asked, see ``far_prompts``.

    Args:
        masks: name -> masks (several for random draws), each bool ``[layer, head]``, True = the head sees everything.

    Returns:
        One row per (mask, draw, task): mask, draw, task (the probe's name), accuracy, ci_low, ci_high, margin, n_prompts.

    Raises:
        InputError: every prompt of a probe is left out.
    """
    draws = [(name, draw, mask) for name, group in masks.items() for draw, mask in enumerate(group)]
    rows = []
    for probe in tqdm(probes, desc="mask preview", disable=not verbose):
        margins = mask_margins(model, torch.stack([mask for *_, mask in draws]), far_prompts(model, probe, window), window, sinks)
        rows += [{"mask": name, "draw": draw, "task": probe.name} | _summary(own.numpy()) for (name, draw, _), own in zip(draws, margins, strict=True)]
    order = {name: index for index, name in enumerate(masks)}
    return pd.DataFrame(sorted(rows, key=lambda row: (order[row["mask"]], row["draw"])))


def mask_margins(
    model: LensModel, masks: Bool[Tensor, "mask layer head"], pairs: Sequence[Pair], window: int = WINDOW, sinks: int = SINKS
) -> Float[Tensor, "mask prompt"]:
    """Lead of the first answer token over the best other, in logits, with the heads outside each mask restricted; masks are rows of one batch."""
    return _margins(model, pairs, len(masks), lambda rows: restricted_attention(model.anatomy, masks[rows], window, sinks))


def far_prompts(model: LensModel, probe: Probe, window: int = WINDOW) -> list[Pair]:
    """The pairs, cut after the first read position, whose needle ends before the last ``window`` positions.

    Raises:
        InputError: there are none.
    """
    far = [pair for pair in _pairs(model, [probe]) if pair.needle[1] <= len(pair.clean) - window]
    if not far:
        raise InputError(f"{probe.name}: every needle ends within the window of {window} positions before the answer; use longer prompts (n_tokens)")
    return far


def random_masks(shape: tuple[int, int], k: int, n_draws: int, seed: int = 0) -> list[Bool[Tensor, "layer head"]]:
    """``n_draws`` masks of ``k`` heads drawn from the whole model."""
    generator = np.random.default_rng(seed)
    masks = torch.zeros(n_draws, shape[0] * shape[1], dtype=torch.bool)
    for mask in masks:
        mask[torch.from_numpy(generator.choice(mask.numel(), k, replace=False))] = True
    return list(masks.reshape(n_draws, *shape))


def _others_of_same_layers(chosen: Heads, model: LensModel, generator: np.random.Generator) -> Heads:
    taken, drawn, missing = set(chosen), [], 0
    for layer in sorted({layer for layer, _ in chosen}):
        wanted = sum(layer == other for other, _ in chosen)
        free = [(layer, head) for head in range(model.info.n_heads) if (layer, head) not in taken]
        picked = generator.permutation(len(free))[:wanted]
        drawn += [free[index] for index in picked]
        missing += wanted - len(picked)
    left = [cell for cell in np.ndindex(model.info.n_layers, model.info.n_heads) if cell not in taken and cell not in set(drawn)]
    return drawn + [left[index] for index in generator.permutation(len(left))[:missing]]


def _pairs(model: LensModel, probes: Sequence[Probe]) -> Iterator[Pair]:
    """Clean prompts cut after the first read position: the first answer token decides."""
    for probe in probes:
        for index in range(probe.n_pairs):
            pair = unpad(probe, index, model.device)
            stop = int(pair.read[0]) + 1
            yield Pair(pair.clean[:stop], pair.corrupt[:stop], pair.answer[:1], pair.foil[:1], pair.read[:1], pair.needle)


@torch.no_grad()
def _margins(model: LensModel, pairs: Iterable[Pair], n: int, attention: Callable[[Sequence[int]], Attention]) -> Float[Tensor, "row prompt"]:
    """The answer's lead in each of ``n`` versions of the model, which are rows of one batch: ``attention(rows)`` is theirs."""
    margins = []
    for pair in pairs:

        def lead_of(rows: Sequence[int], pair: Pair = pair) -> Float[Tensor, "row"]:
            run = trace(model.anatomy, pair.clean.expand(len(rows), -1), pair.read[:1], attention=attention(rows))
            return torch.stack([lead(logits, pair.answer[0]) for logits in model.anatomy.logits(run.final[:, 0])]).float().cpu()

        margins.append(in_batches(lead_of, range(n), max(1, default_batch_tokens(model) // len(pair.clean))))
    return torch.stack(margins, 1)


def _summary(margins: np.ndarray) -> dict:
    right = int((margins > 0).sum())
    low, high = binomtest(right, len(margins)).proportion_ci(method="wilson")
    return {"accuracy": right / len(margins), "ci_low": low, "ci_high": high, "margin": float(margins.mean()), "n_prompts": len(margins)}
