import copy
import sys
import warnings

import pytest
import torch

pytest.importorskip("transformer_lens")
nnsight = pytest.importorskip("nnsight")

from transformer_lens import TransformerBridge, patching  # noqa: E402
from transformer_lens.model_bridge.sources import build_bridge_from_module  # noqa: E402

from hydralens.errors import InputError, UnsupportedModelError  # noqa: E402
from hydralens.models import adapters  # noqa: E402
from hydralens.models.adapters import from_nnsight, from_transformer_lens, is_nnsight, is_transformer_lens, to_nnsight, to_transformer_lens  # noqa: E402
from hydralens.models.lens import fingerprint, wrap_model  # noqa: E402
from hydralens.models.loading import load_model  # noqa: E402
from hydralens.patching.activation import activation_patch  # noqa: E402
from hydralens.patching.path import edge_maps  # noqa: E402
from tests.patching.examples import random_probe  # noqa: E402
from tests.planted import planted_model, save_planted  # noqa: E402
from tests.tiny import FAMILIES, tiny_hf  # noqa: E402

TOKENS = torch.arange(5, 22)[None]


def logits_of(hf):
    with torch.no_grad():
        return hf(input_ids=TOKENS, use_cache=False).logits


def anatomy_of(hf):
    """Everything about a model's modules that another library might change."""
    modules = {
        name: (id(module), sorted(module.__dict__), list(module._forward_hooks), list(module._forward_pre_hooks), module.training)
        for name, module in hf.named_modules()
    }
    tensors = {name: (id(tensor), tensor.data_ptr(), tensor._version) for name, tensor in (*hf.named_parameters(), *hf.named_buffers())}
    return modules, tensors, hf.config.to_dict(), hf.config._attn_implementation


def trace_logits(lm):
    with torch.no_grad(), lm.trace(input_ids=TOKENS, use_cache=False):
        logits = lm.output.logits.save()
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_through_both_libraries(family, dtype):
    hf = tiny_hf(family, dtype=dtype)
    model, expected = wrap_model(hf), logits_of(hf)
    before = anatomy_of(hf)
    bridge, lm = to_transformer_lens(model), to_nnsight(model)
    assert is_transformer_lens(bridge) and not is_nnsight(bridge)
    assert is_nnsight(lm) and not is_transformer_lens(lm)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(bridge(TOKENS, return_type="logits").detach(), expected, **tolerance)
    torch.testing.assert_close(trace_logits(lm), expected, **tolerance)
    for back in (from_transformer_lens(bridge)[0], from_nnsight(lm)[0]):
        assert torch.equal(logits_of(back), expected)
        again = wrap_model(back)
        assert again.info == model.info.model_copy(update={"id": again.info.id})
        assert [p.data_ptr() for p in back.parameters()] == [p.data_ptr() for p in hf.parameters()]  # ties included, nothing copied
        assert not {id(p) for p in back.parameters()} & {id(p) for p in hf.parameters()}
    assert anatomy_of(hf) == before
    assert torch.equal(logits_of(hf), expected)
    torch.testing.assert_close(bridge(TOKENS, return_type="logits").detach(), expected, **tolerance)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2"])
def test_folding_a_bridges_weights_leaves_the_model_alone_and_makes_the_bridge_unfit_to_come_back(family):
    hf = tiny_hf(family)
    expected, bridge = logits_of(hf), to_transformer_lens(wrap_model(hf))
    bridge.enable_compatibility_mode(disable_warnings=True)
    assert torch.equal(logits_of(hf), expected)
    with pytest.raises(InputError, match=r"^the TransformerBridge's weights were folded by enable_compatibility_mode\(\); .*$"):
        from_transformer_lens(bridge)


def test_compatibility_mode_without_processing_comes_back():
    hf = tiny_hf("llama")
    bridge = to_transformer_lens(wrap_model(hf))
    bridge.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    assert torch.equal(logits_of(from_transformer_lens(bridge)[0]), logits_of(hf))


def test_a_bridge_that_something_is_hooked_into_is_refused():
    bridge = to_transformer_lens(wrap_model(tiny_hf("llama")))
    bridge.add_hook("blocks.1.attn.hook_z", lambda value, hook: 2 * value)
    with pytest.raises(InputError, match="remove its hooks and edits"):
        from_transformer_lens(bridge)
    bridge.reset_hooks()
    from_transformer_lens(bridge)


