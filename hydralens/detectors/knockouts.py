"""One head at a time taken away or narrowed, everything after it recomputed: accuracy drop, and KL of the answer's distribution.

Exact, and therefore dear: about half a forward a head. All heads of a layer and of the layers after it continue as rows of one batch from
the whole run's residual stream, from the first position that can change, and only the logits at the read positions are computed.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hydralens.detectors.base import effects_of, over_probes
from hydralens.errors import InputError, check_word
from hydralens.models.forward import Trace, trace
from hydralens.models.lens import LensModel
from hydralens.patching.ablation import mean_z
from hydralens.patching.batching import in_batches
from hydralens.patching.effects import HeadEffects
from hydralens.patching.pairs import Pair
from hydralens.patching.restriction import SINKS, WINDOW, both_attentions
from hydralens.patching.runs import NO_HEAD, PairRuns, patched_runs
from hydralens.patching.sweep import default_batch_tokens
from hydralens.probes.base import Probe
from hydralens.scores import HeadScores

ABLATIONS = ("zero", "mean")
METRICS = ("accuracy", "log-probability")


def ablation_drop(
    model: LensModel, probes: Sequence[Probe], *, how: str = "zero", metric: str = "accuracy", batch_tokens: int | None = None, verbose: bool = False
) -> HeadScores:
    """Score of Retrieval-Aware Distillation (Bick et al. 2026, arXiv 2602.11374): what ablating one head, at every position, costs.

    A prompt is right when every answer token has the highest logit, each after the right tokens before it. The score is the accuracy with all heads
    minus that without the head; a pair contributes -1, 0 or 1, so few pairs leave many ties: ``log-probability`` has none.

    The source ablates by zeroing and asks a synthetic key-value retrieval (``probes.kv_recall`` is one); ours counts answered prompts only.

    Args:
        how: ``zero``, or ``mean``: z is set to its mean over all tokens of the probe's clean prompts.
        metric: ``accuracy``, or ``log-probability``: the drop of the whole answer's log-probability, in nats.
        batch_tokens: tokens of ablated runs computed at once; halved when memory runs out.

    Raises:
        InputError: unknown ``how`` or ``metric``, no probes, or two of one name and corruption.
        ProbeNotSolvedError: the model answers no pair.
    """
    effects = partial(ablation_drop_effects, model, how=how, metric=metric, batch_tokens=batch_tokens, verbose=verbose)
    return over_probes(model, probes, "ablation_drop", effects)


def ablation_drop_effects(
    model: LensModel, probe: Probe, *, how: str = "zero", metric: str = "accuracy", batch_tokens: int | None = None, verbose: bool = False
) -> HeadEffects:
    """``ablation_drop`` of one probe, pair by pair; ``clean_metric`` is the metric with all heads."""
    check_word("how", how, ABLATIONS)
    check_word("metric", metric, METRICS)
    anatomy = model.anatomy
    replacement = mean_z(model, [probe]) if how == "mean" else torch.zeros(anatomy.n_layers, 1, anatomy.n_heads, anatomy.head_dim)

    def measure(residual: Float[Tensor, "row n d_model"], pair: Pair) -> Float[Tensor, "row"]:
        logits = anatomy.logits(residual)
        if metric == "accuracy":
            return (logits.argmax(-1) == pair.answer).all(-1).float()
        return logits.log_softmax(-1).gather(-1, pair.answer.expand(len(logits), -1)[..., None])[..., 0].sum(-1)

    def of_pair(pair: Pair):
        columns = torch.arange(len(pair.clean), device=model.device)
        run = trace(anatomy, pair.clean[None], columns, ("residual", "z", *anatomy.past))
        ablated = [value.to(z).expand_as(z[0]) for value, z in zip(replacement, run.z, strict=True)]

        def drop(whole: Tensor, rows: Tensor) -> Tensor:
            metrics = measure(torch.cat((whole[None], rows)), pair)
            return metrics[0] - metrics[1:]

        return _one_by_one(model, run, ablated, pair, drop, batch_tokens), run.final[0, pair.read]

    def clean(final: Tensor, pair: Pair) -> Tensor:
        return measure(final[None], pair)[0]

    about = {"component": "z", "positions": "all", "readout": metric}
    return effects_of(model, probe, "ablation_drop", of_pair, metric=clean, verbose=verbose, **about)


def zero_shot_kl(
    model: LensModel, probes: Sequence[Probe], *, window: int = WINDOW, sinks: int = SINKS, batch_tokens: int | None = None, verbose: bool = False
) -> HeadScores:
    """KL divergence, in nats, from the model to the model with one head limited to attention sinks and a recent window; mean over the read positions.

    The untrained stand-in, head by head, for KL-guided layer selection (arXiv 2512.20569), which trains a student per layer: how far does the
    distribution over the next token move when this head alone is linearised in the crudest way. It asks neither which token was right nor
    how heads act together; ``restriction`` does both.

    Args:
        window, sinks: a restricted head sees the last ``window`` positions, its own included, and the first ``sinks``.
        batch_tokens: tokens of restricted runs computed at once; halved when memory runs out.

    Raises:
        InputError: a window or sinks that no head can have, no probes, or two of one name and corruption.
        ProbeNotSolvedError: the model answers no pair.
    """
    effects = partial(zero_shot_kl_effects, model, window=window, sinks=sinks, batch_tokens=batch_tokens, verbose=verbose)
    return over_probes(model, probes, "zero_shot_kl", effects)


def zero_shot_kl_effects(
    model: LensModel, probe: Probe, *, window: int = WINDOW, sinks: int = SINKS, batch_tokens: int | None = None, verbose: bool = False
) -> HeadEffects:
    """``zero_shot_kl`` of one probe, pair by pair."""
    if window < 1 or sinks < 0:
        raise InputError(f"window is {window} and sinks {sinks}; a head sees at least itself: give a window of 1 or more and sinks of 0 or more")
    anatomy = model.anatomy

    def of_pair(pair: Pair):
        start = min(window, int(pair.read.min()))  # a window leaves out nothing before
        restricted = []

        def attention(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            full, narrow = both_attentions(anatomy.layers[index], q, k, v, window, sinks)
            restricted.append(narrow[0, start:])
            return full

        columns = torch.arange(start, len(pair.clean), device=model.device)
        run = trace(anatomy, pair.clean[None], columns, ("residual", "z", "k", "v"), attention=attention)

        def divergence(whole: Tensor, rows: Tensor) -> Tensor:
            full, narrow = (anatomy.logits(x).log_softmax(-1) for x in (whole, rows))
            return (full.exp() * (full - narrow)).sum(-1).mean(-1)

        return _one_by_one(model, run, restricted, pair, divergence, batch_tokens), run.final[0, pair.read - start]

    return effects_of(model, probe, "zero_shot_kl", of_pair, component="z", positions="all", verbose=verbose)


def _one_by_one(
    model: LensModel,
    run: Trace,
    alternatives: list[Float[Tensor, "column head d_head"]],
    pair: Pair,
    compare: Callable[[Float[Tensor, "n d_model"], Float[Tensor, "cell n d_model"]], Float[Tensor, "cell"]],
    batch_tokens: int | None,
) -> Float[Tensor, "layer head"]:
    """``compare(whole, rows)`` of the run with each head's z replaced by its alternative, from the final residual streams at the read positions."""
    anatomy, start = model.anatomy, int(run.columns[0])
    runs = PairRuns(run, None, start, torch.ones_like(pair.clean, dtype=torch.bool), 0)

    def replaced(cells: list[tuple[int, int]]) -> Float[Tensor, "cell"]:
        cells = [(cells[0][0], NO_HEAD), *cells]
        *_, (_, rows) = patched_runs(anatomy, runs, 0, alternatives, cells, live=True)
        whole, *rest = rows[:, pair.read - start].split((1, len(cells) - 1))
        return compare(whole[0], rest[0])

    cells = list(np.ndindex(anatomy.n_layers, anatomy.n_heads))
    values = in_batches(replaced, cells, max(1, (batch_tokens or default_batch_tokens(model)) // len(run.columns)))
    return values.reshape(anatomy.n_layers, anatomy.n_heads)
