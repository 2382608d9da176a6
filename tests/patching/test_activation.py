import pytest
import torch

from hydralens.errors import InputError
from hydralens.models.lens import wrap_model
from hydralens.patching.activation import MODES, activation_patch
from hydralens.patching.attribution import METHODS, attribution_patch
from hydralens.patching.pairs import COMPONENTS, DIRECTIONS, POSITIONS
from hydralens.probes.base import Probe
from hydralens.scores import HeadScores
from tests.patching.examples import columns_of, random_probe
from tests.patching.reference import slow_effects
from tests.tiny import FAMILIES, tiny_hf


def slow(hf, model, probe, pair, component, mode, direction, positions, readout="span"):
    heads = model.anatomy.n_kv_heads if component in "kv" else model.anatomy.n_heads
    tokens = {
        "clean": probe.clean[pair],
        "corrupt": probe.corrupt[pair],
        "answer": probe.answer[pair],
        "foil": probe.foil[pair],
        "read": probe.read_positions[pair],
    }
    return slow_effects(hf, tokens, component, mode, direction, columns_of(probe, pair, positions), heads, model.anatomy.head_dim, readout)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("component", COMPONENTS)
def test_fast_equals_one_forward_per_cell(family, mode, component):
    hf = tiny_hf(family, dtype=torch.float64)
    model, probe = wrap_model(hf), random_probe()
    for direction in DIRECTIONS:
        for positions in POSITIONS:
            effects = activation_patch(model, probe, component, mode, direction, positions)
            expected = slow(hf, model, probe, 1, component, mode, direction, positions)
            torch.testing.assert_close(effects.per_pair[1].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_within_1e_5_of_the_float64_reference(family):
    exact, probe = tiny_hf(family, dtype=torch.float64), random_probe(seed=3)
    model, exact_model = wrap_model(tiny_hf(family)), wrap_model(exact)
    for mode, positions in (("direct", "answer"), ("total", "all")):
        ours = activation_patch(model, probe, "z", mode, "noise", positions)
        baseline = activation_patch(exact_model, probe, "z", mode, "noise", positions)
        # Compared in units of the metric: dividing by a small span would only magnify rounding.
        span, exact_span = (float((x.clean_metric - x.corrupt_metric)[0]) for x in (ours, baseline))
        expected = slow(exact, exact_model, probe, 0, "z", mode, "noise", positions)
        torch.testing.assert_close(ours.per_pair[0].double() * span, expected * exact_span, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_a_patch_with_its_own_activations_changes_nothing(family, mode):
    model, probe = wrap_model(tiny_hf(family)), random_probe()
    own = Probe(**{**vars(probe), "corrupt": probe.clean})
    seen = []

    def metric(logits, answer, foil):
        seen.append(logits[:, 0, int(answer[0])])
        # A span is needed for the effects to be kept; the two baselines are the first call's two rows.
        return seen[-1] + (torch.tensor([1.0, 0.0]) if len(seen) % 2 else 0)

    for component in COMPONENTS:
        seen.clear()
        activation_patch(model, own.select([0]), component, mode, "noise", "all", metric=metric, batch_tokens=10**6)
        baseline, patched = seen
        torch.testing.assert_close(patched, baseline[:1].expand_as(patched), atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("pad", [(5, 0), (0, 4), (3, 2)])
def test_padding_on_either_side_changes_nothing(family, pad):
    model = wrap_model(tiny_hf(family))
    for positions in POSITIONS:
        plain, padded = (activation_patch(model, random_probe(pad=p), "z", "total", "noise", positions) for p in (None, pad))
        assert torch.equal(plain.per_pair, padded.per_pair)


def test_batch_size_and_memory_shortage_change_nothing(monkeypatch):
    model, probe = wrap_model(tiny_hf("qwen3", dtype=torch.float64)), random_probe()
    expected = activation_patch(model, probe, "z", "total", "noise", "all").per_pair
    torch.testing.assert_close(activation_patch(model, probe, "z", "total", "noise", "all", batch_tokens=40).per_pair, expected)

    from hydralens.patching import activation

    compute, sizes = activation.patched_runs, []

    def scarce(*args, **kwargs):
        sizes.append(len(args[4]))
        if len(args[4]) > 4:  # three cells and the row without a patch
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(*args, **kwargs)

    monkeypatch.setattr(activation, "patched_runs", scarce)
    torch.testing.assert_close(activation_patch(model, probe, "z", "total", "noise", "all").per_pair, expected)
    assert sizes[:4] == [33, 17, 9, 5] and max(sizes[4:]) == 33  # the second pair starts afresh

    monkeypatch.setattr(activation, "patched_runs", lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(InputError, match="single patched run"):
        activation_patch(model, probe)


def test_bfloat16_ranks_as_float32():
    probe = random_probe(n_pairs=3, seed=1)
    single, half = (
        activation_patch(wrap_model(tiny_hf("llama", dtype=dtype)), probe, "z", "total", "noise", "all") for dtype in (torch.float32, torch.bfloat16)
    )
    ranks = [x.values.flatten().argsort().argsort().float() for x in (single, half)]
    assert torch.corrcoef(torch.stack(ranks))[0, 1] > 0.9
    assert half.per_pair.dtype == half.clean_metric.dtype == torch.float32


def test_readout_first_scores_the_first_token_alone():
    model, probe = wrap_model(tiny_hf("llama", dtype=torch.float64)), random_probe()
    first = activation_patch(model, probe, readout="first")
    expected = slow(model.hf, model, probe, 0, "z", "direct", "noise", "answer", readout="first")
    torch.testing.assert_close(first.per_pair[0].double(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first.per_pair, activation_patch(model, probe).per_pair)


def test_answers_of_different_length_in_one_probe():
    model, probe = wrap_model(tiny_hf("llama")), random_probe()
    answer, foil, read = (x.clone() for x in (probe.answer, probe.foil, probe.read_positions))
    for x in (answer, foil, read):
        x[1, 1] = -100
    mixed = Probe(**{**vars(probe), "answer": answer, "foil": foil, "read_positions": read})
    short = Probe(**{**vars(probe.select([1])), "answer": answer[1:, :1], "foil": foil[1:, :1], "read_positions": read[1:, :1]})
    effects = activation_patch(model, mixed)
    assert torch.equal(effects.per_pair[1], activation_patch(model, short).per_pair[0])
    assert torch.equal(effects.per_pair[0], activation_patch(model, probe).per_pair[0])


@pytest.mark.parametrize("argument", ["component", "mode", "direction", "positions", "readout"])
def test_unknown_words_are_refused_by_name(argument):
    with pytest.raises(InputError, match=f"{argument} 'nonsense' is not one of"):
        activation_patch(wrap_model(tiny_hf("llama")), random_probe(), **{argument: "nonsense"})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("component", ["z", "k"])
def test_with_a_prefilter_the_first_heads_are_measured_exactly_and_no_other(component, method):
    model, probe = wrap_model(tiny_hf("qwen3")), random_probe(n_pairs=3)
    probe.corrupt[1] = probe.clean[1]  # a pair without a span is in neither
    effects = activation_patch(model, probe, component, "total", "denoise", "suffix", prefilter=method, verify=5)
    estimate = attribution_patch(model, probe, component, method, "denoise", "suffix")
    assert torch.equal(effects.estimate.isnan(), estimate.per_pair.isnan()) and torch.equal(effects.estimate.nan_to_num(), estimate.per_pair.nan_to_num())
    everything = activation_patch(model, probe, component, "total", "denoise", "suffix")
    measured = ~effects.values.isnan()
    assert measured.sum() == 5 and effects.kept.tolist() == [True, False, True]
    torch.testing.assert_close(effects.values[measured], everything.values[measured], atol=1e-5, rtol=1e-5)
    assert estimate.values[measured].abs().min() >= estimate.values[~measured].abs().max()
    assert effects.split()[1] | {"estimate": None} == everything.split()[1]


def test_measuring_every_head_that_a_prefilter_ranks_is_the_whole_sweep():
    model, probe = wrap_model(tiny_hf("llama")), random_probe()
    everything = activation_patch(model, probe, "z", "total")
    torch.testing.assert_close(activation_patch(model, probe, "z", "total", prefilter="atp*", verify=16).per_pair, everything.per_pair)
    heads = [(3, 1), (0, 2), (1, 3)]
    strongest = max(heads, key=lambda head: abs(attribution_patch(model, probe, "z", "atp", "noise", "answer").values[head]))
    one = activation_patch(model, probe, "z", "total", heads=heads, prefilter="atp", verify=1).values
    assert [tuple(cell) for cell in one.isfinite().nonzero().tolist()] == [strongest]


def test_an_estimate_travels_with_its_effects(tmp_path):
    model, probe = wrap_model(tiny_hf("llama")), random_probe(n_pairs=3)
    effects = activation_patch(model, probe, "z", "total", prefilter="atp", verify=2)
    assert torch.equal(effects.select([2, 0]).estimate, effects.estimate[[2, 0]])
    assert effects.to_frame()["estimate"].tolist() == effects.estimate.mean(0).flatten().tolist()
    plain = activation_patch(model, probe, "z", "total")
    assert plain.estimate is None and plain.select([1]).estimate is None and "estimate" not in plain.to_frame()
    scores = HeadScores(model=model.info, receivers={}, measured={"retrieval": {"a": effects, "b": plain}}, composite=torch.zeros(4, 4), probes=[])
    scores.save(tmp_path)
    loaded = HeadScores.load(tmp_path).measured["retrieval"]
    assert torch.equal(loaded["a"].estimate, effects.estimate) and loaded["b"].estimate is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefilter": "atp", "verify": 4, "mode": "direct"}, "prefilter 'atp' estimates total effects; use mode='total', or leave it out"),
        ({"prefilter": "atp"}, "prefilter 'atp' and verify None go together"),
        ({"verify": 4}, "prefilter None and verify 4 go together"),
        ({"prefilter": "ig", "verify": 4}, r"prefilter 'ig' is not one of atp, atp\*, eap-ig"),
        ({"prefilter": "atp", "verify": 0}, "verify 0 is not between 1 and the 16 heads"),
        ({"prefilter": "atp", "verify": 17}, "verify 17 is not between 1 and the 16 heads"),
        ({"prefilter": "atp", "verify": 9, "component": "v"}, "verify 9 is not between 1 and the 8 heads"),
        ({"prefilter": "atp", "verify": 2, "heads": [(1, 1)]}, "verify 2 is not between 1 and the 1 heads"),
        ({"heads": []}, "heads is empty"),
    ],
)
def test_a_wrong_choice_of_heads_is_refused_in_one_line(arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        activation_patch(wrap_model(tiny_hf("llama")), random_probe(), **{"mode": "total"} | arguments)
    assert "\n" not in str(caught.value)


def test_a_probe_the_model_cannot_tell_apart_is_refused():
    probe = random_probe()
    with pytest.raises(InputError, match="agree within 1e-06 in all 2 pairs"):
        activation_patch(wrap_model(tiny_hf("llama")), Probe(**{**vars(probe), "corrupt": probe.clean}))


def test_the_users_hooks_survive_an_exception_and_are_warned_of_where_unseen():
    hf = tiny_hf("llama")
    model = wrap_model(hf)
    hooks = [hf.model.layers[1].register_forward_hook(lambda *a: None), hf.model.layers[0].mlp.register_forward_pre_hook(lambda *a: None)]

    def count():
        return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in hf.modules()]

    before = count()

    def broken(logits, answer, foil):
        raise ZeroDivisionError("a metric of the user's")

    with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match="hooks on LlamaDecoderLayer are not seen"):
        activation_patch(model, random_probe(), metric=broken)
    assert count() == before
    for hook in hooks:
        hook.remove()


def test_planted_head_is_found_by_every_component():
    """A head worked out by hand: at the question token it attends to value tokens and copies them to the output.

    Tokens: 0 filler, 1..4 values, 5 question. The residual stream holds the token in dimensions 0..11 and the prediction in
    12..23. Only L1H2 does anything, so its effect is 1 and every other head's is 0.
    """
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=32, intermediate_size=8, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e9}, tie_word_embeddings=False, max_position_embeddings=64,
    )  # fmt: skip
    hf = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        hf.model.embed_tokens.weight[:, :12] = torch.eye(12)
        hf.lm_head.weight[:, 12:24] = torch.eye(12)
        attention, start, kv_start = hf.model.layers[1].self_attn, 2 * 8, 1 * 8
        attention.q_proj.weight[start + 3, 5] = 8  # dimension 3 turns slowest: nearly no rotation over this prompt
        attention.k_proj.weight[kv_start + 3, 1:5] = 8
        attention.v_proj.weight[kv_start : kv_start + 4, 1:5] = torch.eye(4)
        attention.o_proj.weight[13:17, start : start + 4] = torch.eye(4)
    model = wrap_model(hf)
    clean = torch.tensor([[0, 0, 0, 2, 0, 0, 0, 0, 5]])
    corrupt = torch.tensor([[0, 0, 0, 3, 0, 0, 0, 0, 5]])
    probe = Probe(
        "planted",
        "retrieval",
        "value",
        0,
        clean,
        corrupt,
        torch.ones_like(clean),
        torch.tensor([[2]]),
        torch.tensor([[3]]),
        torch.tensor([[8]]),
        torch.tensor([[3, 4]]),
    )
    planted, planted_kv = torch.zeros(3, 4), torch.zeros(3, 2)
    planted[1, 2] = planted_kv[1, 1] = 1
    for mode in MODES:
        for direction in DIRECTIONS:
            torch.testing.assert_close(activation_patch(model, probe, "z", mode, direction, "all").values, planted)
            torch.testing.assert_close(activation_patch(model, probe, "v", mode, direction, "needle").values, planted_kv)
            assert activation_patch(model, probe, "q", mode, direction, "all").values.abs().max() < 1e-6
    # The key is the same for every value, so patching it moves nothing; nor does patching v anywhere but on the needle.
    assert activation_patch(model, probe, "k", "total", "noise", "all").values.abs().max() < 1e-6
    assert activation_patch(model, probe, "v", "total", "noise", "answer").values.abs().max() < 1e-6
