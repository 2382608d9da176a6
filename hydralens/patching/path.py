"""Path patching: sender head -> the receivers' inputs -> answer, every other path frozen (IOI, Wang et al. 2022; HydraHead).

Pass 1 of a sender is position-wise, since all attention but its own output is frozen; pass 2 starts at the first receiver that the
sender can reach. All senders are rows of one batch in both passes, so that no full forward is spent on any of them.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hydralens.errors import InputError, check_word
from hydralens.models.anatomy import Anatomy
from hydralens.models.lens import LensModel
from hydralens.patching.backends import BACKENDS, RECEIVER_SITES, paths_through
from hydralens.patching.batching import in_batches
from hydralens.patching.effects import HeadEffects
from hydralens.patching.pairs import DIRECTIONS, POSITIONS, Pair, check_heads, chosen_heads
from hydralens.patching.runs import NO_HEAD, Cell, PairRuns, patched_runs, replaced_z, run_pair
from hydralens.patching.sweep import Measure, Metric, Patched, default_batch_tokens, sweep
from hydralens.probes.base import Probe

RECEIVER_INPUTS = ("q", "k", "v", "k_ungrouped", "v_ungrouped", "z->logits")
SECOND_PASSES = ("total", "direct")


def path_patch(
    model: LensModel,
    probe: Probe,
    receivers: Sequence[tuple[int, int]] | None = None,
    receiver_input: str = "q",
    *,
    senders: Collection[tuple[int, int]] | None = None,
    freeze_mlps: bool = False,
    second_pass: str = "total",
    direction: str = "noise",
    positions: str | None = None,
    backend: str = "hooks",
    readout: str = "span",
    metric: Metric | None = None,
    min_span: float = 1e-6,
    batch_tokens: int | None = None,
    verbose: bool = False,
) -> HeadEffects:
    """Effect of every head on the answer through the inputs of the receivers alone, all receivers at once.

    Pass 1: the base run with the sender's z replaced and every other head's z frozen; MLPs and norms recomputed; the receivers' inputs
    are read. Pass 2: the base run with those inputs, through the receiver's own norm, QK-norm and rotation, in place of its own; later
    heads recomputed. ``noise`` takes the clean run as base and the corrupt run's z, ``denoise`` the other way round; IE as in ``activation_patch``.

    Args:
        receivers: ``(layer, head)``; KV heads where ``receiver_input`` is ``k`` or ``v`` (see ``LensModel.kv_heads``); none for ``z->logits``.
        receiver_input: ``q``; ``k`` or ``v`` (of a KV head: all its query heads see the change); ``k_ungrouped`` or ``v_ungrouped``: of one
            query head only, as if it had a KV head to itself; ``z->logits``: no receiver, the path from the sender to the final norm.
        senders: only these ``(layer, head)`` are patched, the others are NaN; default: all.
        freeze_mlps: MLPs between sender and receiver write what they wrote in the base run: the residual edge alone.
        second_pass: ``total``: heads after the receivers are recomputed (IOI); ``direct``: they are frozen too.
        positions: where the sender is patched and the receivers' inputs are replaced: ``answer``, ``needle``, ``suffix`` or ``all``.
            Default: ``answer`` for ``q`` and ``z->logits``, ``all`` for keys and values.
        backend: ``hooks``, this project's engine; or ``transformer_lens`` or ``nnsight``: the same through that library's own hooks, two full forwards
            a sender, to check against; not for ``k_ungrouped`` and ``v_ungrouped``, which are no sites of theirs.
        readout, metric, min_span, batch_tokens, verbose: as in ``activation_patch``.

    Returns:
        HeadEffects whose ``per_pair [pair, layer, head]`` is that of the senders: NaN for heads with no receiver in a later layer.

    Raises:
        InputError: an argument is not one of the words above, a receiver is missing, a head does not exist, no sender lies before a receiver,
            no pair is kept, or the backend's library is not installed.
    """
    sets = [list(receivers or [])]
    settings = {"senders": senders, "freeze_mlps": freeze_mlps, "second_pass": second_pass, "direction": direction, "positions": positions, "backend": backend}
    measured = {"readout": readout, "metric": metric, "min_span": min_span, "batch_tokens": batch_tokens, "verbose": verbose}
    return path_effects(model, probe, sets, receiver_input, **settings, **measured)[0]


def edge_maps(model: LensModel, probe: Probe, receivers: Sequence[Cell], receiver_input: str = "q", **settings: Any) -> dict[Cell, HeadEffects]:
    """``path_patch`` to each receiver on its own: receiver -> effects of all senders through it. Pass 1 is shared by all receivers.

    Args:
        settings: keyword arguments of ``path_patch``.
    """
    effects = path_effects(model, probe, [[receiver] for receiver in receivers], receiver_input, **settings)
    return dict(zip(map(tuple, receivers), effects, strict=True))


@torch.no_grad()
def path_effects(
    model: LensModel,
    probe: Probe,
    sets: Sequence[list[Cell]],
    receiver_input: str,
    *,
    senders: Collection[Cell] | None = None,
    freeze_mlps: bool = False,
    second_pass: str = "total",
    direction: str = "noise",
    positions: str | None = None,
    backend: str = "hooks",
    readout: str = "span",
    metric: Metric | None = None,
    min_span: float = 1e-6,
    batch_tokens: int | None = None,
    verbose: bool = False,
) -> list[HeadEffects]:
    """``path_patch`` to several sets of receivers: one HeadEffects per set. Pass 1 is shared by all sets."""
    check_word("backend", backend, BACKENDS)
    if backend == "hooks":
        check_word("receiver_input", receiver_input, RECEIVER_INPUTS)
    else:
        check_word(f"with backend {backend} receiver_input", receiver_input, RECEIVER_SITES)
    check_word("second_pass", second_pass, SECOND_PASSES)
    check_word("direction", direction, DIRECTIONS)
    positions = positions or ("all" if receiver_input[0] in "kv" else "answer")
    check_word("positions", positions, POSITIONS)
    anatomy = model.anatomy
    for receivers in sets:
        _check_receivers(anatomy, receivers, receiver_input)
    last = max((layer for receivers in sets for layer, _ in receivers), default=anatomy.n_layers)
    cells = [cell for cell in chosen_heads(senders, anatomy.n_layers, anatomy.n_heads) if cell[0] < last]
    if not cells:
        raise InputError(f"no sender lies before layer {last}, that of the last receiver; give receivers in later layers or other senders")
    batch_tokens = batch_tokens or default_batch_tokens(model)

    def patch(pair: Pair, measure: Measure) -> Patched:
        return _patch_pair(anatomy, pair, measure, cells, sets, receiver_input, freeze_mlps, second_pass, direction, positions, batch_tokens)

    if backend != "hooks":
        patch = paths_through(backend, model, cells, sets, receiver_input, freeze_mlps, second_pass, direction, positions, readout, metric)
    about = {"component": "z", "mode": f"path, {second_pass}" if sets[0] else "path", "direction": direction, "positions": positions}
    shape = (len(sets), anatomy.n_layers, anatomy.n_heads)
    effects = sweep(model, probe, patch, shape, readout=readout, metric=metric, min_span=min_span, verbose=verbose, **about)
    through = [receiver_input if not receivers else f"{receiver_input} of {_named(receivers)}" for receivers in sets]
    return [replace(effects, per_pair=effects.per_pair[:, index].contiguous(), through=name) for index, name in enumerate(through)]


def _check_receivers(anatomy: Anatomy, receivers: list[Cell], receiver_input: str) -> None:
    if receiver_input == "z->logits":
        if receivers:
            raise InputError("z->logits is the path to the logits and has no receivers; leave receivers out or choose q, k or v")
        return
    if not receivers:
        raise InputError(f"receiver_input {receiver_input} needs receivers: give (layer, head) pairs, for example scores.top(12)")
    kv = receiver_input in ("k", "v")
    n_heads = anatomy.n_kv_heads if kv else anatomy.n_heads
    if kv and any(head >= n_heads for _, head in receivers):
        raise InputError(
            f"receivers of {receiver_input} are KV heads 0..{n_heads - 1}; model.kv_heads(heads) gives those of query heads, "
            f"{receiver_input}_ungrouped patches one query head only"
        )
    check_heads(receivers, anatomy.n_layers, n_heads)
    if max(layer for layer, _ in receivers) == 0:
        raise InputError("every receiver is in layer 0, and no head lies before it; give receivers in later layers")


def _patch_pair(
    anatomy: Anatomy,
    pair: Pair,
    measure: Measure,
    senders: list[Cell],
    sets: Sequence[list[Cell]],
    receiver_input: str,
    freeze_mlps: bool,
    second_pass: str,
    direction: str,
    positions: str,
    batch_tokens: int,
) -> Patched:
    to_logits = receiver_input == "z->logits"
    both = run_pair(anatomy, pair, positions, ("residual", "z", "written", "q", "k", "v"), read_only=to_logits)
    read = pair.read - both.start
    clean, corrupt = measure(both.runs.final[:, read])
    base, source = (0, 1) if direction == "noise" else (1, 0)
    alternatives = replaced_z(both.runs, both.patched[both.start :], base, source)
    last = max((layer for receivers in sets for layer, _ in receivers), default=anatomy.n_layers)
    # Without later attention only the read positions can reach the answer.
    wanted = slice(None) if second_pass == "total" else slice(int(read.min()), None)
    layers = {layer for receivers in sets for layer, _ in receivers}

    def metrics_of(cells: list[Cell]) -> Float[Tensor, "cell set"]:
        rows = [(cells[0][0], NO_HEAD), *cells]
        inputs = {}
        for index, residual in patched_runs(anatomy, both, base, alternatives, rows, freeze_mlps=freeze_mlps):
            if index in layers:
                layer = anatomy.layers[index]
                inputs[index] = layer.project(residual, both.runs.ropes[layer.rope_kind])["qkv".index(receiver_input[0])]
            if index == last:
                break
        if to_logits:
            metrics = measure(residual[:, read])[:, None]
        else:
            metrics = torch.full((len(rows), len(sets)), torch.nan, device=residual.device)
            for index, receivers in enumerate(sets):
                reached = _second_pass(anatomy, both, base, rows, inputs, receivers, receiver_input, second_pass == "total", wanted)
                values = measure(reached[:, read - (wanted.start or 0)])
                metrics = metrics.to(values.dtype)
                metrics[: len(values), index] = values
        return (clean, corrupt)[base] + metrics[1:] - metrics[0]

    values = in_batches(metrics_of, senders, max(1, batch_tokens // len(both.runs.columns)))
    effects = torch.full((len(sets), anatomy.n_layers, anatomy.n_heads), torch.nan, dtype=values.dtype, device=values.device)
    layer, head = torch.tensor(senders, device=values.device).T
    effects[:, layer, head] = values.T
    return Patched(clean, corrupt, effects, anatomy.logits(both.runs.final[0, read[0]]).argmax())


def _second_pass(
    anatomy: Anatomy,
    both: PairRuns,
    base: int,
    cells: list[Cell],
    inputs: dict[int, Float[Tensor, "sender head column d_head"]],
    receivers: list[Cell],
    receiver_input: str,
    live: bool,
    wanted: slice,
) -> Float[Tensor, "sender column d_model"]:
    """Final residual stream of the senders that reach a receiver, which are the first of ``cells``; a run starts at the first receiver it reaches."""
    runs, patched = both.runs, both.patched[both.start :, None]
    by_layer: dict[int, list[int]] = {}
    for layer, head in receivers:
        if layer > cells[0][0]:
            by_layer.setdefault(layer, []).append(head)
    rows = runs.residual[0][:0, wanted]
    for index in range(min(by_layer, default=anatomy.n_layers), anatomy.n_layers):
        layer, heads = anatomy.layers[index], by_layer.get(index)
        if heads:
            reached = sum(sender_layer < index for sender_layer, _ in cells)
            rows = torch.cat((rows, runs.residual[index][base, wanted].expand(reached - len(rows), -1, -1)))
        if live:
            own = layer.project(rows, runs.ropes[layer.rope_kind])
        elif heads:
            new = slice(-len(runs.columns), None)
            own = [x[base, :, new].expand(len(rows), -1, -1, -1) for x in (runs.q[index], runs.k[index], runs.v[index])]
        else:
            rows = layer.feed(rows + runs.written[index][base, wanted])
            continue
        behind = both.behind(index, base)
        z = layer.attend(*own, behind) if live else runs.z[index][base, wanted]
        if heads:
            site, changed, readers = _reading(anatomy, heads, receiver_input)
            replaced = [x.clone() if at == site else x for at, x in enumerate(own)]
            # Elsewhere a receiver in a later layer feels what the earlier ones changed.
            replaced[site][:, changed] = torch.where(patched, inputs[index][: len(rows), changed], own[site][:, changed])
            z = torch.where(readers[:, None].to(z.device), layer.attend(*replaced, behind)[:, wanted], z)
        rows = layer.feed(rows + layer.write(z, rows))
    return rows


def _reading(anatomy: Anatomy, heads: list[int], receiver_input: str) -> tuple[int, list[int], Bool[Tensor, "head"]]:
    """Of receivers in one layer: which of (q, k, v) is replaced, in which of its heads, and the query heads that see it."""
    site, query = "qkv".index(receiver_input[0]), torch.arange(anatomy.n_heads)
    if receiver_input in ("k", "v"):
        return site, heads, torch.isin(query // anatomy.group, torch.tensor(heads))
    readers = torch.isin(query, torch.tensor(heads))
    return site, heads if receiver_input == "q" else sorted({head // anatomy.group for head in heads}), readers


def _named(heads: list[Cell]) -> str:
    return ", ".join(f"L{layer}H{head}" for layer, head in heads)