def test_moving_or_training_a_twin_leaves_the_model_alone():
    hf = tiny_hf("gemma3")
    model, before = wrap_model(hf), anatomy_of(hf)
    back, _ = from_transformer_lens(to_transformer_lens(model))
    logits = back(input_ids=TOKENS, use_cache=False).logits
    logits.sum().backward()
    assert all(p.grad is not None for p in back.parameters()) and all(p.grad is None for p in hf.parameters())
    back.double().requires_grad_(False)
    assert hf.dtype == torch.float32 and all(p.requires_grad for p in hf.parameters())
    assert anatomy_of(hf) == before


def test_the_users_hooks_stay_with_the_user():
    hf = tiny_hf("llama")
    hf.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 0 * out)
    hooked = logits_of(hf)
    twin = adapters.twin(hf)
    assert not torch.allclose(logits_of(twin), hooked)
    assert not twin.model.layers[0].mlp._forward_hooks and len(hf.model.layers[0].mlp._forward_hooks) == 1


def test_bridges_and_nnsight_models_that_the_user_opened_from_files(tmp_path):
    folder = save_planted(tmp_path / "planted")
    mine = planted_model()
    tokens = mine.tokenizer("the magic number", return_tensors="pt").input_ids
    expected = mine.hf(input_ids=tokens).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge = TransformerBridge.boot_transformers(str(folder), device="cpu")
        lazy = nnsight.LanguageModel(str(folder), tokenizer=copy.deepcopy(mine.tokenizer))
        eager = nnsight.TransformersModel(str(folder), task="text-generation", dispatch=True)
    assert next(lazy._module.parameters()).is_meta
    for source, opened in ((bridge, from_transformer_lens), (lazy, from_nnsight), (eager, from_nnsight)):
        assert load_model(source).info == mine.info.model_copy(update={"id": str(folder)})
        hf, tokenizer = opened(source)
        assert fingerprint(hf) == mine.info.fingerprint
        torch.testing.assert_close(hf(input_ids=tokens).logits, expected, atol=1e-5, rtol=1e-5)
        assert tokenizer("the magic number").input_ids == tokens[0].tolist()
    with torch.no_grad(), lazy.trace("the magic number"):
        logits = lazy.output.logits.save()
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("convert", ["to_transformer_lens", "to_nnsight"])
def test_load_model_opens_what_a_model_was_turned_into_as_the_same_model(convert):
    model = planted_model()
    foreign = getattr(model, convert)()
    again = load_model(foreign)
    assert again.info == model.info and again.hf is not model.hf
    assert [p.data_ptr() for p in again.hf.parameters()] == [p.data_ptr() for p in model.hf.parameters()]
    assert again.tokenizer("the magic number").input_ids == model.tokenizer("the magic number").input_ids
    assert load_model(foreign, model.tokenizer).tokenizer is model.tokenizer
    bare = load_model(getattr(wrap_model(tiny_hf("gpt2")), convert)())
    assert bare.tokenizer is None and bare.info.id == "GPT2LMHeadModel"
    for name, value in (("device", "cpu"), ("dtype", "float64"), ("revision", "main")):
        with pytest.raises(InputError, match=f"^{name}='{value}' cannot be applied to a model that is already loaded.*$"):
            load_model(foreign, **{name: value})


def test_tokenizers_travel_as_copies():
    model = planted_model()
    before = copy.deepcopy(vars(model.tokenizer)).keys(), model.tokenizer.padding_side, model.tokenizer.special_tokens_map
    bridge, lm = to_transformer_lens(model), to_nnsight(model)
    assert bridge.tokenizer is not model.tokenizer and lm.tokenizer is not model.tokenizer
    assert lm.tokenizer("the magic number").input_ids == bridge.tokenizer("the magic number").input_ids == model.tokenizer("the magic number").input_ids
    with torch.no_grad(), lm.trace("the magic number"):
        z = lm.model.layers[1].self_attn.o_proj.input.save()
    _, cache = bridge.run_with_cache("the magic number", prepend_bos=False)
    torch.testing.assert_close(cache["blocks.1.attn.hook_z"].flatten(2), z, atol=1e-5, rtol=1e-5)
    assert (vars(model.tokenizer).keys(), model.tokenizer.padding_side, model.tokenizer.special_tokens_map) == before


