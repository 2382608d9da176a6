"""Any intervention on every head, pair by pair: what is patched differs, what is measured and recorded does not."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from hydralens.errors import InputError
from hydralens.models.lens import LensModel
from hydralens.patching.effects import HeadEffects
from hydralens.patching.metric import logit_difference
from hydralens.patching.pairs import Pair, unpad
from hydralens.probes.base import Probe

Metric = Callable[[Float[Tensor, "row n vocab"], Int[Tensor, "n"], Int[Tensor, "n"]], Float[Tensor, "row"]]
Measure = Callable[[Float[Tensor, "row n d_model"]], Float[Tensor, "row"]]  # from the residual stream at the read positions


@dataclass(frozen=True, eq=False)
class Patched:
    """Metric of the clean run, of the corrupt run and of every patched run; and the clean run's choice for the first answer token."""

    clean: Float[Tensor, ""]
    corrupt: Float[Tensor, ""]
    values: Float[Tensor, "... layer head"]  # NaN where nothing was patched
    first_token: Int[Tensor, ""]


def default_batch_tokens(model: LensModel) -> int:
    """Tokens of patched runs that are computed at once unless the user says otherwise."""
    return 2**16 if model.device.type == "cuda" else 2**12


def sweep(
    model: LensModel,
    probe: Probe,
    patch: Callable[[Pair, Measure], Patched],
    shape: tuple[int, ...],
    *,
    direction: str,
    readout: str,
    metric: Metric | None,
    min_span: float,
    verbose: bool,
    **about: str,
) -> HeadEffects:
    """Normalised effects of ``patch``, whose values have the given shape, ``[..., layer, head]``, over the pairs of ``probe``.

    Raises:
        InputError: no pair is kept.
    """
    model.warn_of_bypassed_hooks()
    anatomy = model.anatomy
    per_pair = torch.full((probe.n_pairs, *shape), torch.nan)
    baselines = torch.full((2, probe.n_pairs), torch.nan)
    answered = torch.zeros(probe.n_pairs, dtype=torch.bool)
    for index in tqdm(range(probe.n_pairs), desc=probe.label, disable=not verbose, leave=False):
        pair = unpad(probe, index, model.device)

        def measure(residual: Float[Tensor, "row n d_model"], pair: Pair = pair) -> Float[Tensor, "row"]:
            if metric is None:
                return logit_difference(anatomy, residual, pair.answer, pair.foil, readout)
            return metric(anatomy.logits(residual), pair.answer, pair.foil)

        result = patch(pair, measure)
        answered[index] = bool(result.first_token == pair.answer[0])
        span = result.clean - result.corrupt
        baselines[:, index] = torch.stack((result.clean, result.corrupt)).float().cpu()
        if span != 0 and abs(float(span)) >= min_span:
            change = result.clean - result.values if direction == "noise" else result.values - result.corrupt
            per_pair[index] = (change / span).float().cpu()

    kept = (baselines[0] - baselines[1]).abs() >= min_span
    if not kept.any():
        raise InputError(f"probe {probe.name}: clean and corrupt metric agree within {min_span:g} in all {probe.n_pairs} pairs: nothing to explain")
    return HeadEffects(
        per_pair=per_pair,
        direction=direction,
        clean_metric=baselines[0],
        corrupt_metric=baselines[1],
        kept=kept,
        answered=answered,
        n_heads=anatomy.n_heads,
        n_kv_heads=anatomy.n_kv_heads,
        probe=probe.name,
        capability=probe.capability,
        corruption=probe.corruption,
        readout=readout if metric is None else "custom",
        **about,
    )
