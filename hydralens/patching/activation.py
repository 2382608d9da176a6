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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from hydralens.errors import InputError, check_word
from hydralens.models.anatomy import Anatomy
from hydralens.models.forward import KeysValues, Trace, attend_as, trace
from hydralens.models.lens import LensModel
from hydralens.patching.batching import in_batches
from hydralens.patching.effects import HeadEffects
from hydralens.patching.metric import logit_difference
from hydralens.probes.base import Probe

COMPONENTS = ("z", "q", "k", "v")
MODES = ("direct", "total")
DIRECTIONS = ("noise", "denoise")
POSITIONS = ("answer", "needle", "suffix", "all")
NO_HEAD = -1

Metric = Callable[[Float[Tensor, "row n vocab"], Int[Tensor, "n"], Int[Tensor, "n"]], Float[Tensor, "row"]]


@torch.no_grad()
def activation_patch(
    model: LensModel,
    probe: Probe,
    component: str = "z",
    mode: str = "direct",
    direction: str = "noise",
    positions: str = "answer",
    *,
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
        readout: ``span`` (Eq. 9) or ``first`` (the first answer token alone).
        metric: instead of the logit difference: ``metric(logits [row, n, vocab], answer [n], foil [n]) -> [row]``.
        min_span: pairs whose |clean - corrupt| metric is smaller are not kept.
        batch_tokens: tokens of patched runs computed at once; halved when memory runs out.
        verbose: a progress bar on stderr.

    Returns:
        HeadEffects with ``per_pair [pair, layer, head]``; the head axis counts KV heads for k and v.

    Raises:
        InputError: an argument is not one of the words above, or no pair is kept.
    """
    check_word("component", component, COMPONENTS)
    check_word("mode", mode, MODES)
    check_word("direction", direction, DIRECTIONS)
    check_word("positions", positions, POSITIONS)
    model.warn_of_bypassed_hooks()
    anatomy = model.anatomy
    batch_tokens = batch_tokens or (2**16 if model.device.type == "cuda" else 2**12)
    columns_per_layer = anatomy.n_kv_heads if component in ("k", "v") else anatomy.n_heads
    per_pair = torch.full((probe.n_pairs, anatomy.n_layers, columns_per_layer), torch.nan)
    baselines = torch.full((2, probe.n_pairs), torch.nan)
    answered = torch.zeros(probe.n_pairs, dtype=torch.bool)

    for index in tqdm(range(probe.n_pairs), desc=f"{probe.name}/{probe.corruption}", disable=not verbose, leave=False):
        pair = unpad(probe, index, model.device)

        def measure(residual: Float[Tensor, "row n d_model"], pair: Pair = pair) -> Float[Tensor, "row"]:
            if metric is None:
                return logit_difference(anatomy, residual, pair.answer, pair.foil, readout)
            return metric(anatomy.logits(residual), pair.answer, pair.foil)

        clean, corrupt, patched, first_token = _patch_pair(anatomy, pair, measure, component, mode, direction, positions, batch_tokens)
        answered[index] = bool(first_token == pair.answer[0])
        span = clean - corrupt
        baselines[:, index] = torch.stack((clean, corrupt)).float().cpu()
        if span != 0 and abs(float(span)) >= min_span:
            effect = (clean - patched if direction == "noise" else patched - corrupt) / span
            per_pair[index] = effect.float().cpu()

    kept = (baselines[0] - baselines[1]).abs() >= min_span
    if not kept.any():
        raise InputError(f"probe {probe.name}: clean and corrupt metric agree within {min_span:g} in all {probe.n_pairs} pairs: nothing to explain")
    return HeadEffects(
        per_pair=per_pair,
        component=component,
        mode=mode,
        direction=direction,
        positions=positions,
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
    )


@dataclass(frozen=True, eq=False)
class Pair:
    """One pair of a probe without its padding; columns count from its first real token, and end with the last read position."""

    clean: Int[Tensor, "pos"]
    corrupt: Int[Tensor, "pos"]
    answer: Int[Tensor, "n"]
    foil: Int[Tensor, "n"]
    read: Int[Tensor, "n"]
    needle: tuple[int, int]

    @property
    def first_difference(self) -> int:
        """First column in which clean and corrupt differ; the last column if none does."""
        different = (self.clean != self.corrupt).nonzero()
        return min(int(different[0]), int(self.read.min())) if len(different) else int(self.read.min())

    def patched(self, positions: str) -> Bool[Tensor, "pos"]:
        """The columns a patch at ``positions`` touches."""
        columns = torch.arange(len(self.clean), device=self.clean.device)
        match positions:
            case "answer":
                return torch.isin(columns, self.read)
            case "needle":
                return (columns >= self.needle[0]) & (columns < self.needle[1])
            case "suffix":
                return columns >= self.first_difference
            case _:
                return torch.ones_like(columns, dtype=torch.bool)


def unpad(probe: Probe, index: int, device: torch.device) -> Pair:
    """Pair ``index`` of ``probe``; nothing after the last read position can matter to a causal model, so it is cut."""
    mask, scored = probe.attention_mask[index].bool(), probe.scored[index]
    column = mask.cumsum(0) - 1
    read = column[probe.read_positions[index][scored]]
    stop = int(read.max()) + 1
    start, end = probe.needle_span[index].tolist()
    to = {"device": device}
    return Pair(
        clean=probe.clean[index][mask][:stop].to(**to),
        corrupt=probe.corrupt[index][mask][:stop].to(**to),
        answer=probe.answer[index][scored].to(**to),
        foil=probe.foil[index][scored].to(**to),
        read=read.to(**to),
        needle=(int(column[start]), int(column[end - 1]) + 1),
    )


Measure = Callable[[Float[Tensor, "row n d_model"]], Float[Tensor, "row"]]


def _patch_pair(
    anatomy: Anatomy, pair: Pair, measure: Measure, component: str, mode: str, direction: str, positions: str, batch_tokens: int
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, "layer head"], Int[Tensor, ""]]:
    """Metric of the clean run, of the corrupt run and of every patched run; and the clean run's choice for the first answer token."""
    shared = pair.first_difference
    patched = pair.patched(positions)
    patched[:shared] = False  # clean and corrupt activations are equal there
    start = int(pair.read.min())
    if mode == "total" and patched.any():
        start = min(start, int(patched.nonzero()[0]))
    columns = torch.arange(start, len(pair.clean), device=pair.clean.device)

    prefix = trace(anatomy, pair.clean[None, :shared], columns[:0], ("k", "v")) if shared else None
    both = torch.stack((pair.clean, pair.corrupt))[:, shared:]
    attended = ("q", "k", "v") if component != "z" or mode == "total" else ()  # a direct effect of z attends to nothing again
    runs = trace(anatomy, both, columns, ("residual", "z", "written", *attended), prefix=prefix)
    clean, corrupt = measure(runs.final[:, pair.read - start])
    base, source = (0, 1) if direction == "noise" else (1, 0)
    alternatives = _alternatives(anatomy, runs, prefix, base, source, component, patched[shared:], patched[columns])

    group = anatomy.group if component in ("k", "v") else 1

    def patched_metric(cells: list[tuple[int, int]]) -> Float[Tensor, "cell"]:
        # The first row patches no head: a baseline of the same batch shape, on which low-precision rounding depends.
        rows = _patched_runs(anatomy, runs, prefix, base, alternatives, [(cells[0][0], NO_HEAD), *cells], group, live=mode == "total")
        metrics = measure(rows[:, pair.read - start])
        return (clean, corrupt)[base] + metrics[1:] - metrics[0]

    cells = [(layer, head) for layer in range(anatomy.n_layers) for head in range(anatomy.n_heads // group)]
    values = in_batches(patched_metric, cells, max(1, batch_tokens // len(columns)))
    choice = anatomy.logits(runs.final[0, pair.read[0] - start]).argmax()
    return clean, corrupt, values.reshape(anatomy.n_layers, -1), choice


def _alternatives(
    anatomy: Anatomy,
    runs: Trace,
    prefix: Trace | None,
    base: int,
    source: int,
    component: str,
    patched: Bool[Tensor, "pos"],
    patched_columns: Bool[Tensor, "column"],
) -> list[Float[Tensor, "column head d_head"]]:
    """Per layer, z of every head as it would be if that head's component (its KV head's for k and v) were patched."""
    if component == "z":
        return [torch.where(patched_columns[:, None, None], z[source], z[base]) for z in runs.z]
    alternatives = []
    for index, layer in enumerate(anatomy.layers):
        inputs = {"q": runs.q[index], "k": runs.k[index], "v": runs.v[index]}
        where = patched_columns if component == "q" else patched
        mixed = torch.where(where[:, None], inputs[component][source], inputs[component][base])
        q, k, v = ((mixed if name == component else x[base])[None] for name, x in inputs.items())
        before = k.shape[2] - q.shape[2]
        behind = _behind(prefix, index, k[:, :, :before], v[:, :, :before])
        alternatives.append(attend_as(layer, q, k[:, :, before:], v[:, :, before:], behind)[0])
    return alternatives


def _behind(prefix: Trace | None, layer: int, k: Tensor, v: Tensor) -> KeysValues:
    """Keys and values of everything before the kept columns: the shared prefix, then ``k`` and ``v``."""
    return (k, v) if prefix is None else (torch.cat((prefix.k[layer], k), 2), torch.cat((prefix.v[layer], v), 2))


def _patched_runs(
    anatomy: Anatomy,
    runs: Trace,
    prefix: Trace | None,
    base: int,
    alternatives: list[Float[Tensor, "column head d_head"]],
    cells: list[tuple[int, int]],
    group: int,
    live: bool,
) -> Float[Tensor, "cell column d_model"]:
    """Final residual stream of one run per cell; cells are sorted by layer, and a run starts at its own layer."""
    rows = runs.residual[0][:0]
    for index in range(cells[0][0], anatomy.n_layers):
        layer = anatomy.layers[index]
        if live and len(rows):
            q, k, v = layer.project(rows, runs.ropes[layer.rope_kind])
            before = runs.k[index].shape[2] - k.shape[2]
            behind = _behind(prefix, index, runs.k[index][[base], :, :before], runs.v[index][[base], :, :before])
            rows = rows + layer.write(attend_as(layer, q, k, v, behind))
        elif len(rows):
            rows = rows + runs.written[index][base]
        heads = [head for cell_layer, head in cells if cell_layer == index]
        if heads:
            # One row per cell, whose head (or whole group, for k and v) takes the alternative.
            readers = torch.arange(anatomy.n_heads, device=rows.device) // group
            chosen = torch.tensor(heads, device=rows.device)[:, None] == readers
            new = torch.where(chosen[:, None, :, None], alternatives[index], runs.z[index][base])
            rows = torch.cat((rows, runs.residual[index][base] + layer.write(new)))
        rows = layer.feed(rows)
    return rows
