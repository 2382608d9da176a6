import pytest
import torch
from torch import nn

from hydralens.detectors.writes import locos_effects, logit_attribution_effects, output_weight, pull_back
from hydralens.errors import InputError
from hydralens.models.forward import trace
from hydralens.models.lens import wrap_model
from hydralens.patching.metric import DECAY
from tests.detectors.reference import answered_probe, hf_rows, hf_values
from tests.patching.test_activation import random_probe
from tests.tiny import FAMILIES, tiny_hf


def scaled(norm, x, part, family):
    """What a norm makes of a part of x with the scale it has for x, written out for each kind of norm."""
    if isinstance(norm, nn.LayerNorm):
        deviation = ((x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + norm.eps).sqrt()
        return (part - part.mean(-1, keepdim=True)) / deviation * norm.weight
    weight = norm.weight + 1 if family.startswith("gemma") else norm.weight
    return part / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_locos_equals_its_definition(family):
    hf = tiny_hf(family)
    model, probe = wrap_model(hf), answered_probe(hf, n_pairs=2, first=14)
    effects = locos_effects(model, probe)
    unembed = hf.get_output_embeddings().weight
    for pair in range(2):
        tokens, read, answer = probe.clean[pair], probe.read_positions[pair], probe.answer[pair]
        rows, values = hf_rows(hf, tokens, read), hf_values(hf, model, tokens)
        start, stop = probe.needle_span[pair].tolist()
        for layer in range(model.info.n_layers):
            weight = output_weight(model.anatomy.layers[layer])
            for head in range(model.info.n_heads):
                steps = []
                for t, column in enumerate(read.tolist()):
                    phi = [float(rows[layer, t, head, j] * (unembed[answer[t]] @ (values[layer, head, j] @ weight[head]))) for j in range(column + 1)]
                    inside = sum(phi[start:stop])
                    steps.append(inside - (stop - start) / (column + 1 - (stop - start)) * (sum(phi) - inside))
                torch.testing.assert_close(float(effects.per_pair[pair, layer, head]), sum(steps) / len(steps), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("readout", ["span", "first"])
@torch.no_grad()
def test_parts_sum_to_the_logit_difference_and_each_head_is_its_own(family, readout):
    """Heads by ours; embedding, MLPs and biases by hand. Gemma 2's final soft cap is taken off first."""
    hf = tiny_hf(family, dtype=torch.float64)
    model, probe = wrap_model(hf), random_probe(n_answer=3)
    anatomy, unembed = model.anatomy, model.anatomy.unembed
    effects = logit_attribution_effects(model, probe, readout=readout)
    weights = DECAY ** torch.arange(3, dtype=torch.float64) if readout == "span" else torch.tensor([1.0, 0, 0], dtype=torch.float64)
    for pair in range(2):
        run = trace(anatomy, probe.clean[pair : pair + 1], probe.read_positions[pair], ("residual", "z", "written"))
        final, direction = run.final[0], unembed.weight[probe.answer[pair]] - unembed.weight[probe.foil[pair]]

        def onto(part, final=final, direction=direction):
            return (scaled(anatomy.final_norm, final, part, family) * direction).sum(-1) @ weights / weights.sum()

        residuals = [residual[0] for residual in run.residual] + [final]
        rest, zero = onto(residuals[0]), torch.zeros(3, anatomy.n_heads * anatomy.head_dim, dtype=torch.float64)
        for index, layer in enumerate(anatomy.layers):
            rest = rest + onto(residuals[index + 1] - residuals[index] - run.written[index][0])
            z, bias = run.z[index][0], layer.o(zero)
            whole = layer.o(z.flatten(-2))
            for head in range(-1, anatomy.n_heads):
                alone = torch.zeros_like(z)
                alone[:, head] = z[:, head]
                part = bias if head < 0 else layer.o(alone.flatten(-2)) - bias
                if layer.post_attention_norm is not None:
                    part = scaled(layer.post_attention_norm, whole, part, family)
                if head < 0:
                    rest = rest + onto(part)
                else:
                    torch.testing.assert_close(effects.per_pair[pair, index, head].double(), onto(part), atol=1e-5, rtol=1e-5)
        norm_bias = getattr(anatomy.final_norm, "bias", None)
        constant = 0 if norm_bias is None else (norm_bias * direction).sum(-1) @ weights / weights.sum()
        logits = unembed(anatomy.final_norm(final))
        lead = logits.gather(1, probe.answer[pair][:, None])[:, 0] - logits.gather(1, probe.foil[pair][:, None])[:, 0]
        expected = lead @ weights / weights.sum()
        torch.testing.assert_close(effects.per_pair[pair].double().sum() + rest + constant, expected, atol=1e-5, rtol=1e-5)
        if anatomy.final_softcap is None:
            torch.testing.assert_close(effects.clean_metric[pair].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_direction_pulled_back_through_a_norm_scores_parts_as_behind_it(family):
    norm = wrap_model(tiny_hf(family, dtype=torch.float64)).anatomy.final_norm
    x, part, direction = torch.randn(3, 4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    with torch.no_grad():
        torch.testing.assert_close((pull_back(norm, x, direction) * part).sum(-1), (direction * scaled(norm, x, part, family)).sum(-1), atol=1e-5, rtol=1e-5)


def test_an_unknown_readout_is_refused():
    with pytest.raises(InputError, match="readout 'last' is not one of span, first"):
        logit_attribution_effects(wrap_model(tiny_hf("llama")), random_probe(), readout="last")
