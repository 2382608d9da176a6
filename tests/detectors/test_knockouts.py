import pytest
import torch

from hydralens.detectors.knockouts import ABLATIONS, METRICS, ablation_drop_effects, zero_shot_kl_effects
from hydralens.errors import InputError
from hydralens.models.forward import trace
from hydralens.models.lens import wrap_model
from hydralens.patching.restriction import restricted_attention
from tests.detectors.reference import answered_probe, hf_logits
from tests.patching.reference import record, sites
from tests.patching.test_activation import random_probe
from tests.tiny import FAMILIES, tiny_hf


def measured(logits, answer, metric):
    if metric == "accuracy":
        return float((logits.argmax(-1) == answer).all())
    return float(logits.log_softmax(-1)[torch.arange(len(answer)), answer].sum())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ABLATIONS)
def test_ablation_equals_a_full_forward_with_a_hook_per_head(family, how):
    hf = tiny_hf(family, dtype=torch.float64)
    model, probe = wrap_model(hf), answered_probe(hf, n_pairs=2, n_pos=14, first=5)
    d_head = model.info.head_dim
    mean = [torch.cat([record(hf, tokens, "z")[0][layer] for tokens in probe.clean]).mean(0) for layer in range(4)]
    results = {metric: ablation_drop_effects(model, probe, how=how, metric=metric, batch_tokens=40) for metric in METRICS}
    seen = set()
    for pair in range(2):
        tokens, read, answer = probe.clean[pair], probe.read_positions[pair], probe.answer[pair]
        whole = hf_logits(hf, tokens, read)
        for layer in range(4):
            for head in range(model.info.n_heads):
                where = slice(head * d_head, (head + 1) * d_head)

                def ablated(module, args, where=where, layer=layer):
                    z = args[0].clone()
                    z[..., where] = 0 if how == "zero" else mean[layer][where].to(z)
                    return (z,)

                handle = sites(hf, layer)[0].register_forward_pre_hook(ablated)
                without = hf_logits(hf, tokens, read)
                handle.remove()
                for metric, effects in results.items():
                    expected = measured(whole, answer, metric) - measured(without, answer, metric)
                    assert float(effects.per_pair[pair, layer, head]) == pytest.approx(expected, abs=1e-5)
                    seen.add(expected) if metric == "accuracy" else None
        for metric, effects in results.items():
            assert float(effects.clean_metric[pair]) == pytest.approx(measured(whole, answer, metric), abs=1e-5)
    assert len(seen) > 1 and results["accuracy"].kept.tolist() == [True, False]


@pytest.mark.parametrize("family", FAMILIES)
def test_kl_equals_a_full_forward_per_restricted_head(family):
    hf = tiny_hf(family, dtype=torch.float64)
    model, probe = wrap_model(hf), random_probe(n_pairs=1, n_pos=24)
    window, sinks = 4, 2  # shorter than the models' own sliding window of 6
    effects = zero_shot_kl_effects(model, probe, window=window, sinks=sinks, batch_tokens=64)
    read = probe.read_positions[0]
    with torch.no_grad():
        full = hf_logits(hf, probe.clean[0], read).log_softmax(-1)
        for layer in range(4):
            for head in range(model.info.n_heads):
                keep = torch.ones(4, model.info.n_heads, dtype=torch.bool)
                keep[layer, head] = False
                run = trace(model.anatomy, probe.clean, read, attention=restricted_attention(model.anatomy, keep, window, sinks))
                narrow = model.anatomy.logits(run.final[0]).log_softmax(-1)
                expected = torch.nn.functional.kl_div(narrow, full, log_target=True, reduction="none").sum(-1).mean()
                assert expected > 1e-7
                torch.testing.assert_close(effects.per_pair[0, layer, head].double(), expected, atol=1e-5, rtol=1e-4)


def test_a_window_as_long_as_the_prompt_changes_nothing():
    effects = zero_shot_kl_effects(wrap_model(tiny_hf("gemma2")), random_probe(n_pos=20), window=64, sinks=4)
    assert effects.per_pair.abs().max() < 1e-5


@pytest.mark.parametrize(
    ("detector", "options", "message"),
    [
        (ablation_drop_effects, {"how": "resample"}, "how 'resample' is not one of zero, mean"),
        (ablation_drop_effects, {"metric": "loss"}, "metric 'loss' is not one of accuracy, log-probability"),
        (zero_shot_kl_effects, {"window": 0}, "window is 0 and sinks 4; a head sees at least itself"),
    ],
)
def test_wrong_options_are_refused(detector, options, message):
    with pytest.raises(InputError, match=message):
        detector(wrap_model(tiny_hf("llama")), random_probe(), **options)
