"""The hybrid against its teacher, against itself cut in pieces, and through transformers' own ways of using a model."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from hydralens.errors import InputError
from hydralens.hybrid import HybridCache, HydraHeadConfig, HydraHeadForCausalLM, build_hybrid
from hydralens.models.lens import wrap_model
from tests.hybrid.examples import BASES, TEACHER, mask_of, mixed, random_tokens, tiny_hybrid
from tests.tiny import tiny_hf


def close(own: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    """Equal relative to the largest logit; not closer, because the fusion norm magnifies rounding where a head's output is nearly zero."""
    torch.testing.assert_close(own, expected, atol=tolerance * float(expected.detach().abs().max()), rtol=0)


CHOICES = ({}, {"linear_conv": 4, "full_gate": "channel", "linear_gate": "head", "gamma": "head"}, {"fusion_norm": False, "full_gate": None})


@pytest.mark.parametrize("family", BASES)
def test_with_every_head_full_it_is_the_base_model(family):
    lens = wrap_model(tiny_hf(family))
    every = torch.ones(lens.info.n_layers, lens.info.n_heads, dtype=torch.bool)
    hybrid = build_hybrid(lens, mask_of(lens, every), **TEACHER)
    tokens = random_tokens(2, 40)
    torch.testing.assert_close(hybrid(tokens).logits, lens.hf(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", BASES)
def test_full_heads_are_the_base_models_where_others_are_linear(family):
    """The first layer sees the base model's input: its full heads' outputs are the base model's z, in the original order, whatever group they split."""
    lens = wrap_model(tiny_hf(family))
    full = torch.zeros(lens.info.n_layers, lens.info.n_heads, dtype=torch.bool)
    full[0, [1, lens.info.n_heads - 1]] = True
    hybrid = build_hybrid(lens, mask_of(lens, full), **TEACHER)
    seen = {}
    for name, module in (("own", hybrid.model.layers[0].self_attn.o_proj), ("base", lens.hf.model.layers[0].self_attn.o_proj)):
        module.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0].unflatten(-1, (-1, lens.info.head_dim))))
    tokens = random_tokens(1, 30)
    hybrid(tokens), lens.hf(tokens)
    torch.testing.assert_close(seen["own"][:, :, full[0]], seen["base"][:, :, full[0]], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(seen["own"][:, :, ~full[0]], seen["base"][:, :, ~full[0]], atol=1e-2)


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("choices", CHOICES)
@torch.no_grad()
def test_prefill_and_decode_equal_one_forward_at_every_split(family, choices):
    hybrid, _ = tiny_hybrid(family, **choices)
    tokens = random_tokens(2, 130)
    whole = hybrid(tokens).logits
    for split in (1, 2, 3, 5, 63, 64, 65, 128, 129):
        cache = HybridCache(4)
        first = hybrid(tokens[:, :split], cache=cache).logits
        close(first, whole[:, :split])
        rest = hybrid(tokens[:, split:], past_key_values=cache).logits
        close(rest, whole[:, split:])


@torch.no_grad()
def test_token_by_token_equals_one_forward_for_every_length():
    hybrid, _ = tiny_hybrid("qwen3", linear_conv=4)
    tokens, cache = random_tokens(2, 130), HybridCache(4)
    whole = hybrid(tokens).logits
    for index in range(130):
        step = hybrid(tokens[:, index : index + 1], cache=cache).logits
        close(step, whole[:, index : index + 1])


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_gates_start_as_the_identity_and_a_build_has_nothing_random(gate):
    lens = wrap_model(tiny_hf("qwen3"))
    one, other, plain = (
        build_hybrid(lens, mask_of(lens, mixed(lens.info.n_layers, lens.info.n_heads)), full_gate=own, linear_gate=own, linear_conv=4)
        for own in (gate, gate, None)
    )
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    torch.testing.assert_close(one(random_tokens(1, 20)).logits, plain(random_tokens(1, 20)).logits)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4), side=st.sampled_from(["left", "right"]), conv=st.sampled_from([None, 4]))
def test_padding_changes_neither_logits_nor_gradients(lengths, side, conv):
    hybrid, _ = tiny_hybrid("qwen3", linear_conv=conv)
    longest = max(lengths)
    tokens, mask = torch.zeros(len(lengths), longest, dtype=torch.long), torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, n in enumerate(lengths):
        place = slice(longest - n, None) if side == "left" else slice(0, n)
        tokens[row, place], mask[row, place] = random_tokens(1, n, row)[0], 1
    padded = hybrid(tokens, attention_mask=mask).logits[mask.bool()]
    alone = torch.cat([hybrid(random_tokens(1, n, row)).logits[0] for row, n in enumerate(lengths)])
    close(padded, alone, 1e-4)
    weights = [parameter for parameter in hybrid.parameters() if parameter.requires_grad]
    for own, other in zip(*(torch.autograd.grad(logits.square().mean(), weights, allow_unused=True) for logits in (padded, alone)), strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_decoding_after_padding_equals_decoding_without(side):
    hybrid, _ = tiny_hybrid("llama", linear_conv=4)
    lengths, new = (3, 17, 9), random_tokens(3, 6, 9)
    tokens, mask = torch.zeros(3, 17, dtype=torch.long), torch.zeros(3, 17, dtype=torch.long)
    for row, n in enumerate(lengths):
        place = slice(17 - n, None) if side == "left" else slice(0, n)
        tokens[row, place], mask[row, place] = random_tokens(1, n, row)[0], 1
    cache = HybridCache(4)
    hybrid(tokens, attention_mask=mask, cache=cache)
    for step in range(6):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
        got = hybrid(new[:, step : step + 1], attention_mask=mask, cache=cache).logits[:, 0]
        for row, n in enumerate(lengths):
            alone = hybrid(torch.cat([random_tokens(1, n, row), new[row : row + 1, : step + 1]], 1)).logits[0, -1]
            close(got[row], alone)


@pytest.mark.parametrize("conv", [None, 4])
@torch.no_grad()
def test_packed_documents_equal_separate_ones(conv):
    hybrid, _ = tiny_hybrid("mistral", linear_conv=conv, dtype=torch.float64)
    documents = [random_tokens(1, n, n) for n in (5, 1, 33, 2)]
    ends = torch.tensor([0, 5, 6, 39, 41])
    packed = hybrid(torch.cat(documents, 1), cu_seqlens=ends).logits
    separate = torch.cat([hybrid(document).logits for document in documents], 1)
    close(packed, separate, 1e-6)


@torch.no_grad()
def test_generate_is_the_argmax_of_repeated_forwards():
    hybrid, _ = tiny_hybrid("llama")
    prompt = random_tokens(2, 7)
    slow = prompt
    for _ in range(12):
        slow = torch.cat([slow, hybrid(slow).logits[:, -1:].argmax(-1)], 1)
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(hybrid.generate(prompt, **greedy), slow)
    assert torch.equal(hybrid.generate(prompt, **greedy, use_cache=False), slow)
    left = torch.cat([torch.zeros(2, 3, dtype=torch.long), prompt], 1)
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones_like(prompt)], 1)
    assert torch.equal(hybrid.generate(left, attention_mask=mask, **greedy)[:, 3:], slow)


