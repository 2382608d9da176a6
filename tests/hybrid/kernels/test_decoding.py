"""Decoding in memory of a fixed size beside the model's own forward."""

import pytest
import torch

pytest.importorskip("triton")

from hydralens.errors import InputError  # noqa: E402
from hydralens.hybrid import Decoder, HybridCache  # noqa: E402
from tests.hybrid.examples import BASES, TEACHER, random_tokens, tiny_hybrid  # noqa: E402

CHOICES = {
    "defaults": {},
    "gates": {"full_gate": "channel", "linear_gate": "head"},
    "as the base": TEACHER,
    "norm over linear heads": {"norm_scope": "linear"},
    "RoPE kept": {"full_rope": True, "linear_rope": False, "negative_eigenvalues": True},
}


@torch.no_grad()
def decoded(hybrid, tokens, n_prompt, n_most=16):
    decoder = Decoder(hybrid, len(tokens), n_most)
    logits = [decoder.start(tokens[:, :n_prompt])]
    return torch.stack([*logits, *(decoder.step(tokens[:, t]) for t in range(n_prompt, tokens.shape[1]))], 1), decoder


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "choices"), [*((family, "defaults") for family in BASES if family != "mistral"), *(("qwen3", name) for name in CHOICES), ("llama", "gates")]
)
def test_equals_the_forward_over_the_sequence(device, family, choices):
    """Layers with one full head, several that split KV groups, none, and full heads only."""
    full = torch.ones(4, 8, dtype=torch.bool) if choices == "as the base" else None
    hybrid = tiny_hybrid(family, full, **CHOICES[choices])[0].to(device)
    tokens = random_tokens(2, 8).to(device)
    found, decoder = decoded(hybrid, tokens, 5)
    torch.testing.assert_close(found, hybrid(tokens).logits[:, 4:], atol=2e-5, rtol=1e-4)
    assert decoder.n_tokens == 8


@torch.no_grad()
def test_a_new_prompt_begins_anew(device):
    hybrid = tiny_hybrid()[0].to(device)
    first, second = random_tokens(1, 9).to(device), random_tokens(1, 6, seed=1).to(device)
    _, decoder = decoded(hybrid, first, 4)
    logits = [decoder.start(second[:, :3]), *(decoder.step(second[:, t]) for t in range(3, 6))]
    torch.testing.assert_close(torch.stack(logits, 1), hybrid(second).logits[:, 2:], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_goes_on_where_a_cache_ends_and_leaves_it_as_it_is(device):
    hybrid, tokens = tiny_hybrid()[0].to(device), random_tokens(1, 8).to(device)
    cache = HybridCache(hybrid.config.num_hidden_layers)
    hybrid(tokens[:, :7], cache=cache)
    decoder = Decoder(hybrid, 1, 8)
    decoder.take(cache)
    own = decoder.step(tokens[:, 7])
    torch.testing.assert_close(own, hybrid(tokens[:, 7:], cache=cache).logits[:, 0], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_what_it_cannot_do_is_said(device):
    hybrid, tokens = tiny_hybrid()[0].to(device), random_tokens(1, 4).to(device)
    decoder = Decoder(hybrid, 1, 4)
    decoder.start(tokens)
    with pytest.raises(InputError, match="all 4 places of the decoder's memory are taken; make it with a larger n_most"):
        decoder.step(tokens[:, 0])
    with pytest.raises(InputError, match="the cache holds 2 sequences of 4 tokens, the decoder has room for 1 of 4"):
        decoder.start(tokens.repeat(2, 1))
    for family, choices, kind in (("llama", {"linear_conv": 4}, "gdn"), ("mistral", {}, "full")):
        with pytest.raises(InputError, match=f"layer 0 has heads of kind '{kind}' that a decoder does not know"):
            Decoder(tiny_hybrid(family, **choices)[0].to(device), 1, 4)
