"""Activation patching of every head at once (HydraHead Eq. 10 and its total-effect twin).

One pair of prompts at a time, unpadded. What makes a sweep cheap, all of it exact:

* the tokens before the first difference of clean and corrupt are run once for both;
* patching q, k or v of a head changes nothing in its own layer but the z of the heads that read it, so every intervention is
  a replacement of z ("alternative z"), and one attention call per layer gives the alternatives of all its heads;
* a patched run starts at the patched layer, from the base run's residual stream, at the first position that can change; runs
  of many heads are rows of one batch that grows as the layers go by;
* direct effects freeze later attention, so everything after the patched z is position-wise and only the read positions are run;
* only the logits that the metric compares are computed.
"""

from collections.abc import Collection
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from hydralens.errors import InputError, check_word
from hydralens.models.anatomy import Anatomy
from hydralens.models.lens import LensModel
from hydralens.patching.attribution import METHODS, attribution_patch
from hydralens.patching.backends import BACKENDS, activations_through
from hydralens.patching.batching import in_batches
from hydralens.patching.effects import HeadEffects
from hydralens.patching.pairs import COMPONENTS, DIRECTIONS, POSITIONS, Pair, chosen_heads
from hydralens.patching.runs import NO_HEAD, Cell, alternative_z, patched_runs, run_pair
from hydralens.patching.sweep import Measure, Metric, Patched, default_batch_tokens, sweep
from hydralens.probes.base import Probe

MODES = ("direct", "total")


@torch.no_grad()
def activation_patch(
    model: LensModel,
    probe: Probe,
    component: str = "z",
    mode: str = "direct",
    direction: str = "noise",
    positions: str = "answer",
    *,
    heads: Collection[tuple[int, int]] | None = None,
    prefilter: str | None = None,
    verify: int | None = None,
    backend: str = "hooks",
    readout: str = "span",
    metric: Metric | None = None,
    min_span: float = 1e-6,
    batch_tokens: int | None = None,
    verbose: bool = False,
) -> HeadEffects:
    """Patch each head of each layer in turn and measure the normalised effect on the answer.

    ``noise`` inserts corrupt activations into the clean run: IE = (m(clean) - m(patched)) / (m(clean) - m(corrupt)).
    ``denoise`` inserts clean activations into the corrupt run: IE = (m(patched) - m(corrupt)) / (m(clean) - m(corrupt)).

    Args:
        component: ``z`` (a head's output before the output projection), ``q`` (query heads), ``k`` or ``v`` (KV heads: all query
            heads of the group see the change).
        mode: ``direct`` holds all later attention at the base run's values (HydraHead App. C.1); ``total`` recomputes everything.
        positions: where the head is patched: ``answer`` (the read positions), ``needle``, ``suffix`` (from the first token in which
            clean and corrupt differ; before it the two runs are equal) or ``all``. Direct effects of z and q at any other position
            than the read positions are zero by definition.
        heads: only these ``(layer, head)`` are patched (KV heads for k and v), the others are NaN; default: all.
        prefilter: ``atp``, ``atp*`` or ``eap-ig`` (see ``attribution_patch``): estimate the total effect of every head, and measure the ``verify``
            heads of the largest absolute mean estimate exactly; the others are NaN. A head that works against the answer matters as much as one
            that works for it. Estimates are nearest to the exact effects with ``direction="denoise"``; ``attribution_error`` says how near.
        verify: how many heads (KV heads for k and v) ``prefilter`` leaves to be measured.
        backend: ``hooks``, this project's engine; or ``transformer_lens`` or ``nnsight``: the same through that library's own hooks, one full forward
            a head, to check against.
        readout: ``span`` (Eq. 9) or ``first`` (the first answer token alone).
        metric: instead of the logit difference: ``metric(logits [row, n, vocab], answer [n], foil [n]) -> [row]``.
        min_span: pairs whose |clean - corrupt| metric is smaller are not kept.
        batch_tokens: tokens of patched runs that the engine computes at once; halved when memory runs out.
        verbose: a progress bar on stderr.

    Returns:
        HeadEffects with ``per_pair [pair, layer, head]``; the head axis counts KV heads for k and v. With ``prefilter``, ``estimate``
        is every head's.

    Raises:
        InputError: an argument is not one of the words above, a head does not exist, no pair is kept, ``prefilter`` and ``verify`` do not fit
            together or are given for direct effects, or the backend's library is not installed.
    """
    check_word("component", component, COMPONENTS)
    check_word("mode", mode, MODES)
    check_word("direction", direction, DIRECTIONS)
    check_word("positions", positions, POSITIONS)
    check_word("backend", backend, BACKENDS)
    anatomy = model.anatomy
    batch_tokens = batch_tokens or default_batch_tokens(model)
    columns_per_layer = anatomy.n_kv_heads if component in ("k", "v") else anatomy.n_heads
    cells = chosen_heads(heads, anatomy.n_layers, columns_per_layer)
    measured = {"readout": readout, "metric": metric, "min_span": min_span, "verbose": verbose}
    estimate = None
    if prefilter is not None or verify is not None:
        _check_prefilter(prefilter, verify, mode, len(cells))
        estimated = attribution_patch(model, probe, component, prefilter, direction, positions, **measured)
        estimate, strength = estimated.per_pair, estimated.values.abs()
        cells = sorted(sorted(cells, key=lambda cell: -float(strength[cell]))[:verify])

    def patch(pair: Pair, measure: Measure) -> Patched:
        return _patch_pair(anatomy, pair, measure, cells, component, mode, direction, positions, batch_tokens)

    if backend != "hooks":
        patch = activations_through(backend, model, cells, component, mode, direction, positions, readout, metric)
    about = {"component": component, "mode": mode, "direction": direction, "positions": positions}
    return replace(sweep(model, probe, patch, (anatomy.n_layers, columns_per_layer), **measured, **about), estimate=estimate)


