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

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hydralens.errors import InputError, check_word
from hydralens.models.anatomy import Anatomy
from hydralens.models.forward import attend_as
from hydralens.models.lens import LensModel
from hydralens.patching.batching import in_batches
from hydralens.patching.effects import HeadEffects
from hydralens.patching.pairs import COMPONENTS, DIRECTIONS, POSITIONS, Pair, check_heads
from hydralens.patching.runs import NO_HEAD, Cell, PairRuns, patched_runs, replaced_z, run_pair
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
        readout: ``span`` (Eq. 9) or ``first`` (the first answer token alone).
        metric: instead of the logit difference: ``metric(logits [row, n, vocab], answer [n], foil [n]) -> [row]``.
        min_span: pairs whose |clean - corrupt| metric is smaller are not kept.
        batch_tokens: tokens of patched runs computed at once; halved when memory runs out.
        verbose: a progress bar on stderr.

    Returns:
        HeadEffects with ``per_pair [pair, layer, head]``; the head axis counts KV heads for k and v.

    Raises:
        InputError: an argument is not one of the words above, a head does not exist, or no pair is kept.
    """
    check_word("component", component, COMPONENTS)
    check_word("mode", mode, MODES)
    check_word("direction", direction, DIRECTIONS)
    check_word("positions", positions, POSITIONS)
    anatomy = model.anatomy
    batch_tokens = batch_tokens or default_batch_tokens(model)
    columns_per_layer = anatomy.n_kv_heads if component in ("k", "v") else anatomy.n_heads
    cells = sorted(set(heads)) if heads is not None else list(np.ndindex(anatomy.n_layers, columns_per_layer))
    if not cells:
        raise InputError("heads is empty; give at least one (layer, head)")
    check_heads(cells, anatomy.n_layers, columns_per_layer)

    def patch(pair: Pair, measure: Measure) -> Patched:
        return _patch_pair(anatomy, pair, measure, cells, component, mode, direction, positions, batch_tokens)

    about = {"component": component, "mode": mode, "direction": direction, "positions": positions}
    return sweep(model, probe, patch, (anatomy.n_layers, columns_per_layer), readout=readout, metric=metric, min_span=min_span, verbose=verbose, **about)


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
    attended = ("q", "k", "v") if component != "z" or mode == "total" else ()  # a direct effect of z attends to nothing again
    both = run_pair(anatomy, pair, positions, ("residual", "z", "written", *attended), read_only=mode == "direct")
    read = pair.read - both.start
    clean, corrupt = measure(both.runs.final[:, read])
    base, source = (0, 1) if direction == "noise" else (1, 0)
    alternatives = _alternatives(anatomy, both, base, source, component)
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


def _alternatives(anatomy: Anatomy, both: PairRuns, base: int, source: int, component: str) -> list[Float[Tensor, "column head d_head"]]:
    """Per layer, z of every head as it would be if that head's component (its KV head's for k and v) were patched."""
    runs, patched = both.runs, both.patched
    if component == "z":
        return replaced_z(runs, patched[both.start :], base, source)
    alternatives = []
    for index, layer in enumerate(anatomy.layers):
        inputs = {"q": runs.q[index], "k": runs.k[index], "v": runs.v[index]}
        where = patched[both.start :] if component == "q" else patched[both.shared :]
        mixed = torch.where(where[:, None], inputs[component][source], inputs[component][base])
        q, k, v = (mixed if name == component else x[base] for name, x in inputs.items())
        new = slice(-len(runs.columns), None)
        alternatives.append(attend_as(layer, q[None], k[None, :, new], v[None, :, new], both.behind(index, k, v))[0])
    return alternatives
