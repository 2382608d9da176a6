"""Activation and path patching through the hooks of TransformerLens or nnsight: slow, and independent of the engine.

A backend is one function, ``run(tokens, edits, kept) -> (logits, values)``: a full forward of an unpadded prompt in which some sites are
edited and some are read. Every intervention is made of such edits: a frozen head is one whose z is held at the base run's, and a head whose q,
k and v are all held feels nothing but what they are held at. One forward per head (two for a path): for checks, small models and a few heads.
Hooks on the model's own modules take no part.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hydralens.errors import InputError, check_word
from hydralens.models.adapters import to_nnsight, to_transformer_lens
from hydralens.models.lens import LensModel
from hydralens.patching.metric import DECAY, READOUTS
from hydralens.patching.pairs import Pair
from hydralens.patching.sweep import Measure, Metric, Patched

BACKENDS = ("hooks", "transformer_lens", "nnsight")  # the first is the engine
RECEIVER_SITES = ("q", "k", "v", "z->logits")  # the key of one query head alone is no site of these libraries
SITES = ("q", "k", "v", "z", "mlp")  # in the order in which a layer computes them; q and k before QK-norm and rotation

Cell = tuple[int, int]  # (layer, head)
Site = tuple[str, int]  # (name, layer)
Value = Float[Tensor, "pos head d_head"]  # an MLP's output is [pos, d_model]
Values = dict[Site, Value]
Edits = dict[Site, Callable[[Value], Value]]  # from what the run computes there to what it goes on with
Run = Callable[[Int[Tensor, "pos"], Edits, Collection[Site]], tuple[Float[Tensor, "pos vocab"], Values]]
Rerun = Callable[..., tuple[Float[Tensor, ""], Values]]  # (edits, kept=()) -> metric of the base prompt so run, and the sites kept
# Metric of the base prompt with one head patched: (rerun, base values, source values, patched positions, head).
PatchCell = Callable[[Rerun, Values, Values, Bool[Tensor, "pos"], Cell], Float[Tensor, "..."]]


def activations_through(
    backend: str,
    model: LensModel,
    cells: Sequence[Cell],
    component: str,
    mode: str,
    direction: str,
    positions: str,
    readout: str,
    metric: Metric | None,
) -> Callable[[Pair, Measure], Patched]:
    """What ``activation_patch`` does to a pair, by one forward a cell; arguments as there. Values are ``[layer, head]``.

    Raises:
        InputError: the library is not installed, or ``readout`` is unknown.
    """
    layers = range(model.info.n_layers)
    kept = {(name, layer) for name in (component, "z") for layer in layers}

    def patch(rerun: Rerun, base: Values, source: Values, where: Bool[Tensor, "pos"], cell: Cell) -> Float[Tensor, ""]:
        layer, head = cell
        frozen = {("z", later): _hold(base["z", later]) for later in layers[layer + 1 :]} if mode == "direct" else {}
        return rerun(frozen | {(component, layer): _insert(source[component, layer], [head], where)})[0]

    shape = (len(layers), model.info.n_kv_heads if component in ("k", "v") else model.info.n_heads)
    return _cell_by_cell(backend, model, patch, cells, kept, shape, direction, positions, readout, metric)


def paths_through(
    backend: str,
    model: LensModel,
    senders: Sequence[Cell],
    sets: Sequence[Sequence[Cell]],
    receiver_input: str,
    freeze_mlps: bool,
    second_pass: str,
    direction: str,
    positions: str,
    readout: str,
    metric: Metric | None,
) -> Callable[[Pair, Measure], Patched]:
    """What ``path_effects`` does to a pair, by one forward a sender and one more for each set of receivers; arguments as there.

    Values are ``[set, layer, head]``.

    Raises:
        InputError: the library is not installed, or ``readout`` is unknown.
    """
    layers = range(model.info.n_layers)
    kept = {(site, layer) for site in SITES for layer in layers}
    inputs_of = [{(receiver_input, layer): [head for at, head in receivers if at == layer] for layer, _ in receivers} for receivers in sets]

    def patch(rerun: Rerun, base: Values, source: Values, where: Bool[Tensor, "pos"], sender: Cell) -> Float[Tensor, "set"]:
        layer, head = sender
        first = {(site, any_layer): _hold(base[site, any_layer]) for site in (("z", "mlp") if freeze_mlps else ("z",)) for any_layer in layers}
        first["z", layer] = _insert(source["z", layer], [head], where)
        to_logits, seen = rerun(first, {site for heads in inputs_of for site in heads})
        if receiver_input == "z->logits":
            return to_logits[None]
        metrics = []
        for heads in inputs_of:
            second = {site: _insert(seen[site], heads[site], where) for site in heads}
            if second_pass == "direct":
                held = {(site, at): base[site, at] for at in layers for site in (("q", "k", "v") if (receiver_input, at) in heads else ("z",))}
                second = {site: _hold(second[site](value) if site in second else value) for site, value in held.items()}
            reached = layer < max(at for _, at in heads)
            metrics.append(rerun(second)[0] if reached else torch.full_like(to_logits, torch.nan))
        return torch.stack(metrics)

    shape = (len(sets), len(layers), model.info.n_heads)
    return _cell_by_cell(backend, model, patch, senders, kept, shape, direction, positions, readout, metric)


def _cell_by_cell(
    backend: str,
    model: LensModel,
    patch: PatchCell,
    cells: Sequence[Cell],
    kept: Collection[Site],
    shape: tuple[int, ...],
    direction: str,
    positions: str,
    readout: str,
    metric: Metric | None,
) -> Callable[[Pair, Measure], Patched]:
    check_word("readout", readout, READOUTS)
    if model.anatomy.past != ("k", "v"):
        raise InputError(f"backend {backend!r} does not know where z of a hybrid is; use backend 'hooks'")
    run = {"transformer_lens": _transformer_lens, "nnsight": _nnsight}[backend](model)

    def patch_pair(pair: Pair, _: Measure) -> Patched:
        lead = partial(_lead, pair=pair, readout=readout, metric=metric)
        prompts = (pair.clean, pair.corrupt)
        (clean_logits, corrupt_logits), values = zip(*(run(tokens, {}, kept) for tokens in prompts), strict=True)
        base, source = (0, 1) if direction == "noise" else (1, 0)

        def rerun(edits: Edits, kept: Collection[Site] = ()) -> tuple[Float[Tensor, ""], Values]:
            logits, seen = run(prompts[base], edits, kept)
            return lead(logits), seen

        clean = lead(clean_logits)
        patched = torch.full(shape, torch.nan, dtype=clean.dtype, device=clean.device)
        for layer, head in cells:
            patched[..., layer, head] = patch(rerun, values[base], values[source], pair.patched(positions), (layer, head))
        return Patched(clean, lead(corrupt_logits), patched, clean_logits[pair.read[0]].argmax())

    return patch_pair


def _hold(value: Value) -> Callable[[Value], Value]:
    return lambda own: value


def _insert(new: Value, heads: list[int], where: Bool[Tensor, "pos"]) -> Callable[[Value], Value]:
    def edit(own: Value) -> Value:
        mixed = own.clone()
        mixed[:, heads] = torch.where(where[:, None, None], new[:, heads], own[:, heads])
        return mixed

    return edit


def _lead(logits: Float[Tensor, "pos vocab"], pair: Pair, readout: str, metric: Metric | None) -> Float[Tensor, ""]:
    """The metric from whole rows of logits, HydraHead Eq. 9, in at least float32."""
    logits = logits[pair.read].to(torch.promote_types(logits.dtype, torch.float32))
    if metric is not None:
        return metric(logits[None], pair.answer, pair.foil)[0]
    leads = (logits.gather(1, pair.answer[:, None]) - logits.gather(1, pair.foil[:, None]))[:, 0]
    if readout == "first":
        return leads[0]
    weights = DECAY ** torch.arange(len(leads), dtype=leads.dtype, device=leads.device)
    return leads @ weights / weights.sum()


# --- the two libraries ---------------------------------------------------------------------------------------------


def _transformer_lens(model: LensModel) -> Run:
    bridge = to_transformer_lens(replace(model, tokenizer=None))

    def name(site: Site) -> str:
        return f"blocks.{site[1]}.mlp.hook_out" if site[0] == "mlp" else f"blocks.{site[1]}.attn.hook_{site[0]}"

    def run(tokens: Int[Tensor, "pos"], edits: Edits, kept: Collection[Site] = ()) -> tuple[Float[Tensor, "pos vocab"], Values]:
        values = {}

        def keep(value: Tensor, hook: object, site: Site) -> None:
            values[site] = value[0].clone()

        def put(value: Tensor, hook: object, site: Site) -> Tensor:
            return edits[site](value[0])[None]

        hooks = [(name(site), partial(keep, site=site)) for site in kept] + [(name(site), partial(put, site=site)) for site in edits]
        return bridge.run_with_hooks(tokens[None], fwd_hooks=hooks, return_type="logits")[0], values

    return run


def _nnsight(model: LensModel) -> Run:
    lens = to_nnsight(replace(model, tokenizer=None))
    blocks, head_dim = (lens.transformer.h if model.anatomy.family == "gpt2" else lens.model.layers), model.info.head_dim

    def place(site: Site) -> tuple[object, str, slice]:
        """A module, ``input`` or ``output``, and the features of it."""
        kind, layer = site
        block = blocks[layer]
        if kind == "mlp":
            return block.mlp, "output", slice(None)
        if model.anatomy.family != "gpt2":
            return (block.self_attn.o_proj, "input", slice(None)) if kind == "z" else (getattr(block.self_attn, f"{kind}_proj"), "output", slice(None))
        if kind == "z":
            return block.attn.c_proj, "input", slice(None)
        start = "qkv".index(kind) * model.anatomy.d_model  # one fused projection
        return block.attn.c_attn, "output", slice(start, start + model.anatomy.d_model)

    def run(tokens: Int[Tensor, "pos"], edits: Edits, kept: Collection[Site] = ()) -> tuple[Float[Tensor, "pos vocab"], Values]:
        values = {}
        # nnsight wants sites in the order in which the model runs.
        sites = [(site, *place(site)) for site in sorted({*edits, *kept}, key=lambda site: (site[1], SITES.index(site[0])))]
        with lens.trace(input_ids=tokens[None], use_cache=False):
            for site, module, end, features in sites:
                value = getattr(module, end)[0, :, features]
                value = value if site[0] == "mlp" else value.unflatten(-1, (-1, head_dim))  # a view, so that an edit is written through
                if site in kept:
                    values[site] = value.clone().save()
                if site in edits:
                    value[:] = edits[site](value)
            logits = lens.output.logits[0].save()
        return logits, values

    return run
