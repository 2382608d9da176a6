"""Gini, counts and attention statistics against slow references."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.models.lens import wrap_model
from hydralens.probes.base import Probe
from hydralens.profiles import HeadProfile, attention_profile, gini, head_profile
from tests.figures.examples import scores
from tests.tiny import tiny_hf


def test_counts_gini_and_mixed_layers_by_hand():
    profile = HeadProfile(torch.tensor([[0.5, 0.01, 0.007, -0.3], [0.5, 0.5, 0.5, 0.5], [0, 0, 0.004, 0], [torch.nan, 0.2, 0, 0]]))
    frame = profile.to_frame()
    assert frame["n_critical"].tolist() == [2, 4, 0, 1] and frame["n_between"].tolist() == [1, 0, 0, 0] and frame["n_replaceable"].tolist() == [1, 0, 4, 2]
    assert profile.mixed_layers == [0, 3] and frame["mixed"].tolist() == [True, False, False, True]
    assert frame["gini"].tolist()[1:] == pytest.approx([0, 0.75, 0.75])
    assert profile.finding.startswith("7 of 16 heads are critical and 7 replaceable, both in 2 layers; Gini 0.5")


def test_a_model_without_any_importance_has_no_gini():
    profile = HeadProfile(torch.zeros(2, 3))
    assert profile.gini.isnan().all() and profile.finding == "0 of 6 heads are critical and 6 replaceable, both in 0 layers"


@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=9).filter(lambda values: sum(values) > 0.01))
def test_gini_equals_the_mean_absolute_difference(values):
    n, mean = len(values), sum(values) / len(values)
    naive = sum(abs(a - b) for a in values for b in values) / (2 * n * n * mean)
    assert float(gini(torch.tensor([values]))[0]) == pytest.approx(naive, abs=1e-6)


def test_importance_is_the_larger_capability_of_mean_effects():
    found = head_profile(scores())
    assert float(found.importance[3, 4]) == pytest.approx(0.5) and float(found.importance[0, 5]) == pytest.approx(0.15)  # retrieval: mean of 0.3 and 0
    assert int(head_profile(scores(), critical=0.2).critical.sum()) == 1
    with pytest.raises(InputError, match="replaceable is 0.1 and critical 0.01"):
        head_profile(scores(), replaceable=0.1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_entropy_and_sinks_equal_those_of_whole_attention_maps(family):
    hf = tiny_hf(family)
    model = wrap_model(hf)
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(1, 97, (2, 12), generator=generator)
    mask = torch.ones_like(clean)
    mask[0, :3] = 0  # padded on the left
    read = torch.tensor([[10, 11], [11, -100]])
    answer = torch.tensor([[1, 2], [3, -100]])
    foil = torch.where(answer > 0, answer + 10, answer)
    probe = Probe("toy", "retrieval", "value", 0, clean, clean, mask, answer, foil, read, torch.tensor([[4, 6], [4, 6]]))
    found = attention_profile(model, [probe], sinks=2)
    entropy = sinks = 0
    with torch.no_grad():
        for ids, rows in ((clean[0, 3:], [7, 8]), (clean[1], [11])):
            maps = hf(input_ids=ids[None], output_attentions=True, use_cache=False).attentions
            for weights in (torch.stack([layer[0] for layer in maps])[:, :, row] for row in rows):
                entropy = entropy - (weights * weights.clamp(min=1e-30).log()).sum(-1) / 3
                sinks = sinks + weights[..., :2].sum(-1) / 3
    torch.testing.assert_close(found.entropy, entropy, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.sink_mass, sinks, atol=1e-5, rtol=0)
    assert (found.n_rows, found.n_sinks) == (3, 2) and found.entropy.max() <= math.log(12)
    frame = found.to_frame()
    heads = model.info.n_heads
    assert len(frame) == 4 * heads and frame.iloc[heads + 1][["layer", "head"]].tolist() == [1, 1]
    assert frame["sink_mass"].iloc[heads + 1] == pytest.approx(float(found.sink_mass[1, 1]))


def test_no_probes_is_one_line():
    with pytest.raises(InputError, match="no probes"):
        attention_profile(wrap_model(tiny_hf("llama")), [])