@torch.no_grad()
def test_beam_search_is_the_same_with_and_without_cache():
    hybrid, _ = tiny_hybrid("qwen2", linear_conv=4)
    prompt = random_tokens(2, 7)
    beams = {"max_new_tokens": 10, "num_beams": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(hybrid.generate(prompt, **beams), hybrid.generate(prompt, **beams, use_cache=False))


@pytest.mark.parametrize("family", BASES)
@torch.no_grad()
def test_a_saved_hybrid_is_the_same_to_the_bit(family, tmp_path):
    hybrid, _ = tiny_hybrid(family, linear_conv=4, linear_gate="channel", dtype=torch.bfloat16)
    tokens = random_tokens(2, 20)
    hybrid.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert AutoConfig.from_pretrained(tmp_path).kinds == hybrid.config.kinds
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert isinstance(opened, HydraHeadForCausalLM)
    for (name, own), (other_name, other) in zip(hybrid.state_dict().items(), opened.state_dict().items(), strict=True):
        assert name == other_name and own.dtype == other.dtype and torch.equal(own, other), name
    assert torch.equal(hybrid(tokens).logits, opened(tokens).logits)
    kept = {name for name, parameter in opened.named_parameters() if parameter.dtype == torch.float32}
    assert kept and all(name.split(".")[-1] in ("A_log", "dt_bias", "gamma") for name in kept)


def test_a_saved_hybrid_opens_as_remote_code_and_says_what_is_missing_where_hydralens_is_not(tmp_path):
    hybrid, _ = tiny_hybrid("llama")
    hybrid.save_pretrained(tmp_path)
    code = "import transformers as t; m = t.AutoModelForCausalLM.from_pretrained({!r}, trust_remote_code=True); print(type(m).__name__)"
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": os.getcwd()}

    def opened(block: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-c", block + code.format(str(tmp_path))], env=environment, capture_output=True, text=True)

    assert opened("").stdout.strip() == "HydraHeadForCausalLM"
    assert "made with hydralens: pip install hydralens" in opened("import sys; sys.modules['hydralens'] = None; ").stderr.splitlines()[-1]


def test_a_checkpoint_with_a_missing_tensor_starts_it_afresh_and_keeps_the_rest(tmp_path):
    from safetensors.torch import load_file, save_file

    hybrid, _ = tiny_hybrid("llama")
    hybrid.save_pretrained(tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(path)
    lost = "model.layers.0.self_attn.branches.gdn.dt_bias"
    del tensors[lost]
    save_file(tensors, path, {"format": "pt"})
    opened = HydraHeadForCausalLM.from_pretrained(tmp_path)
    fresh, _ = tiny_hybrid("llama")
    torch.testing.assert_close(opened.state_dict()[lost], fresh.state_dict()[lost])
    for name, own in opened.state_dict().items():
        assert name == lost or torch.equal(own, hybrid.state_dict()[name]), name


def test_a_checkpoint_cut_short_is_one_clear_line(tmp_path):
    hybrid, _ = tiny_hybrid("llama")
    hybrid.save_pretrained(tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    for opener in (HydraHeadForCausalLM, AutoModelForCausalLM):
        with pytest.raises(InputError, match="damaged or cut short"):
            opener.from_pretrained(tmp_path)


def test_tied_embeddings_stay_tied(tmp_path):
    config = tiny_hf("llama").config
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    lens = wrap_model(AutoModelForCausalLM.from_config(config).eval())
    hybrid = build_hybrid(lens, mask_of(lens, mixed(4, 4)))
    assert hybrid.lm_head.weight is hybrid.model.embed_tokens.weight
    torch.testing.assert_close(hybrid.lm_head.weight, lens.hf.lm_head.weight)
    hybrid.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    assert torch.equal(opened(random_tokens(1, 9)).logits, hybrid(random_tokens(1, 9)).logits)


@torch.no_grad()
def test_cache_reorders_selects_repeats_resets_and_refuses_to_be_cropped():
    hybrid, _ = tiny_hybrid("llama", linear_conv=4)
    tokens, new = random_tokens(3, 11), random_tokens(3, 1, 5)

    def after(change, rows):
        cache = HybridCache(4)
        hybrid(tokens, cache=cache)
        change(cache)
        got = hybrid(new[rows], cache=cache).logits
        expected = hybrid(torch.cat([tokens[rows], new[rows]], 1)).logits[:, -1:]
        close(got, expected)

    after(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0])
    after(lambda cache: cache.batch_select_indices(torch.tensor([1])), [1])
    after(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])
    cache = HybridCache(4)
    hybrid(tokens, cache=cache)
    with pytest.raises(InputError, match="cannot be cropped"):
        cache.crop(3)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.n_bytes == 0


@pytest.mark.parametrize("choices", CHOICES[:2])
@torch.no_grad()
def test_cache_bytes_are_what_a_cache_holds(choices):
    hybrid, lens = tiny_hybrid("qwen3", dtype=torch.bfloat16, **choices)
    cache = HybridCache(4)
    hybrid(random_tokens(2, 37), cache=cache)
    told = hybrid.cache_bytes(37, batch=2)
    assert cache.n_bytes == told["hybrid"] == told["kv"] + told["state"]
    states = [layer.tensors["gdn.state"] for layer in cache.layers if "gdn.state" in layer.tensors]
    assert len(states) == 3 and all(state.dtype == torch.float32 for state in states)
    out = lens.hf(random_tokens(2, 37), use_cache=True)
    base = getattr(out, "cache", None) or out.past_key_values
    assert told["base"] == sum(2 * layer.keys.numel() * 2 for layer in base.layers)


@pytest.mark.parametrize(("family", "choices"), [("mistral", {}), ("llama", {"recipe": "duo", "window_size": 5, "sinks": 2})])
@torch.no_grad()
def test_windows_keep_no_more_than_they_see(family, choices):
    """Chunk by chunk the cache stops growing, and nothing is lost of what later tokens see."""
    hybrid, lens = tiny_hybrid(family, **choices)
    tokens, cache = random_tokens(2, 60), HybridCache(4)
    whole, parts = hybrid(tokens).logits, []
    for start, stop in ((0, 1), (1, 30), (30, 33), (33, 34), (34, 59), (59, 60)):
        parts.append(hybrid(tokens[:, start:stop], cache=cache).logits)
        assert cache.n_bytes == hybrid.cache_bytes(stop, batch=2)["hybrid"]
    close(torch.cat(parts, 1), whole)
    out = lens.hf(tokens, use_cache=True)
    base = getattr(out, "cache", None) or out.past_key_values
    assert hybrid.cache_bytes(60, batch=2)["base"] == sum(2 * layer.keys.numel() * 4 for layer in base.layers)


@torch.no_grad()
def test_gamma_starts_at_the_teachers_mean_rms():
    lens = wrap_model(tiny_hf("llama"))
    tokens, seen = random_tokens(2, 16), []
    for layer in lens.hf.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].unflatten(-1, (4, 8))))
    lens.hf(tokens)
    expected = torch.stack([z.square().mean(-1).sqrt().mean((0, 1)) for z in seen])
    hybrid = build_hybrid(lens, mask_of(lens, mixed(4, 4)), calibration=tokens, gamma="head")
    got = torch.stack([layer.self_attn.fusion.gamma[:, 0] for layer in hybrid.model.layers])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # its new name is not in transformers 5.17
