"""Tiny hybrids for the tests of this folder."""

import torch

from hydralens.head_mask import HeadMask
from hydralens.hybrid import build_hybrid
from hydralens.models.lens import wrap_model
from tests.tiny import tiny_hf

BASES = ("llama", "qwen2", "qwen3", "mistral")
TEACHER = {"full_rope": True, "log_scale": None, "full_gate": None, "fusion_norm": False}  # a full head that is the base model's own


def mask_of(lens, full) -> HeadMask:
    return HeadMask.of(torch.as_tensor(full, dtype=torch.bool), lens.info, rule="by hand")


def mixed(n_layers: int, n_heads: int) -> torch.Tensor:
    """Layers with one full head, with several that split KV groups, with none, and with full heads only."""
    full = torch.zeros(n_layers, n_heads, dtype=torch.bool)
    full[0, 1] = True
    full[1, [0, 2, n_heads - 1]] = True
    full[3] = True
    return full


def tiny_hybrid(family: str = "llama", full=None, seed: int = 0, dtype: torch.dtype = torch.float32, **choices):
    """A hybrid of a tiny random model whose new parameters (gates, decays) are random too, so that they matter; and its teacher."""
    lens = wrap_model(tiny_hf(family, seed, dtype))
    full = mixed(lens.info.n_layers, lens.info.n_heads) if full is None else full
    hybrid = build_hybrid(lens, mask_of(lens, full), **choices)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in hybrid.named_parameters():
            if any(part in name for part in ("a_proj", "b_proj", "gate", "conv", "gamma")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return hybrid, lens


def random_tokens(batch: int, n_pos: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, (batch, n_pos), generator=torch.Generator().manual_seed(seed))
