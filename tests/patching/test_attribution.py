from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hydralens.errors import InputError
from hydralens.models.anatomy import read_anatomy
from hydralens.models.forward import trace
from hydralens.models.lens import wrap_model
from hydralens.models.loading import load_model
from hydralens.patching.activation import activation_patch
from hydralens.patching.attribution import METHODS, attribution_error, attribution_patch
from hydralens.patching.metric import logit_difference
from hydralens.patching.pairs import COMPONENTS, DIRECTIONS, POSITIONS
from hydralens.probes import retrieval
from hydralens.probes.base import Probe
from tests.patching.examples import columns_of, random_probe
from tests.patching.reference import all_sites, metric_of, run_with, site_slice, sites
from tests.tiny import FAMILIES, tiny_hf

# --- the slow references: transformers' own forward and backward, with plain hooks ---------------------------------------


def autograd(hf, tokens, measure, component, dropped=None, embedded=None):
    """Activations and gradients of a site, [layer, pos, head, d_head] each: q and k after QK-norm, where the estimate is linear."""
    decoder, kept, head_dim = (hf.transformer.h if hf.config.model_type == "gpt2" else hf.model.layers), [], read_anatomy(hf).head_dim

    def keep(x):
        x.retain_grad()
        kept.append(x)

    with ExitStack() as stack:
        for layer, block in enumerate(decoder):
            o, projections, attention = sites(hf, layer)
            if component == "z":
                handle = o.register_forward_pre_hook(lambda m, args: keep(args[0]))
            else:
                module = getattr(attention, f"{component}_norm", None) or projections[component]
                handle = module.register_forward_hook(lambda m, args, out: keep(out))
            stack.callback(handle.remove)
            if layer == dropped:
                stack.callback(block.register_forward_hook(constant_contribution).remove)
        if embedded is not None:
            stack.callback(hf.get_input_embeddings().register_forward_hook(lambda m, args, out: embedded).remove)
        measure(hf(input_ids=tokens[None], use_cache=False).logits[0]).backward()

    def by_head(x):
        x = x.detach()[0]
        if x.ndim == 3:  # after QK-norm heads are apart, in Gemma 3 before positions
            return x if x.shape[0] == len(tokens) else x.transpose(0, 1)
        n_heads = hf.config.num_attention_heads if component in "zq" or hf.config.model_type == "gpt2" else hf.config.num_key_value_heads
        first, last = (site_slice(hf, component, head, head_dim) for head in (0, n_heads - 1))
        return x[:, first.start : last.stop].unflatten(1, (n_heads, head_dim))

    return tuple(torch.stack([by_head(x) for x in xs]) for xs in (kept, [torch.zeros_like(x) if x.grad is None else x.grad for x in kept]))


def constant_contribution(module, args, out):
    after = out if isinstance(out, torch.Tensor) else out[0]
    after = args[0] + (after - args[0]).detach()
    return after if isinstance(out, torch.Tensor) else (after, *out[1:])


def roles(probe, pair, direction):
    base, source = (probe.clean[pair], probe.corrupt[pair]) if direction == "noise" else (probe.corrupt[pair], probe.clean[pair])
    return base, source, lambda logits: metric_of(logits, probe.read_positions[pair], probe.answer[pair], probe.foil[pair])


def heads_of(model, component):
    return model.anatomy.n_kv_heads if component in "kv" else model.anatomy.n_heads


@torch.no_grad()
def span(model, probe, pair, direction):
    base, source, measure = roles(probe, pair, direction)
    at_base, at_source = (measure(model.hf(input_ids=tokens[None], use_cache=False).logits[0]) for tokens in (base, source))
    return at_source - at_base


def slow_atp(model, probe, pair, component, direction):
    """[layer, pos, head]"""
    base, source, measure = roles(probe, pair, direction)
    (at_base, gradient), (at_source, _) = (autograd(model.hf, tokens, measure, component) for tokens in (base, source))
    return ((at_source - at_base) * gradient).sum(-1) / span(model, probe, pair, direction)


def slow_eap_ig(model, probe, pair, component, direction, steps):
    """[layer, pos, head]"""
    base, source, measure = roles(probe, pair, direction)
    embed = model.hf.get_input_embeddings()
    (at_base, _), (at_source, _) = (autograd(model.hf, tokens, measure, component) for tokens in (base, source))
    effects = 0
    for step in range(steps):
        share = (step + 0.5) / steps
        embedded = ((1 - share) * embed(base) + share * embed(source)).detach()[None].requires_grad_()
        effects += (at_source - at_base) * autograd(model.hf, base, measure, component, embedded=embedded)[1] / steps
    return effects.sum(-1) / span(model, probe, pair, direction)