def test_every_parameter_gets_a_gradient_and_training_lowers_the_loss():
    hybrid, _ = tiny_hybrid("qwen3", linear_conv=4, linear_gate="channel")
    tokens = random_tokens(4, 24)
    optimizer = torch.optim.AdamW(hybrid.parameters(), lr=3e-3)
    hybrid.train()
    hybrid.gradient_checkpointing_enable()
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = hybrid(tokens, labels=tokens).loss
        loss.backward()
        missing = [name for name, parameter in hybrid.named_parameters() if parameter.grad is None or not parameter.grad.isfinite().all()]
        assert not missing
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1


@torch.no_grad()
def test_length_scale_counts_from_the_mask_and_can_rest_in_training():
    hybrid, _ = tiny_hybrid("llama", log_scale=4.0, log_scale_in_training=False)
    plain, _ = tiny_hybrid("llama", log_scale=None)
    tokens = random_tokens(1, 30)
    assert not torch.allclose(hybrid(tokens).logits, plain(tokens).logits, atol=1e-3)
    torch.testing.assert_close(hybrid.train()(tokens).logits, plain.train()(tokens).logits)


def test_wrong_input_is_one_clear_line():
    lens = wrap_model(tiny_hf("llama"))
    mask = mask_of(lens, mixed(4, 4))
    with pytest.raises(InputError, match="gemma2.*soft-capped"):
        other = wrap_model(tiny_hf("gemma2"))
        build_hybrid(other, mask_of(other, mixed(4, 4)))
    with pytest.raises(InputError, match="n_heads"):
        build_hybrid(wrap_model(tiny_hf("qwen3")), mask)
    with pytest.raises(InputError, match="choice 'rope' is unknown"):
        build_hybrid(lens, mask, rope=True)
    with pytest.raises(InputError, match="full_gate is 'scalar'"):
        build_hybrid(lens, mask, full_gate="scalar")
    base = lens.hf.config.to_dict()
    with pytest.raises(InputError, match="kinds has 1 layers"):
        HydraHeadConfig(base=base, kinds=[["full"] * 4])
    with pytest.raises(InputError, match="kind 'mamba' is unknown"):
        HydraHeadConfig(base=base, kinds=[["full", "mamba", "gdn", "gdn"]] * 4)
    hybrid = build_hybrid(lens, mask)
    with pytest.raises(InputError, match="needs its own cache, got DynamicCache"):
        from transformers import DynamicCache

        hybrid(random_tokens(1, 3), past_key_values=DynamicCache())
    with pytest.raises(InputError, match=r"attention_mask is \[1, 4\], expected \[1, 1\]"):
        hybrid(random_tokens(1, 1), attention_mask=torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(InputError, match="must run from 0 to the 9 tokens"):
        hybrid(random_tokens(1, 9), cu_seqlens=torch.tensor([0, 4]))


def test_a_hybrid_without_full_heads_works():
    lens = wrap_model(tiny_hf("llama"))
    hybrid = build_hybrid(lens, mask_of(lens, torch.zeros(4, 4, dtype=torch.bool)))
    out = hybrid.generate(random_tokens(1, 5), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert out.shape == (1, 9) and hybrid.cache_bytes(1000)["kv"] == 0


@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_packed_documents_are_known_by_positions_that_start_anew_and_by_transformers_keyword(family):
    hybrid, _ = tiny_hybrid(family, linear_conv=4)
    lengths = (5, 1, 33, 2)
    documents = [random_tokens(1, n, n) for n in lengths]
    row, ends = torch.cat(documents, 1), torch.tensor([0, 5, 6, 39, 41], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    separate = torch.cat([hybrid(document).logits for document in documents], 1)
    close(hybrid(row, position_ids=positions).logits, separate)
    close(hybrid(row, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=33, max_length_k=33).logits, separate)
    for wrong in ({"cu_seqlens": ends, "use_cache": True}, {"cu_seqlens": torch.tensor([0, 5, 3, 41])}):
        with pytest.raises(InputError, match="cu_seqlens"):
            hybrid(row, **wrong)
    with pytest.raises(InputError, match="batch 2"):
        hybrid(row.expand(2, -1), position_ids=positions.expand(2, -1))


@pytest.mark.parametrize(
    ("family", "choices"),
    [("mistral", {}), ("llama", {"recipe": "duo", "window_size": 5, "sinks": 2}), ("llama", {"recipe": "moba", "moba_block": 4, "moba_top": 2})],
)
@torch.no_grad()
def test_windows_and_blocks_count_tokens_not_the_padding_between_them(family, choices):
    hybrid, _ = tiny_hybrid(family, **choices)
    lengths, new = (3, 17, 9), random_tokens(3, 6, 9)
    tokens, mask = torch.zeros(3, 17, dtype=torch.long), torch.zeros(3, 17, dtype=torch.long)
    for row, n in enumerate(lengths):
        tokens[row, :n], mask[row, :n] = random_tokens(1, n, row)[0], 1
    cache = HybridCache(4)
    hybrid(tokens, attention_mask=mask, cache=cache)
    for step in range(6):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
        got = hybrid(new[:, step : step + 1], attention_mask=mask, cache=cache).logits[:, 0]
        for row, n in enumerate(lengths):
            alone = hybrid(torch.cat([random_tokens(1, n, row), new[row : row + 1, : step + 1]], 1)).logits[0, -1]
            close(got[row], alone)