def _check_prefilter(prefilter: str | None, verify: int | None, mode: str, n_heads: int) -> None:
    if prefilter is None or verify is None:
        raise InputError(f"prefilter {prefilter!r} and verify {verify!r} go together: how heads are ranked, and how many of the first are measured exactly")
    check_word("prefilter", prefilter, METHODS)
    if mode != "total":
        raise InputError(f"prefilter {prefilter!r} estimates total effects; use mode='total', or leave it out: direct effects of all heads cost no more")
    if not 1 <= verify <= n_heads:
        raise InputError(f"verify {verify} is not between 1 and the {n_heads} heads that there are")


def _patch_pair(
    anatomy: Anatomy,
    pair: Pair,
    measure: Measure,
    cells: list[Cell],
    component: str,
    mode: str,
    direction: str,
    positions: str,
    batch_tokens: int,
) -> Patched:
    attended = ("q", "k", "v") if component != "z" else () if mode == "direct" or "k" not in anatomy.past else ("k", "v")
    both = run_pair(anatomy, pair, positions, ("residual", "z", "written", *attended), read_only=mode == "direct")
    read = pair.read - both.start
    clean, corrupt = measure(both.runs.final[:, read])
    base, source = (0, 1) if direction == "noise" else (1, 0)
    alternatives = alternative_z(anatomy, both, base, source, component)
    group = anatomy.group if component in ("k", "v") else 1

    def patched_metric(cells: list[Cell]) -> Float[Tensor, "cell"]:
        cells = [(cells[0][0], NO_HEAD), *cells]
        *_, (_, rows) = patched_runs(anatomy, both, base, alternatives, cells, group=group, live=mode == "total")
        metrics = measure(rows[:, read])
        return (clean, corrupt)[base] + metrics[1:] - metrics[0]

    values = in_batches(patched_metric, cells, max(1, batch_tokens // len(both.runs.columns)))
    effects = torch.full((anatomy.n_layers, anatomy.n_heads // group), torch.nan, dtype=values.dtype, device=values.device)
    effects[tuple(torch.tensor(cells, device=values.device).T)] = values
    return Patched(clean, corrupt, effects, anatomy.logits(both.runs.final[0, read[0]]).argmax())
