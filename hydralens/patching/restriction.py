"""Attention restricted to sinks and a recent window: what a mask does to the heads it does not keep, without training anything.

``restricted_attention`` applies it to the heads outside a mask; ``restriction_effects`` scores every head by what it would cost.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hydralens.models.anatomy import Anatomy, Layer
from hydralens.models.forward import Attention, attend, attend_as
from hydralens.models.lens import LensModel
from hydralens.patching.effects import HeadEffects
from hydralens.patching.pairs import unpad
from hydralens.probes.base import Probe

WINDOW, SINKS = 64, 4  # a restricted head sees the last 64 positions, its own included, and the first 4
STEPS = 5  # midpoints of the path from restricted to full


def restricted_attention(anatomy: Anatomy, keep: Bool[Tensor, "... layer head"], window: int = WINDOW, sinks: int = SINKS) -> Attention:
    """For ``trace``: heads in ``keep`` attend as the model does, every other head only to ``sinks`` and the last ``window`` positions.

    ``keep`` is one mask, or one per row of the batch.
    A layer with a sliding window of its own never sees more than that: there restriction is to the shorter window, without sinks.
    """

    def attention(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        full, restricted = both_attentions(anatomy.layers[index], q, k, v, window, sinks)
        return torch.where(keep[..., index, :].to(q.device)[..., None, :, None], full, restricted)

    return attention


def restriction_effects(
    model: LensModel, probe: Probe, *, steps: int = STEPS, window: int = WINDOW, sinks: int = SINKS, checkpoint_from: int = 2048
) -> HeadEffects:
    """What restricting each head costs the answer, for all heads at once: integrated gradients over a gate per head.

    Every head is ``z(a) = a * full + (1 - a) * restricted``, both from the same q, k, v. With all gates on the common path from 0
    to 1, a head's score is the gradient of the metric (log-probability of the first answer token) with respect to its gate, averaged
    over ``steps`` midpoints of the path and divided by what restricting every head costs, m(1) - m(0). By completeness the scores of
    a pair sum to 1; ``completeness_error`` says how nearly.

    Only the clean prompts are run: ``steps`` forwards and backwards and two forwards a pair.

    Args:
        window, sinks: a restricted head sees the last ``window`` positions, its own included, and the first ``sinks``.
        checkpoint_from: prompts of this many tokens or more recompute each layer in the backward pass, so that memory does not
            grow with the number of layers times positions.

    Returns:
        HeadEffects with ``clean_metric`` of the whole model (all gates 1) and ``corrupt_metric`` of the restricted one (all 0).
    """
    anatomy = model.anatomy
    model.warn_of_bypassed_hooks()
    per_pair = torch.full((probe.n_pairs, anatomy.n_layers, anatomy.n_heads), torch.nan)
    ends, answered = torch.full((2, probe.n_pairs), torch.nan), torch.zeros(probe.n_pairs, dtype=torch.bool)
    for index in range(probe.n_pairs):
        pair = unpad(probe, index, model.device)
        tokens, read = pair.clean[None, : int(pair.read[0]) + 1], int(pair.read[0])

        def measure(run: Float[Tensor, "1 1 d_model"], answer: Int[Tensor, ""] = pair.answer[0]) -> Float[Tensor, ""]:
            return anatomy.logits(run[0, 0]).log_softmax(-1)[answer]

        gradient = torch.zeros(anatomy.n_layers, anatomy.n_heads, device=model.device)
        for step in range(steps):
            gates = torch.full_like(gradient, (step + 0.5) / steps, requires_grad=True)
            metric = measure(gated_run(anatomy, tokens, gates, window, sinks, len(tokens[0]) >= checkpoint_from)[:, read:])
            gradient += torch.autograd.grad(metric, gates)[0] / steps
        with torch.no_grad():
            whole, narrow = (gated_run(anatomy, tokens, torch.full_like(gradient, a), window, sinks, False)[:, read:] for a in (1.0, 0.0))
            ends[:, index] = torch.stack((measure(whole), measure(narrow))).float().cpu()
            answered[index] = bool(anatomy.logits(whole[0, 0]).argmax() == pair.answer[0])
        per_pair[index] = gradient.float().cpu() / (ends[0, index] - ends[1, index])
    return HeadEffects(
        per_pair=per_pair,
        component="gate",
        mode="restriction",
        direction="integrated",
        positions=f"window {window}, sinks {sinks}",
        clean_metric=ends[0],
        corrupt_metric=ends[1],
        kept=ends[0] > ends[1],
        answered=answered,
        n_heads=anatomy.n_heads,
        n_kv_heads=anatomy.n_kv_heads,
        probe=probe.name,
        capability=probe.capability,
        corruption=probe.corruption,
        readout="log-probability",
    )


def completeness_error(effects: HeadEffects) -> float:
    """How far the scores are from summing to the metric's change, all restricted to all full: relative, mean absolute over the kept pairs."""
    return float((effects.per_pair.sum((1, 2))[effects.kept] - 1).abs().mean())


def gated_run(
    anatomy: Anatomy, tokens: Int[Tensor, "1 pos"], gates: Float[Tensor, "layer head"], window: int, sinks: int, save_memory: bool
) -> Float[Tensor, "1 pos d_model"]:
    """Final residual stream with every head between full (gate 1) and restricted (gate 0) attention."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    residual = anatomy.embed(tokens, positions)
    ropes = anatomy.rope(residual, positions)

    def run_layer(layer: Layer, residual: Tensor, gate: Float[Tensor, "head"]) -> Tensor:
        q, k, v = layer.project(residual, ropes[layer.rope_kind])
        full, restricted = both_attentions(layer, q, k, v, window, sinks)
        return layer.feed(residual + layer.write(torch.lerp(restricted, full, gate[:, None].to(full.dtype))))

    for layer, gate in zip(anatomy.layers, gates, strict=True):
        residual = checkpoint(run_layer, layer, residual, gate, use_reentrant=False) if save_memory else run_layer(layer, residual, gate)
    return residual


def both_attentions(layer: Layer, q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int) -> tuple[Tensor, Tensor]:
    """z of every head under the model's own attention and under the restricted one, which never sees more."""
    own = {"scale": layer.scale, "softcap": layer.softcap}
    full = attend_as(layer, q, k, v)
    if layer.window is None:
        return full, attend(q, k, v, **own, window=window, sinks=sinks)
    return full, full if layer.window <= window else attend(q, k, v, **own, window=window)
