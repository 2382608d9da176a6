"""Rival hybrids as parts of this builder: which heads are full, what the others are, and the choices that go with it.

Each says where it differs from the original. A recipe of whole layers is a head mask like any other, so that all can be trained and compared alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from hydralens.errors import InputError

Layers = Callable[[int], list[int]]


@dataclass(frozen=True)
class Recipe:
    """One hybrid.

    Attributes:
        source: where it is described.
        others: the kind of every head that is not full.
        full_layers: the layers that are full, of so many; None: a head mask says which heads are.
        choices: fields of ``HydraHeadConfig``.
        differs: what is not as in the original.
        window_layers: layers of window heads, where no mask is given.
    """

    source: str
    others: str
    full_layers: Layers | None = None
    choices: dict[str, Any] = field(default_factory=dict)
    differs: str = "nothing known"
    window_layers: Layers = lambda _: []


def every(period: int) -> Layers:
    """The last of every ``period`` layers."""

    def layers(n_layers: int) -> list[int]:
        if n_layers < period:
            raise InputError(f"one full layer in {period} leaves no full layer of {n_layers}; give a mask or use a deeper model")
        return list(range(period - 1, n_layers, period))

    return layers


def placed(*layers: int, of: int) -> Layers:
    """Layers of a model of ``of`` layers, moved to the same relative depth: the first stays the first, the last the last."""
    return lambda n_layers: sorted({round(layer * (n_layers - 1) / (of - 1)) for layer in layers})


_AS_BASE = {"full_rope": True, "log_scale": None, "full_gate": None, "fusion_norm": False}
_ROPE_GATED = {"full_rope": True, "log_scale": None, "full_gate": "channel"}
_NOPE = {"full_rope": False, "log_scale": None, "full_gate": None}

RECIPES: dict[str, Recipe] = {
    "hydrahead": Recipe("arXiv 2606.20097", "gdn"),
    "qwen3-next": Recipe(
        "transformers' qwen3_next",
        "gdn",
        every(4),
        _ROPE_GATED | {"linear_conv": 4, "linear_rope": False, "linear_gate": "channel"},
        "RoPE on all dimensions instead of a quarter; one value head a query head; no SiLU behind the convolution; sigmoid output gates; "
        "full heads are normalised too",
    ),
    "kimi-linear": Recipe(
        "arXiv 2510.26692",
        "kda",
        every(4),
        _NOPE | {"linear_conv": 4, "linear_rope": False, "linear_gate": "channel"},
        "grouped-query attention instead of MLA; no SiLU behind the convolution; output gate of full rank; full heads are normalised too",
    ),
    "minimax-m1": Recipe(
        "arXiv 2506.13585",
        "lightning",
        every(8),
        {"full_rope": True, "log_scale": None, "full_gate": None, "linear_gate": "channel", "norm_scope": "linear", "lightning": "minimax"},
        "RoPE on all dimensions instead of half; pre-norm blocks of the base model instead of DeepNorm",
    ),
    "nemotron-3": Recipe(
        "NVIDIA Nemotron 3 Nano",
        "mamba2",
        placed(3, 7, 11, 15, 19, 24, of=29),
        _NOPE | {"linear_conv": 4, "linear_gate": "channel"},
        "state as wide as a head; B and C of every head of its own; norm per head and before the gate; sigmoid gate; attention and MLP in one block; "
        "a base model's QK-norm is kept, between convolution and SiLU",
    ),
    "hypenet": Recipe(
        "arXiv 2601.22156",
        "lightning",
        None,
        {"full_gate": "channel", "linear_gate": "channel", "log_scale_in_training": False, "norm_scope": "linear", "lightning": "hypenet"},
        "its layers were searched for one model: give them as a mask (published_mask)",
    ),
    "jet-nemotron": Recipe(
        "arXiv 2508.15884",
        "jet",
        placed(14, 19, of=28),
        _ROPE_GATED | {"full_gate": None, "linear_conv": 4, "linear_gate": "channel", "window_size": 1152, "sinks": 0},
        "keys and values as wide as a head of the base model, not 96 and 256, so that its output projection fits; sigmoid output gate; the convolution "
        "starts as the identity, its second factor alone at 0; a base model's QK-norm and biases are kept, before SiLU; full and window heads are normalised "
        "too; the layers of the 2B model, which were searched for Qwen2.5-1.5B, at the same relative depth",
        placed(20, 21, of=28),
    ),
    "duo": Recipe("arXiv 2410.10819", "window", None, _AS_BASE | {"window_size": 256, "sinks": 128}),
    "moba": Recipe(
        "arXiv 2502.13189",
        "moba",
        placed(29, 30, 31, of=32),
        _AS_BASE | {"moba_block": 512, "moba_top": 3},
        "blocks of its training runs; its 8B model for a million tokens has 4096 and 12 (moba_block, moba_top)",
    ),
    "liger": Recipe(
        "arXiv 2503.01496",
        "window+gla",
        lambda _: [],
        _AS_BASE | {"window_size": 64, "sinks": 0},
        "window and linear attention have projections of their own, which start alike and part in training; a base model's QK-norm is kept, before "
        "softmax and decay",
    ),
    "hymba-like": Recipe(
        "arXiv 2411.13676",
        "window+mamba2",
        placed(0, 15, 31, of=32),
        _AS_BASE | {"window_size": 1024, "sinks": 0, "linear_conv": 3, "linear_gate": "channel"},
        "Mamba-2 instead of Mamba-1, its state as wide as a head; full layers have attention alone; no meta tokens; no keys and values shared by layers; "
        "sigmoid gate; a base model's QK-norm is kept",
    ),
}

NOT_BUILT = {
    "mla": "latent attention needs a latent that a grouped-query model has not got",
    "minimax-deepnorm": "its blocks take the residual behind the norm, a pre-norm model's do not; minimax-m1 is its mixer in the base model's blocks",
    "hymba": "Mamba-1 has a decay for every channel and state, and its layers share keys and values; hymba-like is what comes nearest",
    "cross-layer-kv": "layers that share keys and values cannot be told apart head by head",
    "iha": "with more than one pseudo-head the heads are mixed, so a head mask has no meaning",
    "nsa": "its block compressor is learned from scratch; there is nothing in a pretrained model to start it from",
    "samba": "Mamba-1 has a decay for every channel and state, which is no row of the recurrence used here",
    "lolcats": "its linear and window parts share one softmax denominator, so they are not two kinds of heads",
    "still": "it routes tokens, not heads",
}


def recipe_named(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        InputError: unknown, or one that cannot be built, with the reason.
    """
    if name in NOT_BUILT:
        raise InputError(f"recipe {name!r} cannot be built: {NOT_BUILT[name]}; there are {', '.join(RECIPES)}")
    if name not in RECIPES:
        raise InputError(f"recipe {name!r} is unknown; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def kinds_of(name: str, n_layers: int, n_heads: int, full: Bool[Tensor, "layer head"] | None) -> list[list[str]]:
    """The kind of every head: of the recipe's own layers, or of ``full``, which wins where both are there.

    Raises:
        InputError: the recipe needs a mask and there is none, or the model has too few layers for the recipe's rule.
    """
    recipe = recipe_named(name)
    if full is not None:
        return [["full" if keep else recipe.others for keep in row] for row in full.tolist()]
    if recipe.full_layers is None:
        raise InputError(f"recipe {name!r} needs a mask: it says which heads are full; pass one of select_heads, or a published one")
    whole = dict.fromkeys(recipe.window_layers(n_layers), "window") | dict.fromkeys(recipe.full_layers(n_layers), "full")
    return [[whole.get(layer, recipe.others)] * n_heads for layer in range(n_layers)]


@dataclass(frozen=True)
class Published:
    """Full layers or heads that others chose for one model."""

    model: str
    n_layers: int
    n_heads: int
    source: str
    layers: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()


_QRHEAD = "8-21,8-14,7-22,6-31,8-28,10-26,10-0,5-5,8-3,6-30,8-0,7-26,7-25,7-23,11-4,8-20"
PUBLISHED: dict[str, Published] = {
    "qwen3-1.7b-hypenet": Published("Qwen3-1.7B", 28, 16, "HypeNet (arXiv 2601.22156)", (2, 3, 6, 8, 9, 21, 25)),
    "qwen3-4b-hypenet": Published("Qwen3-4B", 36, 32, "HypeNet (arXiv 2601.22156)", (0, 1, 7, 14, 15, 22, 24, 31, 33)),
    "qwen3-8b-hypenet": Published("Qwen3-8B", 36, 32, "HypeNet (arXiv 2601.22156)", (1, 2, 4, 6, 7, 10, 24, 33, 34)),
    "qwen3-1.7b-recall": Published("Qwen3-1.7B", 28, 16, "largest recall drops in HypeNet's logs", (0, 21, 25, 19, 6, 11, 9)),
    "qwen3-1.7b-kl": Published("Qwen3-1.7B", 28, 16, "KL-guided, HypeNet Table 7", (21, 16, 25, 24, 0, 18, 19)),
    "llama-3.2-1b-zebra-4": Published("Llama-3.2-1B", 16, 32, "Zebra-Llama", (0, 5, 10, 14)),
    "llama-3.2-1b-zebra-6": Published("Llama-3.2-1B", 16, 32, "Zebra-Llama", (0, 2, 5, 8, 11, 14)),
    "llama-3.2-1b-zebra-8": Published("Llama-3.2-1B", 16, 32, "Zebra-Llama", (0, 2, 4, 6, 8, 10, 12, 14)),
    "llama-3.2-1b-qrhead": Published(
        "Llama-3.2-1B-Instruct", 16, 32, "QRHead", heads=tuple((int(a), int(b)) for a, b in (cell.split("-") for cell in _QRHEAD.split(",")))
    ),
    "llama-3.2-3b-kl": Published("Llama-3.2-3B", 28, 24, "KL-guided (arXiv 2512.20569)", (14, 8, 5, 12, 15, 13, 2)),
    "llama-3.2-3b-recall": Published("Llama-3.2-3B", 28, 24, "largest recall drops (arXiv 2512.20569)", (0, 16, 11, 14, 7, 5, 9)),
    "qwen2.5-1.5b-kl": Published("Qwen2.5-1.5B", 28, 12, "KL-guided (arXiv 2512.20569)", (14, 19, 20, 23, 24, 26, 27)),
    "qwen2.5-1.5b-recall": Published("Qwen2.5-1.5B", 28, 12, "largest recall drops (arXiv 2512.20569)", (0, 16, 13, 22, 1, 14, 18)),
    "qwen2.5-1.5b-smart": Published("Qwen2.5-1.5B", 28, 12, "SMART (arXiv 2512.20569)", (0, 4, 9, 14, 19, 23, 27)),
    "qwen2.5-1.5b-postnas": Published("Qwen2.5-1.5B", 28, 12, "Jet-Nemotron's full layers (arXiv 2508.15884)", (14, 19)),
    "qwen2.5-3b-kl": Published("Qwen2.5-3B", 36, 16, "KL-guided (arXiv 2512.20569)", (20, 32, 33, 21, 22, 25, 17, 19, 5)),
    "qwen2.5-3b-postnas": Published("Qwen2.5-3B", 36, 16, "Jet-Nemotron's full layers (arXiv 2508.15884)", (17, 20, 32)),
}


def published_mask(name: str, n_layers: int, n_heads: int) -> Bool[Tensor, "layer head"]:
    """Heads that stay full in a list published for one model.

    Raises:
        InputError: an unknown name, or a model of another shape.
    """
    if name not in PUBLISHED:
        raise InputError(f"published mask {name!r} is unknown; choose one of {', '.join(PUBLISHED)}")
    known = PUBLISHED[name]
    if (n_layers, n_heads) != (known.n_layers, known.n_heads):
        raise InputError(f"{name} is for {known.model}, {known.n_layers} layers of {known.n_heads} heads; this model has {n_layers} of {n_heads}")
    full = torch.zeros(n_layers, n_heads, dtype=torch.bool)
    full[list(known.layers)] = True
    for cell in known.heads:
        full[cell] = True
    return full
