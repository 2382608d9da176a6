import dataclasses
import math

import pytest
import torch

from hydralens.errors import InputError
from hydralens.models.forward import trace
from hydralens.models.lens import wrap_model
from hydralens.patching.restriction import MAX_NODES, TOLERANCE, _refined, completeness_error, linearised, restricted_attention, restriction_effects
from tests.hybrid.examples import tiny_hybrid
from tests.patching.test_activation import random_probe
from tests.tiny import FAMILIES, tiny_hf

WINDOW, SINKS = 4, 2  # shorter than the tiny models' own sliding window of 6


def effects_of(model, **kwargs):
    effects = restriction_effects(model, random_probe(n_pos=40), window=WINDOW, sinks=SINKS, **kwargs)
    return dataclasses.replace(effects, kept=torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_sum_to_the_change_of_the_metric(family):
    """Completeness: with many steps the integral is exact; its ends are the whole model and the model restricted everywhere."""
    model = wrap_model(tiny_hf(family))
    effects, probe = effects_of(model, steps=80, tolerance=math.inf), random_probe(n_pos=40)
    assert completeness_error(effects) < 2e-3
    nothing = torch.zeros(model.info.n_layers, model.info.n_heads, dtype=torch.bool)
    for attention, ends in ((None, effects.clean_metric), (restricted_attention(model.anatomy, nothing, WINDOW, SINKS), effects.corrupt_metric)):
        for pair in range(2):
            read = probe.read_positions[pair, :1]
            final = trace(model.anatomy, probe.clean[pair : pair + 1, : int(read) + 1], read, attention=attention).final
            expected = model.anatomy.logits(final[0, 0]).log_softmax(-1)[probe.answer[pair, 0]]
            torch.testing.assert_close(ends[pair], expected, atol=1e-5, rtol=1e-5)


def test_gradient_equals_a_finite_difference_of_partly_restricted_heads():
    """Reference: z mixed by hand through ``trace``, one gate moved by a little at each point of the path."""
    model, probe, steps = wrap_model(tiny_hf("qwen3", dtype=torch.float64)), random_probe(n_pos=40), 3
    anatomy, read = model.anatomy, probe.read_positions[0, :1]
    shape = (anatomy.n_layers, anatomy.n_heads)
    full, narrow = (restricted_attention(anatomy, torch.full(shape, keep), WINDOW, SINKS) for keep in (True, False))

    @torch.no_grad()
    def metric(gates):
        def mixed(layer, q, k, v):
            gate = gates[layer][:, None]
            return gate * full(layer, q, k, v) + (1 - gate) * narrow(layer, q, k, v)

        final = trace(anatomy, probe.clean[:1, : int(read) + 1], read, attention=mixed).final
        return anatomy.logits(final[0, 0]).log_softmax(-1)[probe.answer[0, 0]]

    effects, span = (
        effects_of(model, steps=steps, tolerance=math.inf),
        metric(torch.ones(shape, dtype=torch.float64)) - metric(torch.zeros(shape, dtype=torch.float64)),
    )
    for cell in ((0, 1), (1, 6), (3, 2)):
        slope = 0
        for point in range(steps + 1):
            moved = torch.zeros(shape, dtype=torch.float64)
            moved[cell] = 5e-3  # the models' norms compute in float32, so a smaller step would measure rounding
            at = torch.full(shape, point / steps, dtype=torch.float64)
            weight = (0.5 if point in (0, steps) else 1) / steps  # trapezoidal rule
            slope += (metric(at + moved) - metric(at - moved)) / 1e-2 * weight
        torch.testing.assert_close(effects.per_pair[(0, *cell)].double(), slope / span, atol=1e-4, rtol=1e-3)


def test_checkpointing_changes_nothing_and_a_prompt_inside_the_window_does_not_count():
    model = wrap_model(tiny_hf("gemma3"))
    assert torch.equal(effects_of(model).per_pair, effects_of(model, checkpoint_from=1).per_pair)
    short = restriction_effects(model, random_probe(n_pos=20), window=64, sinks=4)
    torch.testing.assert_close(short.clean_metric, short.corrupt_metric)  # every head sees everything in any case
    assert not short.kept.any() and short.per_pair.isnan().all()


def test_steps_are_halved_where_the_answer_tips_over_until_the_sum_is_within_tolerance():
    """A path worked out by hand: m(a) = s((a - 0.3) / 0.01) + a, s the logistic function, split between two heads that pull against each other."""
    calls = []

    def slopes(at):
        calls.append(len(at))
        tip = ((at - 0.3) / 0.01).sigmoid()
        slope = tip * (1 - tip) / 0.01
        return torch.stack([tip + at, torch.ones_like(at), 3 * slope + 1, -2 * slope], 1)

    path = _refined(slopes, 4, 0.05, 1e-3)
    exact = torch.tensor([3 * 1.0 + 1, -2 * 1.0])
    assert abs(float(path.integral.sum() / path.change) - 1) <= 0.05
    torch.testing.assert_close(path.integral, exact, atol=0.3, rtol=0)
    near = ((path.at >= 0.25) & (path.at <= 0.375)).sum()  # an eighth of the path
    assert near > len(path.at) / 2 and sum(calls) == len(path.at) < 40  # points crowd where the metric tips over, none is computed twice
    assert len(_refined(slopes, 4, math.inf, 1e-3).at) == 5 and len(_refined(slopes, 4, 0.0, 1e-3).at) == MAX_NODES


@pytest.mark.parametrize("family", FAMILIES)
def test_default_is_within_its_tolerance(family):
    assert completeness_error(effects_of(wrap_model(tiny_hf(family)))) <= TOLERANCE


def test_restriction_to_linear_heads_goes_from_the_model_to_its_hybrid():
    """The ends of the path: the model itself, and the hybrid of linear heads alone, whose other weights are the model's."""
    model = wrap_model(tiny_hf("qwen3", dtype=torch.float64))
    linear, _ = tiny_hybrid("qwen3", torch.zeros(model.info.n_layers, model.info.n_heads), dtype=torch.float64, linear_gate="head")
    linear.load_state_dict({name: value for name, value in model.hf.state_dict().items() if "mlp" in name}, strict=False)  # tiny_hybrid moved them
    probe, hybrid = random_probe(n_pos=40), wrap_model(linear)
    effects = effects_of(model, linear=hybrid)
    assert completeness_error(effects) <= TOLERANCE and effects.positions == "linear heads"
    for own, ends in ((model, effects.clean_metric), (hybrid, effects.corrupt_metric)):
        for pair in range(2):
            read = int(probe.read_positions[pair, 0])
            logits = own.hf(probe.clean[pair : pair + 1, : read + 1]).logits[0, -1]
            torch.testing.assert_close(ends[pair], logits.log_softmax(-1)[probe.answer[pair, 0]].float(), atol=1e-5, rtol=1e-5)


def test_gate_of_one_head_alone_takes_the_linear_heads_output():
    """Reference: full attention's z with one head's replaced by the hybrid's, written by the model's own projection."""
    model = wrap_model(tiny_hf("llama"))
    linear = wrap_model(tiny_hybrid("llama", torch.zeros(model.info.n_layers, model.info.n_heads))[0])
    tokens, both = random_probe(n_pos=40).clean[:1], linearised(model.anatomy, linear.anatomy)
    positions = torch.arange(tokens.shape[1])
    residual = model.anatomy.embed(tokens, positions)
    layer = model.anatomy.layers[0]
    full, restricted = both(0, layer, residual, model.anatomy.rope(residual, positions)[layer.rope_kind])
    block = linear.hf.model.layers[0]
    written = block.self_attn(block.input_layernorm(residual), linear.hf.model.tokens(residual), None)
    torch.testing.assert_close(layer.write(restricted, residual), written)
    own = model.hf.model.layers[0]
    seen = []
    handle = own.self_attn.register_forward_hook(lambda *args: seen.append(args[2][0]))
    model.hf(tokens)
    handle.remove()
    torch.testing.assert_close(layer.write(full, residual), seen[0])


def test_linear_must_be_a_hybrid_of_the_models_shape():
    model = wrap_model(tiny_hf("llama"))
    with pytest.raises(InputError, match="give a hybrid made from this model"):
        restriction_effects(model, random_probe(n_pos=40), linear=model)
