"""Attribution patching: total effects of all heads estimated from gradients, to rank heads before some of them are measured exactly.

To first order, replacing an activation changes the metric by (source - base) . gradient. The gradient goes down one layer at a time from
the base run's residual stream, each layer recomputed as it comes up, so that one layer's graph is held whatever the depth (with soft-capped
attention, Gemma 2, that graph has the layer's pattern in it); positions before the first patched one cannot matter and are not in it.

What is estimated is the total effect: direct effects are cheap to measure exactly (``activation_patch``, which can also verify an estimate).
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from hydralens.errors import InputError, check_word
from hydralens.models.anatomy import Anatomy
from hydralens.models.forward import trace
from hydralens.models.lens import LensModel
from hydralens.patching.effects import HeadEffects
from hydralens.patching.pairs import COMPONENTS, DIRECTIONS, POSITIONS, Pair
from hydralens.patching.runs import PairRuns, alternative_z, run_pair
from hydralens.patching.sweep import Measure, Metric, Patched, sweep
from hydralens.probes.base import Probe

METHODS = ("atp", "atp*", "eap-ig")
STEPS = 5  # midpoints of the path of eap-ig


@torch.no_grad()
def attribution_patch(
    model: LensModel,
    probe: Probe,
    component: str = "z",
    method: str = "atp",
    direction: str = "denoise",
    positions: str = "all",
    *,
    steps: int = STEPS,
    readout: str = "span",
    metric: Metric | None = None,
    min_span: float = 1e-6,
    verbose: bool = False,
) -> HeadEffects:
    """Estimate what ``activation_patch(..., mode="total")`` measures, for every head at once, in the same unit (IE).

    ``atp`` (Nanda 2022; Kramar et al. 2024, Eq. 4): (source - base) . gradient at the base run, summed over the patched positions and d_head.
    Two forwards and one backward a pair, and one forward more to recompute layers in the backward.

    ``atp*`` (Kramar et al. 2024): the same with both corrections of the paper.

    * QK fix: q and k act through a softmax that a gradient takes for a straight line. Here every intervention on q, k or v equals a replacement of
      z, so the fix is (z under the exact softmax of the patched q or k - base z) . gradient at z, for k with all its queries at once; for z
      and v, which are linear, it changes nothing.
    * GradDrop (Eq. 11): a direct and an indirect effect that cancel hide a head, so the gradient is also taken with what one layer (attention and
      MLP) adds to the residual stream held constant, for each layer in turn. The magnitude is the mean of the absolute estimates over all
      dropped layers but the head's own, dropping which leaves nothing; the sign, which the paper does not give, is that of the undropped
      estimate. It understates heads that act through one later layer alone. The paper takes heads position by position, here the patched
      positions are one intervention. (n_layers + 1) / 2 backwards: dropping a layer changes the gradient below it only.

    ``eap-ig`` (Hanna et al. 2024, node scores, the variant over inputs): (source - base) . mean gradient over runs whose input embeddings lie between
    base and source, at ``steps`` midpoints (the authors' code takes the right ends). It is the same in both directions. ``steps`` times the
    backward of ``atp`` and as many forwards.

    The gradient is taken at the run that is patched: the corrupt run for ``denoise``, which is the default because its estimates are nearer to the
    exact effects. Measured on the embedded model, on two value swaps of 128 tokens, the Pearson correlation with the exact effects of z, q and k is

    * denoising: ``atp`` 0.94, 0.80, 0.91; ``atp*`` 0.94, 0.96, 0.89; ``eap-ig`` 0.86, 0.20, 0.37;
    * noising: ``atp`` 0.82, 0.55, 0.53; ``atp*`` 0.82, 0.92, 0.97; ``eap-ig`` 0.75, 0.58, 0.22.

    Args:
        component: ``z``, ``q``, ``k`` or ``v``, as in ``activation_patch``: q and k after QK-norm and rotation.
        direction, positions, readout, min_span, verbose: as in ``activation_patch``.
        steps: of ``eap-ig``.
        metric: instead of the logit difference, as in ``activation_patch``; differentiable.

    Returns:
        HeadEffects with ``per_pair [pair, layer, head]`` (KV heads for k and v) whose ``mode`` names estimate and method.

    Raises:
        InputError: an argument is not one of the words above, ``steps`` is less than 1, or no pair is kept.
    """
    check_word("component", component, COMPONENTS)
    check_word("method", method, METHODS)
    check_word("direction", direction, DIRECTIONS)
    check_word("positions", positions, POSITIONS)
    if steps < 1:
        raise InputError(f"steps {steps} is less than 1; {STEPS} is the default")
    anatomy = model.anatomy

    def estimate(pair: Pair, measure: Measure) -> Patched:
        return _estimate_pair(anatomy, pair, measure, component, method, direction, positions, steps)

    about = {"component": component, "mode": f"total, {method} estimate", "direction": direction, "positions": positions}
    shape = (anatomy.n_layers, anatomy.n_kv_heads if component in ("k", "v") else anatomy.n_heads)
    return sweep(model, probe, estimate, shape, readout=readout, metric=metric, min_span=min_span, verbose=verbose, **about)


def attribution_error(estimate: HeadEffects | Float[Tensor, "pair layer head"], exact: HeadEffects, k: int) -> dict[str, float]:
    """How far an estimate is from the exact effects: both as means over the pairs that both kept, on the heads that both have.

    Args:
        estimate: what ``attribution_patch`` returned, or the ``estimate`` of prefiltered effects: ``attribution_error(effects.estimate, effects, k)``.
        k: how many heads, by absolute effect, ``top_k_overlap`` compares.

    Returns:
        ``pearson``, ``spearman``, ``top_k_overlap`` (share of the exact top k that is in the estimate's), ``max_abs_error`` (IE), ``n_heads`` and
        ``n_pairs`` that were compared. With many heads of no effect Spearman is noise: read it beside the others.

    Raises:
        InputError: the two are of different interventions or probes, share no kept pair or fewer than two heads, or ``k`` is not among the heads.
    """
    if isinstance(estimate, Tensor):
        estimate = replace(exact, per_pair=estimate)
    for name in ("component", "direction", "positions", "probe", "corruption", "readout"):
        if getattr(estimate, name) != getattr(exact, name):
            raise InputError(f"{name} of the estimate is {getattr(estimate, name)!r}, of the exact effects {getattr(exact, name)!r}; compare like with like")
    if estimate.per_pair.shape != exact.per_pair.shape:
        shapes = f"{tuple(estimate.per_pair.shape)} and {tuple(exact.per_pair.shape)}"
        raise InputError(f"estimate and exact effects have shapes {shapes}; compare the same pairs of one model")
    kept = estimate.kept & exact.kept
    if not kept.any():
        raise InputError("estimate and exact effects keep no pair in common; use pairs whose clean and corrupt metric differ")
    means = torch.stack([effects.per_pair[kept].double().mean(0).flatten() for effects in (estimate, exact)])
    means = means[:, ~means.isnan().any(0)]
    n_heads = means.shape[1]
    if n_heads < 2 or not 1 <= k <= n_heads:
        raise InputError(f"k {k} heads cannot be compared: {n_heads} heads have both an estimate and an exact effect, and at least 2 are needed")
    first, second = (set(row.abs().argsort(descending=True, stable=True)[:k].tolist()) for row in means)
    return {
        "pearson": float(pearsonr(*means.numpy()).statistic),
        "spearman": float(spearmanr(*means.numpy()).statistic),
        "top_k_overlap": len(first & second) / k,
        "max_abs_error": float((means[0] - means[1]).abs().max()),
        "n_heads": n_heads,
        "n_pairs": int(kept.sum()),
    }


def _estimate_pair(anatomy: Anatomy, pair: Pair, measure: Measure, component: str, method: str, direction: str, positions: str, steps: int) -> Patched:
    drops, integrated = method == "atp*", method == "eap-ig"
    both = run_pair(anatomy, pair, positions, {"residual", "k", "v", component} | ({"z", "q"} if drops else set()))
    read = pair.read - both.start
    clean, corrupt = measure(both.runs.final[:, read])
    base, source = (0, 1) if direction == "noise" else (1, 0)
    site = "z" if drops else component
    changes = _changes(anatomy, both, base, source, component, exact_softmax=drops)
    n_columns = anatomy.n_kv_heads if component in ("k", "v") else anatomy.n_heads
    estimates = torch.zeros(anatomy.n_layers, n_columns, dtype=clean.dtype, device=clean.device)
    for runs, row in _between(anatomy, pair, both, base, source, steps) if integrated else [(both, base)]:
        for index, gradients in _backward(anatomy, runs, row, lambda final: measure(final[:, read]), site, drops):
            effects = torch.stack([(changes[index] * gradient).sum((1, 2)) for gradient in gradients])  # [gradient, head]
            effects = effects.unflatten(1, (n_columns, -1)).sum(2)  # a KV head acts through the z of all its readers
            estimates[index] += _grad_drop(effects, anatomy.n_layers) if drops else effects[0]
    estimates /= steps if integrated else 1
    return Patched(clean, corrupt, (clean, corrupt)[base] + estimates, anatomy.logits(both.runs.final[0, read[0]]).argmax())


def _changes(anatomy: Anatomy, both: PairRuns, base: int, source: int, component: str, exact_softmax: bool) -> list[Float[Tensor, "head column d_head"]]:
    """Per layer, what the patch adds to the site: to z under the patched softmax, or to the component at the patched columns."""
    runs, n_columns = both.runs, len(both.runs.columns)
    if exact_softmax:
        alternatives = alternative_z(anatomy, both, base, source, component)
        return [(_wide(new) - _wide(z[base])).transpose(0, 1) for new, z in zip(alternatives, runs.z, strict=True)]
    where = both.patched[both.start :, None]
    sites = [x.transpose(1, 2) for x in runs.z] if component == "z" else [x[:, :, -n_columns:] for x in getattr(runs, component)]
    return [(_wide(x[source]) - _wide(x[base])) * where for x in sites]


def _between(anatomy: Anatomy, pair: Pair, both: PairRuns, base: int, source: int, steps: int) -> Iterator[tuple[PairRuns, int]]:
    """Runs whose input embeddings lie at the midpoints of ``steps`` equal pieces of the line from base to source."""
    tokens = torch.stack((pair.clean, pair.corrupt))[:, both.shared :]
    embedded = anatomy.embed(tokens, torch.arange(both.shared, len(pair.clean), device=tokens.device))
    for step in range(steps):
        mixed = torch.lerp(embedded[base], embedded[source], (step + 0.5) / steps)[None]
        runs = trace(anatomy, tokens[:1], both.runs.columns, ("residual", "k", "v"), prefix=both.prefix, start=(0, mixed))
        yield replace(both, runs=runs), 0


def _backward(
    anatomy: Anatomy, both: PairRuns, row: int, measure: Measure, site: str, drops: bool
) -> Iterator[tuple[int, list[Float[Tensor, "head column d_head"]]]]:
    """Gradient of the metric at ``site`` of every layer, last layer first; with ``drops`` then also the one of each later layer dropped."""
    runs = both.runs
    final = runs.final[row : row + 1].detach().requires_grad_()
    with torch.enable_grad():
        flows = [*torch.autograd.grad(measure(final).sum(), final)]  # gradients at the residual stream that leaves the layer
    for index in reversed(range(anatomy.n_layers)):
        layer = anatomy.layers[index]
        residual = runs.residual[index][row : row + 1].detach().requires_grad_()
        with torch.enable_grad():
            q, k, v = layer.project(residual, runs.ropes[layer.rope_kind])
            z = layer.attend(q, k, v, both.behind(index, row))
            after = layer.feed(residual + layer.write(z, residual))
        activation = {"z": z, "q": q, "k": k, "v": v}[site]
        entering, gradients = zip(*(torch.autograd.grad(after, (residual, activation), flow, retain_graph=True) for flow in flows), strict=True)
        yield index, [_wide(x[0].transpose(0, 1) if site == "z" else x[0]) for x in gradients]
        # With what this layer adds held constant, the undropped gradient passes it by unchanged.
        flows = [*entering, *(flows[:1] if drops else [])]


def _grad_drop(effects: Float[Tensor, "gradient head"], n_layers: int) -> Float[Tensor, "head"]:
    """GradDrop, Eq. 11: first the undropped estimate, then the one of each later layer dropped; dropping an earlier layer changes nothing."""
    plain, dropped, others = effects[0], effects[1:], max(1, n_layers - 1)
    return torch.copysign(((others - len(dropped)) * plain.abs() + dropped.abs().sum(0)) / others, plain)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
