"""Attention restricted to sinks and a recent window: what a mask does to the heads it does not keep, without training anything.

``restricted_attention`` applies it to the heads outside a mask; ``restriction_effects`` scores every head by what it would cost, or by what it
would cost to put a trained linear head in its place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hydralens.errors import InputError
from hydralens.hybrid.lens import HybridSites
from hydralens.models.anatomy import Anatomy, Layer
from hydralens.models.attention import attend
from hydralens.models.forward import Attention
from hydralens.models.lens import LensModel
from hydralens.patching.batching import in_batches
from hydralens.patching.effects import HeadEffects
from hydralens.patching.pairs import unpad
from hydralens.patching.sweep import default_batch_tokens
from hydralens.probes.base import Probe

WINDOW, SINKS = 64, 4  # a restricted head sees the last 64 positions, its own included, and the first 4
STEPS = 4  # equal steps of the path from restricted to full, before any is halved
TOLERANCE = 0.05  # of the metric's change, by which the scores of a pair may miss it
MAX_NODES = 129  # points of the path at which halving ends, whatever is missing

# (layer's number, layer, residual stream, rope) -> z of every head in full and restricted
Both = Callable[[int, Layer, Float[Tensor, "row pos d_model"], Any], tuple[Float[Tensor, "row pos head d_head"], Float[Tensor, "row pos head d_head"]]]


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
    model: LensModel,
    probe: Probe,
    *,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
    window: int = WINDOW,
    sinks: int = SINKS,
    linear: LensModel | None = None,
    min_span: float = 1e-3,
    checkpoint_from: int = 2048,
) -> HeadEffects:
    """What restricting each head costs the answer, for all heads at once: integrated gradients over a gate per head.

    Every head is ``z(a) = a * full + (1 - a) * restricted``, both from the same q, k, v. With all gates on the common path from 0
    to 1, a head's score is the integral of the metric's gradient (log-probability of the first answer token) with respect to its gate,
    divided by what restricting every head costs, m(1) - m(0). By completeness the scores of a pair sum to 1. The metric itself is
    known wherever its gradient is, so every step of the path shows its own error, and the worst are halved until the sum of the scores
    is within ``tolerance``. ``completeness_error`` says what is left.

    Only the clean prompts are run, each at five points of the path or more: a forward and a backward for every point. A model whose
    answer comes about gradually needs few (SmolLM2-135M seven or eight), one in which it tips over needs many (Gemma 3 270M sixty and more).

    Args:
        steps: equal steps to begin with.
        tolerance: of a pair's sum; the steps' own errors, which cancel in part, may together be twice that.
        window, sinks: a restricted head sees the last ``window`` positions, its own included, and the first ``sinks``.
        linear: a hybrid of this model whose heads are all linear and aligned with the model's, as a shared alignment leaves it in ``align/linear``.
            Restricted then means: the linear head's output on the same input to the layer, after fusion, in place of the head's; ``window`` and
            ``sinks`` say nothing.
        min_span: pairs whose |m(1) - m(0)| is smaller are not kept, and no step of theirs is halved.
        checkpoint_from: prompts of this many tokens or more recompute each layer in the backward pass, so that memory does not
            grow with the number of layers times positions.

    Returns:
        HeadEffects with ``clean_metric`` of the whole model (all gates 1) and ``corrupt_metric`` of the restricted one (all 0).

    Raises:
        InputError: ``linear`` is no hybrid, or of another shape.
    """
    anatomy = model.anatomy
    both = narrowed(window, sinks) if linear is None else linearised(anatomy, linear.anatomy)
    model.warn_of_bypassed_hooks()
    per_pair = torch.full((probe.n_pairs, anatomy.n_layers, anatomy.n_heads), torch.nan)
    ends, answered = torch.full((2, probe.n_pairs), torch.nan), torch.zeros(probe.n_pairs, dtype=torch.bool)
    for index in range(probe.n_pairs):
        pair = unpad(probe, index, model.device)
        read, answer = int(pair.read[0]), pair.answer[0]
        tokens = pair.clean[None, : read + 1]

        def slopes(at: Float[Tensor, "node"], tokens: Tensor = tokens, answer: Tensor = answer) -> Float[Tensor, "node 2+layer*head"]:
            """With all gates at ``at``: the metric, whether the answer is chosen, and the metric's gradient."""
            gates = at.to(model.device)[:, None, None].repeat(1, anatomy.n_layers, anatomy.n_heads).requires_grad_()
            logits = anatomy.logits(gated_run(anatomy, tokens.expand(len(at), -1), gates, both, tokens.shape[1] >= checkpoint_from)[:, -1])
            metric, right = logits.log_softmax(-1)[:, answer], logits.argmax(-1) == answer
            gradient = torch.autograd.grad(metric.sum(), gates)[0]
            return torch.cat([metric.detach()[:, None], right[:, None], gradient.flatten(1)], 1).float().cpu()

        rows = max(1, default_batch_tokens(model) // len(tokens[0]))
        path = _refined(lambda at, slopes=slopes, rows=rows: in_batches(slopes, at, rows), steps, tolerance, min_span)
        ends[:, index], answered[index] = path.metric[[-1, 0]], bool(path.right[-1])
        if path.change.abs() >= min_span:
            per_pair[index] = path.integral.reshape(anatomy.n_layers, anatomy.n_heads) / path.change
    return HeadEffects(
        per_pair=per_pair,
        component="gate",
        mode="restriction",
        direction="integrated",
        positions=f"window {window}, sinks {sinks}" if linear is None else "linear heads",
        clean_metric=ends[0],
        corrupt_metric=ends[1],
        kept=(ends[0] - ends[1]).abs() >= min_span,
        answered=answered,
        n_heads=anatomy.n_heads,
        n_kv_heads=anatomy.n_kv_heads,
        probe=probe.name,
        capability=probe.capability,
        corruption=probe.corruption,
        readout="log-probability",
    )


@dataclass(frozen=True, eq=False)
class _Path:
    """Points from 0 to 1 with the metric at each, whether the answer is chosen there, and the metric's gradient."""

    at: Float[Tensor, "node"]
    metric: Float[Tensor, "node"]
    right: Float[Tensor, "node"]
    gradient: Float[Tensor, "node head"]

    @property
    def change(self) -> Float[Tensor, ""]:
        return self.metric[-1] - self.metric[0]

    @property
    def areas(self) -> Float[Tensor, "step head"]:
        """The gradient integrated over each step by the trapezoidal rule."""
        return (self.gradient[1:] + self.gradient[:-1]) / 2 * self.at.diff()[:, None]

    @property
    def integral(self) -> Float[Tensor, "head"]:
        return self.areas.sum(0)

    @property
    def errors(self) -> Float[Tensor, "step"]:
        """By how much the integrals over a step exceed the metric's change over it."""
        return self.areas.sum(1) - self.metric.diff()


def _refined(slopes: Callable[[Float[Tensor, "node"]], Float[Tensor, "node 2+head"]], steps: int, tolerance: float, min_span: float) -> _Path:
    """Equal steps, then again and again the worst ones halved: the fewest that leave the others within half of what is allowed."""
    at = torch.linspace(0, 1, steps + 1)
    values = slopes(at)
    while True:
        path = _Path(at, values[:, 0], values[:, 1], values[:, 2:])
        error, change = path.errors, path.change.abs()
        allowed = tolerance * change
        if change < min_span or len(at) >= MAX_NODES or (error.sum().abs() <= allowed and error.abs().sum() <= 2 * allowed):
            return path
        worst, order = error.abs().sort(descending=True)
        left = worst.sum() - worst.cumsum(0)  # after halving the first, the first two, ...
        split = order[: int((left > allowed).sum()) + 1][: MAX_NODES - len(at)]
        middles = (at[split] + at[split + 1]) / 2
        at, place = torch.cat([at, middles]).sort()
        values = torch.cat([values, slopes(middles)])[place]


def completeness_error(effects: HeadEffects) -> float:
    """How far the scores are from summing to the metric's change, all restricted to all full: relative, mean absolute over the kept pairs."""
    return float((effects.per_pair.sum((1, 2))[effects.kept] - 1).abs().mean())


def gated_run(
    anatomy: Anatomy, tokens: Int[Tensor, "row pos"], gates: Float[Tensor, "row layer head"], both: Both, save_memory: bool
) -> Float[Tensor, "row pos d_model"]:
    """Final residual stream with every head between full (gate 1) and restricted (gate 0) attention."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    residual = anatomy.embed(tokens, positions)
    ropes = anatomy.rope(residual, positions)

    def run_layer(index: int, layer: Layer, residual: Tensor, gate: Float[Tensor, "row head"]) -> Tensor:
        full, restricted = both(index, layer, residual, ropes[layer.rope_kind])
        return layer.feed(residual + layer.write(torch.lerp(restricted, full, gate[:, None, :, None].to(full.dtype)), residual))

    for index, (layer, gate) in enumerate(zip(anatomy.layers, gates.unbind(1), strict=True)):
        given = (index, layer, residual, gate)
        residual = checkpoint(run_layer, *given, use_reentrant=False) if save_memory else run_layer(*given)
    return residual


def narrowed(window: int, sinks: int) -> Both:
    """Restricted attention is that to sinks and a window, from the same q, k and v."""
    return lambda index, layer, residual, rope: both_attentions(layer, *layer.project(residual, rope), window, sinks)


def linearised(anatomy: Anatomy, linear: Anatomy) -> Both:
    """A restricted head is the linear head of a hybrid on the same input."""
    shape, other = ((own.n_layers, own.n_heads, own.head_dim, own.d_model) for own in (anatomy, linear))
    if shape != other or not all(isinstance(site, HybridSites) for site in linear.layers):
        raise InputError(
            f"linear has {other} layers, heads, channels of a head and of the residual stream, the model {shape}; give a hybrid made from this model, "
            "such as align/linear of its shared alignment"
        )

    def both(index: int, layer: Layer, residual: Tensor, rope: Any) -> tuple[Tensor, Tensor]:
        site = linear.layers[index]
        tokens = linear.rope(residual, torch.arange(residual.shape[1], device=residual.device))[site.rope_kind]
        z, _ = site.mix(residual, tokens)
        return layer.attend(*layer.project(residual, rope)), site.attention.fuse(z, site.attention_norm(residual))

    return both


def both_attentions(layer: Layer, q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int) -> tuple[Tensor, Tensor]:
    """z of every head under the model's own attention and under the restricted one, which never sees more."""
    own = {"scale": layer.scale, "softcap": layer.softcap}
    full = layer.attend(q, k, v)
    if layer.window is None:
        return full, attend(q, k, v, **own, window=window, sinks=sinks)
    return full, full if layer.window <= window else attend(q, k, v, **own, window=window)
