"""Slow and plain: attention maps and values from transformers' own eager forward, and probes for random models."""

import copy
from dataclasses import replace

import torch

from tests.patching.reference import record
from tests.patching.test_activation import random_probe


@torch.no_grad()
def hf_rows(hf, tokens, read):
    """[layer, read, head, pos] of the whole attention map."""
    own = copy.deepcopy(hf)  # asked for its attention maps, a model of transformers 5 keeps hooks for good
    attentions = own(input_ids=tokens[None], use_cache=False, output_attentions=True).attentions
    return torch.stack([attention[0].transpose(0, 1)[read] for attention in attentions])


@torch.no_grad()
def hf_logits(hf, tokens, read):
    return hf(input_ids=tokens[None], use_cache=False).logits[0, read]


@torch.no_grad()
def hf_values(hf, model, tokens):
    """[layer, head, pos, d_head], KV heads repeated over their groups."""
    v, _, _ = record(hf, tokens, "v")
    info = model.info
    size = info.n_kv_heads * info.head_dim
    per_layer = torch.stack([v[layer][:, -size:] for layer in range(info.n_layers)])  # GPT-2's projection is fused: v comes last
    return per_layer.unflatten(-1, (info.n_kv_heads, info.head_dim)).transpose(1, 2).repeat_interleave(info.group, 1)


def answered_probe(hf, **kwargs):
    """A random probe whose answer is what the model says, except for the last pair's first token."""
    probe = random_probe(**kwargs)
    answer = torch.stack([hf_logits(hf, tokens, read).argmax(-1) for tokens, read in zip(probe.clean, probe.read_positions, strict=True)])
    answer[-1, 0] = (answer[-1, 0] + 1) % 97
    return replace(probe, answer=answer, foil=(answer + 5) % 97)


def padded(probe, before=3, after=2):
    """The same prompts with padding on both sides."""
    clean, corrupt = (torch.nn.functional.pad(x, (before, after), value=1) for x in (probe.clean, probe.corrupt))
    mask = torch.nn.functional.pad(probe.attention_mask, (before, after))
    moved = {"read_positions": probe.read_positions + before, "needle_span": probe.needle_span + before}
    return replace(probe, clean=clean, corrupt=corrupt, attention_mask=mask, **moved)
