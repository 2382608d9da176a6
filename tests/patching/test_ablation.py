import pytest
import torch

from hydralens.errors import InputError
from hydralens.models.forward import trace
from hydralens.models.lens import wrap_model
from hydralens.patching.ablation import ablate, mean_z
from hydralens.patching.restriction import restricted_attention
from tests.patching.reference import record
from tests.patching.test_activation import random_probe
from tests.tiny import FAMILIES, tiny_hf


def hook_count(hf):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in hf.modules()]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3"])
def test_zero_ablation_equals_zeroed_output_weights(family):
    model, probe = wrap_model(tiny_hf(family)), random_probe()
    with torch.no_grad(), ablate(model, [(1, 2), (3, 0)], how="zero"):
        live = model.hf(input_ids=probe.clean, use_cache=False).logits
        engine = model.read_logits(probe.clean, probe.attention_mask, probe.read_positions)
    edited = tiny_hf(family)
    d_head = model.info.head_dim
    for layer, head in [(1, 2), (3, 0)]:
        weight = wrap_model(edited).anatomy.layers[layer].o.weight.data
        (weight if family == "gpt2" else weight.T)[head * d_head : (head + 1) * d_head] = 0
    expected = edited(input_ids=probe.clean, use_cache=False).logits
    torch.testing.assert_close(live, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(engine, expected[:, probe.read_positions[0]], atol=1e-5, rtol=1e-5)


def test_mean_is_over_real_tokens_and_resample_is_the_reference_prompt():
    hf = tiny_hf("llama")
    model, probe, padded = wrap_model(hf), random_probe(), random_probe(pad=(3, 2))
    expected = torch.stack([torch.cat([record(hf, tokens, "z")[0][layer] for tokens in probe.clean]).mean(0) for layer in range(4)])
    torch.testing.assert_close(mean_z(model, [padded]).flatten(1), expected, atol=1e-5, rtol=1e-5)
    # A prompt resampled from itself is unchanged.
    with torch.no_grad(), ablate(model, [(0, 0), (2, 3)], how="resample", reference=[probe]):
        torch.testing.assert_close(hf(input_ids=probe.clean[:1]).logits, tiny_hf("llama")(input_ids=probe.clean[:1]).logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="the prompt has 28 tokens, the reference 23"), ablate(model, [(0, 0)], how="resample", reference=[probe]):
        hf(input_ids=padded.clean)


def test_hooks_are_gone_after_the_block_and_after_an_exception():
    hf = tiny_hf("llama")
    model = wrap_model(hf)
    users = hf.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda m, a: None)
    before = hook_count(hf)
    with pytest.raises(ZeroDivisionError), ablate(model, [(1, 0)], how="zero"):
        raise ZeroDivisionError
    assert hook_count(hf) == before
    with pytest.raises(InputError, match="ran layer 1"), ablate(model, [(1, 0)], how="zero"):
        pass
    assert hook_count(hf) == before
    users.remove()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"heads": [(4, 0)]}, "L4H0 does not exist"),
        ({"heads": [(0, -1)]}, "L0H-1 does not exist"),
        ({"heads": [(0, 0)], "how": "noise"}, "'noise' is not one of zero, mean, resample"),
        ({"heads": [(0, 0)], "how": "mean"}, "needs a reference"),
    ],
)
def test_wrong_arguments_are_refused(kwargs, message):
    with pytest.raises(InputError, match=message), ablate(wrap_model(tiny_hf("llama")), **{"how": "zero", **kwargs}):
        pass


@pytest.mark.parametrize("family", FAMILIES)
def test_restricted_attention_equals_a_mask_per_head(family):
    """Reference: explicit softmax under a dense [head, query, key] mask."""
    model = wrap_model(tiny_hf(family, dtype=torch.float64))
    anatomy, tokens = model.anatomy, torch.randint(3, 97, (1, 30), generator=torch.Generator().manual_seed(1))
    keep = torch.rand(anatomy.n_layers, anatomy.n_heads, generator=torch.Generator().manual_seed(2)) < 0.4
    keep[0], keep[1] = True, False
    window, sinks = 7, 2
    distance = torch.arange(30)[:, None] - torch.arange(30)

    def dense(index, q, k, v):
        layer = anatomy.layers[index]
        own = (distance >= 0) & (distance < (layer.window or 99))
        recent = (distance >= 0) & ((distance < min(window, layer.window or 99)) | ((torch.arange(30) < sinks) if layer.window is None else False))
        visible = torch.where(keep[index][:, None, None], own, recent)
        k, v = (x.repeat_interleave(anatomy.group, 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * layer.scale
        scores = torch.tanh(scores / layer.softcap) * layer.softcap if layer.softcap else scores
        return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v).transpose(1, 2)

    with torch.no_grad():
        runs = [trace(anatomy, tokens, torch.arange(30), attention=a).final for a in (restricted_attention(anatomy, keep, window, sinks), dense)]
    torch.testing.assert_close(*runs, atol=1e-8, rtol=1e-8)
