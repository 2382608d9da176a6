"""What all detectors share: pair by pair over a probe, probe by probe into ``HeadScores``.

Detectors see the clean prompts only, with the right answer forced. A pair counts when the model answers it: the first answer token has
the highest logit.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from hydralens.errors import ProbeNotSolvedError
from hydralens.models.info import ModelInfo
from hydralens.models.lens import LensModel
from hydralens.patching.effects import HeadEffects
from hydralens.patching.pairs import Pair, unpad
from hydralens.probes.base import Probe
from hydralens.probes.solving import lead
from hydralens.scores import HeadScores, by_label, describe, scores_of

# One pair: every head's score, and the final residual stream at the read positions.
OfPair = Callable[[Pair], tuple[Float[Tensor, "layer head"], Float[Tensor, "read d_model"]]]


@torch.no_grad()
def effects_of(
    model: LensModel,
    probe: Probe,
    method: str,
    of_pair: OfPair,
    *,
    component: str,
    positions: str = "answer",
    readout: str = "lead",
    metric: Callable[[Float[Tensor, "read d_model"], Pair], Float[Tensor, ""]] | None = None,
    verbose: bool = False,
) -> HeadEffects:
    """The scores that ``of_pair`` gives for each clean prompt of ``probe``.

    Args:
        metric: what ``clean_metric`` holds; default: the lead of the first answer token over the best other, in logits.

    Returns:
        HeadEffects with ``per_pair [pair, layer, head]`` in the detector's own unit, ``corrupt_metric`` zero, and the answered pairs kept.
    """
    model.warn_of_bypassed_hooks()
    anatomy = model.anatomy
    per_pair, leads, metrics = [], [], []
    for index in tqdm(range(probe.n_pairs), desc=f"{method}: {probe.label}", disable=not verbose, leave=False):
        pair = unpad(probe, index, model.device)
        values, final = of_pair(pair)
        per_pair.append(values.float().cpu())
        leads.append(lead(anatomy.logits(final[0]), pair.answer[0]).float().cpu())
        metrics.append(leads[-1] if metric is None else metric(final, pair).float().cpu())
    answered = torch.stack(leads) > 0
    return HeadEffects(
        per_pair=torch.stack(per_pair),
        component=component,
        mode=method,
        direction="none",
        positions=positions,
        clean_metric=torch.stack(metrics),
        corrupt_metric=torch.zeros(probe.n_pairs),
        kept=answered,
        answered=answered.clone(),
        n_heads=anatomy.n_heads,
        n_kv_heads=anatomy.n_kv_heads,
        probe=probe.name,
        capability=probe.capability,
        corruption=probe.corruption,
        readout=readout,
    )


def over_probes(model: LensModel, probes: Sequence[Probe], method: str, effects: Callable[[Probe], HeadEffects]) -> HeadScores:
    """HeadScores from ``effects`` of each probe; probes of which the model answers no pair are left out.

    Raises:
        InputError: no probes, or two of one name and corruption.
        ProbeNotSolvedError: the model answers no pair of any probe.
    """
    measured = [(probe, effects(probe)) for probe in by_label(probes).values()]
    used = [(probe, effect) for probe, effect in measured if effect.kept.any()]
    if not used:
        asked = sum(probe.n_pairs for probe in probes)
        raise ProbeNotSolvedError(f"{method}: the model answers 0 of {asked} pairs; use shorter prompts (n_tokens), other probes or another model")
    return scores_of(model.info, method, [effect for _, effect in used], [describe(probe, effect.n_pairs, "none", method) for probe, effect in used])


def whole_effects(
    info: ModelInfo, method: str, per_row: Float[Tensor, "row layer head"], component: str, positions: str, name: str, capability: str
) -> HeadEffects:
    """HeadEffects of a detector that has no pairs: ``per_row`` holds its repetitions, all of them kept."""
    n_rows = len(per_row)
    return HeadEffects(
        per_pair=per_row.float().cpu(),
        component=component,
        mode=method,
        direction="none",
        positions=positions,
        clean_metric=torch.zeros(n_rows),
        corrupt_metric=torch.zeros(n_rows),
        kept=torch.ones(n_rows, dtype=torch.bool),
        answered=torch.ones(n_rows, dtype=torch.bool),
        n_heads=info.n_heads,
        n_kv_heads=info.n_kv_heads,
        probe=name,
        capability=capability,
        corruption="none",
        readout="none",
    )
