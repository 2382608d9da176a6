"""DuoAttention's gates: trained on the given probes, or read from a published table."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from hydralens.detectors.base import whole_effects
from hydralens.errors import InputError
from hydralens.mask_formats import read_duo_gates
from hydralens.models.forward import trace
from hydralens.models.info import ModelInfo
from hydralens.models.lens import LensModel
from hydralens.patching.pairs import unpad
from hydralens.patching.restriction import SINKS, WINDOW, gated_run, narrowed
from hydralens.probes.base import Probe
from hydralens.scores import HeadScores, by_label, describe, scores_of

LEARNING_RATE, L1 = 0.02, 0.05
CHECKPOINT_FROM = 2048  # prompts of this many tokens recompute each layer in the backward pass


def duo_attention(
    model: LensModel,
    probes: Sequence[Probe],
    *,
    steps: int = 100,
    lr: float = LEARNING_RATE,
    l1: float = L1,
    window: int = WINDOW,
    sinks: int = SINKS,
    seed: int = 0,
    verbose: bool = False,
) -> HeadScores:
    """Gates of DuoAttention (Xiao et al. 2024, arXiv 2410.10819), trained: 1 = this KV head needs full attention, 0 = sinks and a window do.

    Every KV head's output is ``a * full + (1 - a) * restricted``, its gate ``a`` starting at 1 and kept in 0..1. What is minimised is the mean squared
    difference to the whole model's last hidden states (after the final norm) at the read positions, plus ``l1`` times the mean gate.
    AdamW without decay; the learning rate rises over the first fifth of the steps and falls over the last, between a tenth and all of ``lr``.
    A gate stands for all query heads of its group.

    The source takes 2000 steps on prompts of up to 32K tokens with ten passkeys, a window of 256 and 128 sinks; the defaults
    here suit prompts of a few hundred tokens. One prompt a step, in a new random order each round. As in the paper's formula, full and restricted
    attention read the same q, k, v; its code takes the full output from the unchanged model's run.

    Args:
        steps: each costs about four forwards.

    Raises:
        InputError: no probes, two of one name and corruption, or ``steps`` is not positive.
    """
    probes = list(by_label(probes).values())
    if steps < 1:
        raise InputError(f"steps is {steps}; give a positive number")
    gates = _train(model, probes, steps, lr, l1, window, sinks, seed, verbose)
    per_query_head = gates.repeat_interleave(model.info.group, -1)[None]
    capability = "+".join(dict.fromkeys(probe.capability for probe in probes))
    effects = whole_effects(model.info, "duo_attention", per_query_head, "gate", "answer", "all", capability)
    return scores_of(model.info, "duo_attention", [effects], [describe(probe, probe.n_pairs, "none", "duo_attention") for probe in probes])


def read_duo_attention(path: str | Path, model: LensModel | ModelInfo) -> HeadScores:
    """Published gates as scores: a ``full_attention_heads.tsv`` with one line a layer and one gate a KV head, clipped to 0..1.

    Raises:
        InputError: the file cannot be read, holds something else than finite numbers, or is not of the model's shape.
    """
    info = model if isinstance(model, ModelInfo) else model.info
    gates = read_duo_gates(path, info).repeat_interleave(info.group, -1)[None]
    return scores_of(info, "duo_attention", [whole_effects(info, "duo_attention", gates, "gate", "answer", "imported", "retrieval")], [])


def _train(
    model: LensModel, probes: Sequence[Probe], steps: int, lr: float, l1: float, window: int, sinks: int, seed: int, verbose: bool
) -> Float[Tensor, "layer kv_head"]:
    model.warn_of_bypassed_hooks()
    anatomy = model.anatomy
    pairs = [unpad(probe, index, model.device) for probe in probes for index in range(probe.n_pairs)]

    def hidden(residual: Float[Tensor, "n d_model"]) -> Float[Tensor, "n d_model"]:
        return anatomy.final_norm(residual).float()

    with torch.no_grad():
        targets = [hidden(trace(anatomy, pair.clean[None], pair.read).final[0]) for pair in pairs]
    gates = torch.ones(anatomy.n_layers, anatomy.n_kv_heads, device=model.device, requires_grad=True)
    optimizer = torch.optim.AdamW([gates], lr=lr, weight_decay=0)
    ramp = max(1, steps // 5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, max((step + 1) / ramp, 0.1), max((steps - step) / ramp, 0.1)))
    generator, order = torch.Generator().manual_seed(seed), []
    for _ in tqdm(range(steps), desc="duo_attention: training gates", disable=not verbose, leave=False):
        order = order or torch.randperm(len(pairs), generator=generator).tolist()
        index = order.pop()
        pair, target = pairs[index], targets[index]
        run = gated_run(
            anatomy, pair.clean[None], gates.repeat_interleave(anatomy.group, -1)[None], narrowed(window, sinks), len(pair.clean) >= CHECKPOINT_FROM
        )
        loss = (hidden(run[0, pair.read]) - target).square().mean() + l1 * gates.abs().mean()
        gates.grad = torch.autograd.grad(loss, gates)[0]
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            gates.clamp_(0, 1)
    return gates.detach()
