"""Ablation of chosen heads in a live model: z set to zero, to its mean, or to another prompt's."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hydralens.errors import InputError, check_word
from hydralens.models.forward import trace
from hydralens.models.lens import LensModel
from hydralens.patching.pairs import check_heads
from hydralens.probes.base import Probe

HOW = ("zero", "mean", "resample")


@contextmanager
def ablate(model: LensModel, heads: Sequence[tuple[int, int]], how: str = "mean", reference: Sequence[Probe] | Tensor | None = None) -> Iterator[None]:
    """Within the block every forward of the model, its own ``generate`` included, runs without the given heads' contribution.

    Args:
        heads: ``(layer, head)`` pairs.
        how: ``zero``; ``mean`` (over all real tokens of the reference's clean prompts); ``resample`` (the reference's first clean
            prompt at the same positions; for whole prompts, not for generation with a cache).
        reference: probes the replacement is taken from, or a tensor from ``mean_z``, so that it is computed once for many blocks.

    Raises:
        InputError: unknown ``how``, a head that does not exist, a missing reference, a prompt longer than the resampled one, or a
            head that no forward within the block has run.
    """
    check_word("how", how, HOW)
    if how != "zero" and reference is None:
        raise InputError(f"{how} ablation needs a reference: pass the probes it is taken from")
    n_heads = model.info.n_heads
    check_heads(heads, model.info.n_layers, n_heads)
    values = _replacement(model, how, reference)  # [layer, pos or 1, head, d_head]
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)
    unrun = set(by_layer)

    def hook(layer: int, chosen: list[int]):
        def replace(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            z = args[0].reshape(*args[0].shape[:2], n_heads, -1).clone()
            new = values[layer].to(z)
            if len(new) > 1 and z.shape[1] > len(new):
                raise InputError(f"resample: the prompt has {z.shape[1]} tokens, the reference {len(new)}; use a reference at least as long")
            z[:, :, chosen] = new[: z.shape[1], chosen] if len(new) > 1 else new[:, chosen]
            unrun.discard(layer)
            return (z.reshape(args[0].shape), *args[1:])

        return replace

    with ExitStack() as stack:
        for layer, chosen in by_layer.items():
            stack.callback(model.anatomy.layers[layer].z_input.register_forward_pre_hook(hook(layer, chosen)).remove)
        yield
    if unrun:
        raise InputError(f"ablate: no forward within the block ran layer {min(unrun)}, so nothing was ablated there")


@torch.no_grad()
def mean_z(model: LensModel, probes: Sequence[Probe]) -> Float[Tensor, "layer 1 head d_head"]:
    """Mean z of every head over all real tokens of the probes' clean prompts, float32."""
    total, count = 0, 0
    for tokens in _prompts(probes):
        columns = torch.arange(len(tokens), device=model.device)
        z = trace(model.anatomy, tokens[None].to(model.device), columns, ("z",)).z
        total = total + torch.stack([layer[0].float().sum(0) for layer in z])
        count += len(tokens)
    return (total / count)[:, None]


@torch.no_grad()
def _replacement(model: LensModel, how: str, reference: Sequence[Probe] | Tensor | None) -> Float[Tensor, "layer pos head d_head"]:
    if how == "zero":
        return torch.zeros(model.info.n_layers, 1, model.info.n_heads, model.info.head_dim)
    if isinstance(reference, Tensor):
        return reference
    if how == "mean":
        return mean_z(model, reference)
    tokens = next(iter(_prompts(reference))).to(model.device)
    return torch.stack([z[0] for z in trace(model.anatomy, tokens[None], torch.arange(len(tokens), device=model.device), ("z",)).z])


def _prompts(probes: Sequence[Probe]) -> Iterator[Tensor]:
    for probe in probes:
        for tokens, mask in zip(probe.clean, probe.attention_mask.bool(), strict=True):
            yield tokens[mask]