def slow_atp_star(model, probe, pair, component, direction, positions):
    """Kramar et al. Eq. 11, literally: one backward for every dropped layer, z under the exact softmax by one forward for every head."""
    base, source, measure = roles(probe, pair, direction)
    hf, columns, n_layers = model.hf, columns_of(probe, pair, positions), model.anatomy.n_layers
    at_base, at_source = (all_sites(hf, tokens)[0] for tokens in (base, source))
    dropped = [autograd(hf, base, measure, "z", dropped=layer)[1].flatten(2) for layer in range(n_layers)]
    plain = autograd(hf, base, measure, "z")[1].flatten(2)
    effects = torch.zeros(n_layers, heads_of(model, component), dtype=torch.float64)
    for layer in range(n_layers):
        for head in range(effects.shape[1]):

            def patched(x, layer=layer, head=head):
                where = columns[:, None], torch.arange(x.shape[1])[site_slice(hf, component, head, model.anatomy.head_dim)]
                x[where] = at_source[layer, component][where]
                return x

            z = run_with(hf, base, {(layer, component): patched})[0][layer, "z"]
            # all_sites sees the input of the output projection before it is replaced, so a patched z is written down here.
            change = (patched(at_base[layer, "z"].clone()) if component == "z" else z) - at_base[layer, "z"]
            magnitude = sum((change * gradients[layer]).sum().abs() for gradients in dropped) / (n_layers - 1)
            effects[layer, head] = magnitude * (change * plain[layer]).sum().sign()
    return effects / span(model, probe, pair, direction)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("component", COMPONENTS)