def test_transformer_lens_own_sweeps_give_the_engines_numbers():
    model, probe = wrap_model(tiny_hf("qwen3")), random_probe(n_pairs=1)
    bridge, read = to_transformer_lens(model), int(probe.read_positions[0, 0])

    def metric(logits):
        return logits[0, read, probe.answer[0, 0]] - logits[0, read, probe.foil[0, 0]]

    with torch.no_grad():
        clean_logits, clean = bridge.run_with_cache(probe.clean)
        corrupt_logits, corrupt = bridge.run_with_cache(probe.corrupt)
        floor, span = metric(corrupt_logits), metric(clean_logits) - metric(corrupt_logits)
        swept = patching.get_act_patch_attn_head_out_all_pos(bridge, probe.corrupt, clean, metric)
        sender = (1, 2)
        paths = patching.get_act_patch_direct_path(bridge, probe.corrupt, clean, corrupt, metric, src_layer=1, src_head=2, component="q")
    ours = activation_patch(model, probe, "z", "total", "denoise", "all", readout="first")
    torch.testing.assert_close(ours.per_pair[0], (swept - floor) / span, atol=1e-5, rtol=1e-5)
    receivers = [(layer, head) for layer in (2, 3) for head in range(8)]
    ours = edge_maps(model, probe, receivers, "q", freeze_mlps=True, direction="denoise", positions="all", readout="first")
    for receiver, effects in ours.items():
        torch.testing.assert_close(effects.per_pair[0][sender], (paths[receiver] - floor) / span, atol=1e-5, rtol=1e-4)


def test_what_is_no_whole_transformers_model_with_weights_is_refused_in_one_line():
    with torch.device("meta"):
        empty = type(tiny_hf("llama"))(tiny_hf("llama").config)
    lm = nnsight.NNsight(tiny_hf("llama"))
    for source, message in (
        (nnsight.NNsight(empty), "LlamaForCausalLM: model.embed_tokens.weight is on the meta device; load the weights first"),
        (nnsight.NNsight(torch.nn.Linear(2, 2)), "the nnsight object wraps a Linear, not a transformers model"),
        (lm.model.layers[0], "the nnsight object wraps a LlamaDecoderLayer, not a transformers model"),
    ):
        with pytest.raises(InputError, match=f"^{message}.*$"):
            from_nnsight(source)
    native = TransformerBridge.boot_native({"n_layers": 1, "d_model": 8, "n_heads": 2, "d_head": 4, "n_ctx": 16, "d_vocab": 11, "act_fn": "gelu", "d_mlp": 8})
    with pytest.raises(InputError, match="^the TransformerBridge wraps a NativeModel, not a transformers model"):
        from_transformer_lens(native)


def test_a_family_that_breaks_an_assumption_is_refused_by_name():
    import transformers

    config = transformers.GPTNeoXConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    hf = transformers.GPTNeoXForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="gpt_neox.*parallel"):
        from_nnsight(nnsight.NNsight(hf))
    with pytest.raises(UnsupportedModelError, match="gpt_neox.*parallel"):
        from_transformer_lens(build_bridge_from_module(hf, "GPTNeoXForCausalLM", hf_config=hf.config))


def test_weights_that_the_class_does_not_explain_are_refused():
    hf = tiny_hf("llama")
    hf.model.layers[1].self_attn.q_proj = torch.nn.Sequential(hf.model.layers[1].self_attn.q_proj)
    with pytest.raises(InputError, match="model.layers.1.self_attn.q_proj.weight is missing, expected .32, 32.; merge adapters"):
        adapters.twin(hf)


def test_libraries_are_neither_imported_nor_needed_until_asked_for(monkeypatch):
    model = wrap_model(tiny_hf("llama"))
    monkeypatch.delitem(sys.modules, "transformer_lens.model_bridge")
    monkeypatch.delitem(sys.modules, "nnsight.intervention.envoy")
    assert not is_transformer_lens(model) and not is_nnsight(model)
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    for convert, library in ((to_transformer_lens, "transformer_lens"), (to_nnsight, "nnsight")):
        with pytest.raises(InputError, match=rf"^{library} is not installed; pip install 'hydralens\[lens\]'$"):
            convert(model)
