"""Functional similarity: do two layers, or two heads, matter for the same probes."""

import torch
from jaxtyping import Float
from torch import Tensor

from hydralens.errors import InputError
from hydralens.patching.effects import HeadEffects

FEWEST = 3  # probes: any two profiles over two probes correlate perfectly


def head_profiles(effects: dict[str, HeadEffects]) -> Float[Tensor, "probe layer head"]:
    """Each head's causal profile: its mean effect on every probe, float64.

    Raises:
        InputError: fewer than three probes.
    """
    if len(effects) < FEWEST:
        raise InputError(f"functional similarity correlates effects over probes and needs at least {FEWEST}; there are {len(effects)}")
    return torch.stack([effect.values.double() for effect in effects.values()])


def layer_profiles(effects: dict[str, HeadEffects]) -> Float[Tensor, "probe layer"]:
    """Each layer's causal profile: the sum of its heads' effects on every probe; heads that cannot be measured count as 0."""
    return head_profiles(effects).nan_to_num(0).sum(-1)


def correlation(profiles: Float[Tensor, "probe item"]) -> Float[Tensor, "item item"]:
    """Pearson correlation over probes of every two items, float32; NaN for an item with the same effect on every probe."""
    centred = profiles - profiles.mean(0)
    norm = centred.norm(dim=0)
    unit = centred / torch.where(norm > 1e-12, norm, torch.nan)
    return (unit.T @ unit).clamp(-1, 1).float()