def test_atp_equals_transformers_own_gradient(family, component):
    model, probe = wrap_model(tiny_hf(family, dtype=torch.float64)), random_probe()
    for direction in DIRECTIONS:
        slow = slow_atp(model, probe, 1, component, direction)
        for positions in POSITIONS:
            effects = attribution_patch(model, probe.select([1]), component, "atp", direction, positions)
            expected = slow[:, columns_of(probe, 1, positions)].sum(1)
            torch.testing.assert_close(effects.per_pair[0].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("component", COMPONENTS)
def test_eap_ig_equals_the_mean_gradient_over_interpolated_embeddings(family, component):
    model, probe = wrap_model(tiny_hf(family, dtype=torch.float64)), random_probe()
    for direction, positions in (("denoise", "all"), ("noise", "suffix")):
        effects = attribution_patch(model, probe.select([0]), component, "eap-ig", direction, positions, steps=3)
        expected = slow_eap_ig(model, probe, 0, component, direction, 3)[:, columns_of(probe, 0, positions)].sum(1)
        torch.testing.assert_close(effects.per_pair[0].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("component", COMPONENTS)
def test_atp_star_equals_a_backward_for_every_dropped_layer(family, component):
    model, probe = wrap_model(tiny_hf(family, dtype=torch.float64)), random_probe()
    for direction, positions in (("denoise", "all"), ("noise", "answer")):
        effects = attribution_patch(model, probe.select([0]), component, "atp*", direction, positions)
        expected = slow_atp_star(model, probe, 0, component, direction, positions)
        torch.testing.assert_close(effects.per_pair[0].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_gradients_equal_finite_differences(family, component):
    """Each head moved a little from its base towards its source activation, both ways; nothing here knows of autograd."""
    model, probe = wrap_model(tiny_hf(family, dtype=torch.float64)), random_probe(n_pairs=1)
    anatomy, everywhere, read = model.anatomy, torch.arange(probe.clean.shape[1]), probe.read_positions[0]
    base, source, step = probe.corrupt[:1], probe.clean[:1], 2e-3
    with torch.no_grad():
        at = [getattr(trace(anatomy, tokens, everywhere, (component,)), component) for tokens in (base, source)]

        def measure(layer, head, share):
            def attention(index, q, k, v):
                inputs = {"q": q, "k": k, "v": v}
                if index == layer and component != "z":
                    inputs[component] = inputs[component].clone()
                    inputs[component][:, head] += share * (at[1][layer] - at[0][layer])[:, head]
                z = anatomy.layers[index].attend(*inputs.values())
                if index == layer and component == "z":
                    z = z.clone()
                    z[:, :, head] += share * (at[1][layer] - at[0][layer])[:, :, head]
                return z

            return logit_difference(anatomy, trace(anatomy, base, read, attention=attention).final, probe.answer[0], probe.foil[0])[0]

        effects = attribution_patch(model, probe, component)
        span = effects.clean_metric[0] - effects.corrupt_metric[0]
        for layer in range(anatomy.n_layers):
            head = layer % heads_of(model, component)
            slope = (measure(layer, head, step) - measure(layer, head, -step)) / (2 * step)
            torch.testing.assert_close(effects.per_pair[0, layer, head].double() * span, slope, atol=3e-4, rtol=3e-3)


# --- toys worked out by hand -----------------------------------------------------------------------------------------------


def two_copiers(weight, side):
    """A linear model: a token's value is copied by two heads, one of which a later head undoes in part.

    Tokens 1 and 2 are values, 0 is filler. No norm, no MLP, and attention is uniform, so over a prompt of T tokens whose first is the value
    L0H0 writes 1 / (t + 1) of it at position t, and L1H0, which reads that and writes -weight times its mean, -weight H / T at the last
    position, with H = 1 + 1/2 + ... + 1/T. L0H1 writes ``side`` times what L0H0 does, to where L1H0 does not read. The metric is then
    +-(1 - weight H + side) / T.
    """
    config = transformers.LlamaConfig(
        vocab_size=3, hidden_size=8, intermediate_size=4, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    hf = transformers.LlamaForCausalLM(config).eval()
    hf.model.norm = nn.Identity()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.fill_(0.0)
        for block in hf.model.layers:
            block.input_layernorm = nn.Identity()
        values, heard, aside = [1, 2], [4, 5], [6, 7]
        hf.model.embed_tokens.weight[values, values] = 1
        hf.lm_head.weight[values, heard] = hf.lm_head.weight[values, aside] = 1
        first, second = (block.self_attn for block in hf.model.layers)
        for row, column in ((0, 1), (1, 2), (4, 1), (5, 2)):
            first.v_proj.weight[row, column] = 1
        first.o_proj.weight[heard, [0, 1]] = 1
        first.o_proj.weight[aside, [4, 5]] = side
        second.v_proj.weight[[0, 1], heard] = 1
        second.o_proj.weight[heard, [0, 1]] = -weight
    prompt = torch.tensor([[1, 0, 0]])
    ones = torch.ones_like(prompt)
    probe = Probe("toy", "retrieval", "value", 0, prompt, torch.tensor([[2, 0, 0]]), ones, *(torch.tensor([[x]]) for x in (1, 2, 2)), torch.tensor([[0, 1]]))
    return wrap_model(hf), probe


HARMONIC = 1 + 1 / 2 + 1 / 3


@settings(deadline=None, max_examples=5)
@given(weight=st.floats(-1, 0.4), side=st.floats(0.1, 2))
def test_in_a_linear_model_the_estimate_is_the_effect(weight, side):
    model, probe = two_copiers(weight, side)
    whole = 1 - weight * HARMONIC + side
    expected = torch.tensor([[1 - weight * HARMONIC, side], [-weight * HARMONIC, 0]]) / whole
    for direction in DIRECTIONS:
        for component in ("z", "v"):
            assert_equal = {"actual": activation_patch(model, probe, component, "total", direction, "all").values, "expected": expected}
            torch.testing.assert_close(**assert_equal, atol=1e-5, rtol=1e-5)
            for method in ("atp", "eap-ig"):
                torch.testing.assert_close(attribution_patch(model, probe, component, method, direction).values, expected, atol=1e-5, rtol=1e-5)
        for component in ("q", "k"):
            assert attribution_patch(model, probe, component, "atp", direction).values.abs().max() == 0


def test_grad_drop_finds_a_head_whose_direct_and_indirect_effect_cancel():
    model, probe = two_copiers(1 / HARMONIC, 1.0)
    assert attribution_patch(model, probe).values[0, 0].abs() < 1e-6
    # Without the later layer L0H0 alone explains the metric; L0H1 goes around it, and a head of the last layer has none above it.
    torch.testing.assert_close(attribution_patch(model, probe, method="atp*").values.abs(), torch.tensor([[1.0, 1.0], [1.0, 0.0]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma3"])
def test_the_qk_fix_is_exact_where_only_the_softmax_is_not_linear(family):
    hf = tiny_hf(family, dtype=torch.float64)
    decoder = hf.transformer if family == "gpt2" else hf.model
    last = (decoder.h if family == "gpt2" else decoder.layers)[-1]
    setattr(decoder, "ln_f" if family == "gpt2" else "norm", nn.Identity())
    with torch.no_grad():
        for parameter in (last.mlp.c_proj if family == "gpt2" else last.mlp.down_proj).parameters():
            parameter.fill_(0.0)
    if family == "gemma3":
        last.post_attention_layernorm = nn.Identity()
    model, probe = wrap_model(hf), random_probe()
    for component in ("q", "k"):
        for direction in DIRECTIONS:
            exact = activation_patch(model, probe, component, "total", direction, "all").per_pair[:, -1]
            torch.testing.assert_close(attribution_patch(model, probe, component, "atp*", direction).per_pair[:, -1], exact, atol=1e-5, rtol=1e-5)
            assert (attribution_patch(model, probe, component, "atp", direction).per_pair[:, -1] - exact).abs().max() > 1e-3


def test_a_single_layer_has_nothing_to_drop():
    hf = tiny_hf("llama")
    hf.model.layers, hf.config.num_hidden_layers = hf.model.layers[:1], 1
    model, probe = wrap_model(hf), random_probe()
    plain, star = (attribution_patch(model, probe, "z", method).per_pair for method in ("atp", "atp*"))
    torch.testing.assert_close(star, plain)
    assert plain.abs().max() > 1e-3


def test_eap_ig_explains_everything_where_activations_lie_on_the_path():
    """One layer without norm before uniform attention: z is linear in the embeddings, so its integrated gradients sum to the whole change."""
    hf = tiny_hf("llama")
    hf.model.layers, hf.config.num_hidden_layers = hf.model.layers[:1], 1
    hf.model.layers[0].input_layernorm = nn.Identity()
    for projection in (hf.model.layers[0].self_attn.q_proj, hf.model.layers[0].self_attn.k_proj):
        nn.init.zeros_(projection.weight)
    model, probe = wrap_model(hf), random_probe()

    def missing(method, steps=1):
        return (attribution_patch(model, probe, "z", method, steps=steps).per_pair.sum((1, 2)) - 1).abs().max()

    assert missing("eap-ig", 50) < 1e-3
    assert missing("atp") > 20 * missing("eap-ig", 50)


# --- what must hold of every estimate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_estimates_are_first_order(family):
    """With embeddings ten times nearer to one another the error, in units of the metric, is about a hundred times smaller."""
    probe, errors = random_probe(), {}
    for distance in (0.3, 0.03):
        hf = tiny_hf(family, dtype=torch.float64)
        with torch.no_grad():
            weight = hf.get_input_embeddings().weight
            hf.lm_head.weight = nn.Parameter(hf.lm_head.weight.clone())  # some families tie it to the embeddings
            weight[:] = torch.lerp(weight[:1].clone(), weight, distance)
        model = wrap_model(hf)
        for component in COMPONENTS:
            exact, estimate = activation_patch(model, probe, component, "total", "denoise", "all"), attribution_patch(model, probe, component)
            span = (exact.clean_metric - exact.corrupt_metric)[:, None, None]
            errors[component, distance] = float(((estimate.per_pair - exact.per_pair) * span).abs().max())
    for component in COMPONENTS:
        assert errors[component, 0.03] < max(0.1 * errors[component, 0.3], 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_patched_with_itself_has_no_effect(family, method):
    model, probe = wrap_model(tiny_hf(family)), random_probe(n_pairs=1)
    own = Probe(**{**vars(probe), "corrupt": probe.clean})

    def metric(logits, answer, foil):
        """A span is needed for the pairs to be kept: the two unpatched runs are measured together."""
        return logits[:, 0, int(answer[0])] + (torch.tensor([1.0, 0.0]) if len(logits) == 2 else 0)

    for component in COMPONENTS:
        effects = attribution_patch(model, own, component, method, metric=metric, steps=2)
        assert effects.kept.all() and effects.per_pair.abs().max() < 1e-6


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
@pytest.mark.parametrize("pad", [(5, 0), (3, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_padding_on_either_side_changes_nothing(family, pad, method):
    model = wrap_model(tiny_hf(family))
    for component, positions in (("z", "all"), ("k", "needle")):
        plain, padded = (attribution_patch(model, random_probe(n_pairs=1, pad=p), component, method, positions=positions, steps=2) for p in (None, pad))
        assert torch.equal(plain.per_pair, padded.per_pair)


def test_eap_ig_is_the_same_in_both_directions():
    model, probe = wrap_model(tiny_hf("qwen3", dtype=torch.float64)), random_probe(n_pairs=1)
    for component in COMPONENTS:
        denoise, noise = (attribution_patch(model, probe, component, "eap-ig", direction, steps=2).per_pair for direction in DIRECTIONS)
        torch.testing.assert_close(denoise, noise)


def test_a_custom_metric_and_the_first_token_are_estimated_too():
    model, probe = wrap_model(tiny_hf("llama")), random_probe()
    first = attribution_patch(model, probe, readout="first")
    custom = attribution_patch(model, probe, metric=lambda logits, answer, foil: logits[:, 0, int(answer[0])] - logits[:, 0, int(foil[0])])
    torch.testing.assert_close(custom.per_pair, first.per_pair, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(first.per_pair, attribution_patch(model, probe).per_pair)
    assert (first.readout, custom.readout) == ("first", "custom")


def test_the_model_is_left_as_it_was():
    hf = tiny_hf("llama")
    before = {name: parameter.clone() for name, parameter in hf.named_parameters()}
    model = wrap_model(hf)
    result = attribution_patch(model, random_probe(), method="atp*")
    assert not result.per_pair.requires_grad
    for name, parameter in hf.named_parameters():
        assert parameter.grad is None and parameter.requires_grad and torch.equal(parameter, before[name])


def test_frozen_weights_and_low_precision_work_as_well():
    probe, maps = random_probe(n_pairs=3, seed=1), []
    for dtype in (torch.float32, torch.bfloat16):
        hf = tiny_hf("llama", dtype=dtype).requires_grad_(False)
        maps.append(attribution_patch(wrap_model(hf), probe))
    assert maps[1].per_pair.dtype == torch.float32
    assert attribution_error(maps[1], maps[0], 4)["pearson"] > 0.95


def test_labels_say_that_it_is_an_estimate():
    model, probe = wrap_model(tiny_hf("qwen3")), random_probe()
    effects = attribution_patch(model, probe, "k", "eap-ig", positions="needle")
    assert (effects.mode, effects.component, effects.direction, effects.positions) == ("total, eap-ig estimate", "k", "denoise", "needle")
    assert effects.per_pair.shape == (2, 4, 2) and effects.per_pair.dtype == torch.float32
    exact = activation_patch(model, probe, "k", "total", "denoise", "needle")
    assert torch.equal(effects.answered, exact.answered)
    torch.testing.assert_close(torch.stack((effects.clean_metric, effects.corrupt_metric)), torch.stack((exact.clean_metric, exact.corrupt_metric)))


# --- pairs left out, verification, errors ---------------------------------------------------------------------------------------


def partly_alike():
    """Three pairs, of which the second is twice the same prompt."""
    probe = random_probe(n_pairs=3)
    corrupt = probe.corrupt.clone()
    corrupt[1] = probe.clean[1]
    return Probe(**{**vars(probe), "corrupt": corrupt})


def test_pairs_without_a_span_are_left_out():
    model = wrap_model(tiny_hf("llama"))
    estimate = attribution_patch(model, partly_alike())
    assert estimate.kept.tolist() == [True, False, True]
    assert estimate.per_pair[1].isnan().all() and not estimate.values.isnan().any()
    others = attribution_patch(model, random_probe(n_pairs=3).select([0, 2]))
    assert torch.equal(estimate.per_pair[[0, 2]], others.per_pair)
    exact = activation_patch(model, partly_alike(), "z", "total", "denoise", "all")
    one = replace(exact, kept=torch.tensor([True, True, False]))
    assert attribution_error(estimate, exact, 3)["n_pairs"] == 2
    alone = attribution_error(estimate, one, 3)
    assert alone["n_pairs"] == 1
    expected = (estimate.per_pair[0] - exact.per_pair[0]).abs().max()
    assert alone["max_abs_error"] == pytest.approx(float(expected), abs=1e-6)


def test_the_error_of_prefiltered_effects_is_that_of_their_own_estimate():
    model, probe = wrap_model(tiny_hf("qwen3")), random_probe()
    asked = "k", "total", "denoise", "suffix"
    exact = activation_patch(model, probe, *asked, prefilter="atp", verify=5)
    found = attribution_error(exact.estimate, exact, 3)
    assert found["n_heads"] == 5 and found["n_pairs"] == 2
    assert found == attribution_error(attribution_patch(model, probe, "k", positions="suffix"), exact, 3)
    # Of the heads that both have, the estimate's first five are the five that were measured.
    assert attribution_error(exact.estimate, exact, 5)["top_k_overlap"] == 1


def effects_like(values):
    values = torch.tensor(values)[None]
    ones = torch.ones(1)
    return replace(attribution_patch(wrap_model(tiny_hf("llama")), random_probe(n_pairs=1)), per_pair=values, clean_metric=ones, corrupt_metric=ones * 0)


def test_error_worked_out_by_hand():
    estimate, exact = effects_like([[0.0, 1.0], [2.0, -4.0]]), effects_like([[0.0, 2.0], [1.0, -4.5]])
    result = attribution_error(estimate, exact, 2)
    # Means -1/4 and -3/8: deviations 1/4 5/4 9/4 -15/4 and 3/8 19/8 11/8 -33/8.
    assert result["pearson"] == pytest.approx(21.625 / (20.75 * 24.6875) ** 0.5)
    assert result["spearman"] == pytest.approx(0.8)  # ranks 2 3 4 1 against 2 4 3 1: 1 - 6 * 2 / (4 * 15)
    assert result["top_k_overlap"] == 0.5  # {L1H1, L1H0} against {L1H1, L0H1}
    assert result["max_abs_error"] == pytest.approx(1.0) and result["n_heads"] == 4 and result["n_pairs"] == 1
    unverified = effects_like([[torch.nan, 2.0], [1.0, -4.5]])
    assert attribution_error(estimate, unverified, 3)["n_heads"] == 3


@pytest.mark.parametrize("argument", ["component", "method", "direction", "positions", "readout"])
def test_unknown_words_are_refused_by_name(argument):
    with pytest.raises(InputError, match=f"{argument} 'nonsense' is not one of"):
        attribution_patch(wrap_model(tiny_hf("llama")), random_probe(), **{argument: "nonsense"})


def test_wrong_numbers_and_unlike_effects_are_refused():
    model, probe = wrap_model(tiny_hf("llama")), random_probe()
    with pytest.raises(InputError, match="steps 0 is less than 1"):
        attribution_patch(model, probe, method="eap-ig", steps=0)
    with pytest.raises(InputError, match="agree within 1e-06 in all 2 pairs"):
        attribution_patch(model, Probe(**{**vars(probe), "corrupt": probe.clean}))
    estimate = attribution_patch(model, probe)
    for other, message in (
        (attribution_patch(model, probe, "q"), "component of the estimate is 'z', of the exact effects 'q'"),
        (attribution_patch(model, probe, direction="noise"), "direction of the estimate is 'denoise', of the exact effects 'noise'"),
        (attribution_patch(model, probe.select([0])), r"shapes \(2, 4, 4\) and \(1, 4, 4\)"),
        (replace(estimate, kept=torch.tensor([False, False])), "keep no pair in common"),
    ):
        with pytest.raises(InputError, match=message):
            attribution_error(estimate, other, 4)
    for k in (0, 17):
        with pytest.raises(InputError, match=f"k {k} heads cannot be compared: 16 heads"):
            attribution_error(estimate, estimate, k)


@pytest.mark.embedded
@pytest.mark.slow
def test_on_the_embedded_model_the_gradient_at_the_corrupt_run_is_the_better_one():
    """What the default direction and the QK fix rest on, on a sixth of the heads; ``pearson`` of one short pair."""
    model = load_model("embedded", device="cpu", dtype="float32")
    probe = next(p for p in retrieval(model, n_pairs=1, n_tokens=96, seed=0, shapes=("niah_single_1",)) if p.corruption == "value")
    heads, pearson = [divmod(cell, 9) for cell in range(0, 270, 6)], {}
    for component in ("z", "q"):
        for direction in DIRECTIONS:
            exact = activation_patch(model, probe, component, "total", direction, "all", heads=heads)
            for method in ("atp", "atp*"):
                pearson[component, direction, method] = attribution_error(attribution_patch(model, probe, component, method, direction), exact, 10)["pearson"]
    assert pearson["z", "denoise", "atp"] > 0.9 and pearson["z", "denoise", "atp"] > pearson["z", "noise", "atp"] + 0.03, pearson
    assert pearson["q", "denoise", "atp*"] > 0.9 and pearson["q", "denoise", "atp*"] > pearson["q", "denoise", "atp"] + 0.03, pearson
