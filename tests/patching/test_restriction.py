import dataclasses

import pytest
import torch

from hydralens.models.forward import trace
from hydralens.models.lens import wrap_model
from hydralens.patching.restriction import completeness_error, restricted_attention, restriction_effects
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
    effects, probe = effects_of(model, steps=40), random_probe(n_pos=40)
    assert completeness_error(effects) < 2e-3
    nothing = torch.zeros(model.info.n_layers, model.info.n_heads, dtype=torch.bool)
    for attention, ends in ((None, effects.clean_metric), (restricted_attention(model.anatomy, nothing, WINDOW, SINKS), effects.corrupt_metric)):
        for pair in range(2):
            read = probe.read_positions[pair, :1]
            final = trace(model.anatomy, probe.clean[pair : pair + 1, : int(read) + 1], read, attention=attention).final
            expected = model.anatomy.logits(final[0, 0]).log_softmax(-1)[probe.answer[pair, 0]]
            torch.testing.assert_close(ends[pair], expected, atol=1e-5, rtol=1e-5)


def test_gradient_equals_a_finite_difference_of_partly_restricted_heads():
    """Reference: z mixed by hand through ``trace``, one gate moved by a little at each midpoint of the path."""
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

    effects, span = effects_of(model, steps=steps), metric(torch.ones(shape, dtype=torch.float64)) - metric(torch.zeros(shape, dtype=torch.float64))
    for cell in ((0, 1), (1, 6), (3, 2)):
        slope = 0
        for step in range(steps):
            moved = torch.zeros(shape, dtype=torch.float64)
            moved[cell] = 5e-3  # the models' norms compute in float32, so a smaller step would measure rounding
            at = torch.full(shape, (step + 0.5) / steps, dtype=torch.float64)
            slope += (metric(at + moved) - metric(at - moved)) / 1e-2 / steps
        torch.testing.assert_close(effects.per_pair[(0, *cell)].double(), slope / span, atol=1e-4, rtol=1e-3)


def test_checkpointing_changes_nothing_and_a_prompt_inside_the_window_does_not_count():
    model = wrap_model(tiny_hf("gemma3"))
    assert torch.equal(effects_of(model).per_pair, effects_of(model, checkpoint_from=1).per_pair)
    short = restriction_effects(model, random_probe(n_pos=20), window=64, sinks=4)
    assert torch.equal(short.clean_metric, short.corrupt_metric) and not short.kept.any()  # every head sees everything in any case
