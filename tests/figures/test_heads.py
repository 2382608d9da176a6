"""Head maps: what is drawn, where, and what the title says."""

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.figures import head_heatmap, probe_facets, role_maps
from hydralens.figures.findings import half_share, strongest_probe
from hydralens.profiles import strength
from hydralens.scores import scores_of
from tests.figures.examples import HEADS, KV_HEADS, LAYERS, effects, info, mask, scores, with_senders
from tests.test_effects import effects_of


def test_the_map_is_layer_by_head_with_layer_0_at_the_top_and_zero_in_the_middle():
    found = scores()
    fig = head_heatmap(found)
    assert isinstance(fig, go.Figure)
    (trace,) = fig.data
    assert np.array_equal(trace.z, found.composite.numpy())
    assert fig.layout.yaxis.range == (LAYERS - 0.5, -0.5) and fig.layout.yaxis.title.text == "layer"
    assert fig.layout.xaxis.range == (-0.5, HEADS - 0.5) and fig.layout.xaxis.title.text == "head"
    assert trace.zmid == 0 and trace.zmin == -trace.zmax == -1.0
    assert trace.colorscale == go.Heatmap(colorscale="RdBu").colorscale


def test_hover_names_head_kv_head_value_and_interval():
    found = scores()
    trace = head_heatmap(found).data[0]
    kv_head, rank, effect, low, high = trace.customdata[3, 4]
    expected_low, expected_high = found.receivers["reasoning"]["names/value"].interval()
    assert (kv_head, rank) == (1, 1)
    assert effect == pytest.approx(0.5)
    assert (low, high) == pytest.approx((float(expected_low[3, 4]), float(expected_high[3, 4])))
    assert trace.text[3][4] == "names/value" and trace.text[0][5] == "needle/key"
    assert all(f"customdata[{i}]" in trace.hovertemplate for i in range(5)) and "KV head" in trace.hovertemplate


def test_an_interventions_map_shows_its_own_interval_and_for_v_its_kv_heads():
    measured = effects({(2, 1): 0.25}, component="v")
    fig = head_heatmap(measured)
    low, high = measured.interval()
    assert fig.data[0].z.shape == (LAYERS, KV_HEADS)
    assert fig.data[0].customdata[2, 1] == pytest.approx((1, float(low[2, 1]), float(high[2, 1])))
    assert fig.layout.xaxis.title.text == "KV head"
    assert fig.layout.meta["finding"] == "1 head of layer 2 carries half of the effect on needle"
    assert "Direct effect of v, noise" in fig.layout.meta["caption"]


def test_impossible_paths_stay_empty():
    values = torch.zeros(LAYERS, HEADS)
    values[0] = torch.nan
    values[1, 1] = 0.5
    trace = head_heatmap(values).data[0]
    assert np.isnan(trace.z[0]).all() and trace.zmax == 0.5


def test_bfloat16_is_accepted():
    values = torch.randn(LAYERS, HEADS).bfloat16()
    assert np.array_equal(head_heatmap(values).data[0].z, values.float().numpy())


def test_masked_heads_are_marked_in_query_space():
    found = scores()
    chosen = mask(found)
    dots = head_heatmap(found, chosen).data[1]
    assert set(zip(dots.y, dots.x, strict=True)) == {(3, 4), (2, 1), (0, 5), (0, 0), (0, 1), (0, 2)}
    groups = head_heatmap(found, chosen.to_kv()).data[1]
    assert set(zip(groups.y, groups.x, strict=True)) == {(0, h) for h in range(6)} | {(2, 0), (2, 1), (2, 2), (3, 3), (3, 4), (3, 5)}
    plain = head_heatmap(found, chosen.array)
    assert plain.data[1].x == dots.x and "6 heads with full attention" in plain.layout.meta["caption"]


@pytest.mark.parametrize(
    ("values", "kept", "said"), [(torch.zeros(3), None, r"shape \(3,\)"), (torch.zeros(4, 6), torch.ones(4, 5, dtype=torch.bool), r"\(4, 5\)")]
)
def test_wrong_shapes_are_named(values, kept, said):
    with pytest.raises(InputError, match=said):
        head_heatmap(values, kept)


@pytest.mark.parametrize(
    ("composite", "finding"),
    [
        ({(3, 4): 1.0, (2, 1): 0.5, (0, 5): 0.3}, "1 head of layer 3 carries half of the score"),
        ({(3, 4): 1.0, (2, 1): 0.9, (0, 5): 0.8}, "2 heads of layers 2 and 3 carry half of the score"),
        ({(3, 4): 0.0}, "No head has a positive score"),
    ],
)
def test_the_title_states_what_the_scores_say(composite, finding):
    fig = head_heatmap(scores(composite))
    assert fig.layout.meta["finding"] == finding
    assert fig.layout.title.text.replace("<br>", " ") == finding
    assert fig.layout.title.subtitle.text.replace("<br>", " ") == fig.layout.meta["caption"]


def test_one_capability_is_named_in_the_title():
    found = scores()
    only = replace(found, receivers={"retrieval": found.receivers["retrieval"]})
    assert head_heatmap(only).layout.meta["finding"].endswith("half of the retrieval score")


@given(st.lists(st.floats(-1, 1, width=32), min_size=12, max_size=12))
def test_half_share_is_the_shortest_prefix_that_reaches_half(values):
    table = torch.tensor(values).reshape(3, 4)
    positive = table.double().clamp(min=0)
    heads = half_share(table)
    if positive.sum() == 0:
        assert heads == []
        return
    carried = [float(positive[cell]) for cell in heads]
    rest = [float(positive[divmod(i, 4)]) for i in range(12) if divmod(i, 4) not in heads]
    half = float(positive.sum()) / 2
    assert sum(carried) >= half * (1 - 1e-9) and sum(carried[:-1]) < half
    assert min(carried) >= max(rest, default=0)


def test_the_strongest_probe_of_a_head():
    best = strongest_probe(scores())
    assert [best.labels[best.index[cell]] for cell in ((3, 4), (2, 1), (0, 5))] == ["names/value", "needle/value", "needle/key"]
    assert [float(best.value[cell]) for cell in ((3, 4), (2, 1), (0, 5))] == pytest.approx([0.5, 0.2, 0.3])


def test_facets_show_every_probe_on_one_axis_clipped_as_the_caption_says():
    found = scores()
    fig = probe_facets(found)
    probes = [effect for group in found.receivers.values() for effect in group.values()]
    assert len(fig.data) == 3
    for trace, effect in zip(fig.data, probes, strict=True):
        assert np.array_equal(trace.z, effect.values.numpy()) and trace.coloraxis == "coloraxis"
        assert trace.customdata[3, 4, 0] == 1
    magnitudes = np.abs(np.stack([effect.values.numpy() for effect in probes]))
    bound = np.percentile(magnitudes, 99.5)
    assert fig.layout.coloraxis.cmax == -fig.layout.coloraxis.cmin == pytest.approx(bound)
    assert f"99.5th percentile of |IE|); {(magnitudes > bound).sum()} value beyond" in fig.layout.meta["caption"]
    assert [note.text for note in fig.layout.annotations] == ["needle<br>value", "needle<br>key", "names<br>value"]
    assert fig.layout.yaxis.range[0] > fig.layout.yaxis.range[1]
    assert fig.layout.meta["finding"].startswith("L3H4 is the strongest head in 2 of 3 probes")


def test_facets_of_probes_that_disagree_say_so():
    found = scores()
    apart = replace(found, receivers={"retrieval": {"a/value": effects({(0, 0): 0.5}), "b/value": effects({(1, 1): 0.5})}})
    assert probe_facets(apart).layout.meta["finding"].startswith("No two of 2 probes have the same strongest head")


def test_roles_are_drawn_beside_each_other_on_one_axis():
    found = with_senders()
    fig = role_maps(found)
    left, receiving, right, sending = fig.data
    assert left.coloraxis == right.coloraxis == "coloraxis"
    assert left.z[3, 4] == pytest.approx(0.5) and right.z[2, 1] == pytest.approx(0.3) and np.isnan(right.z[3]).all()
    assert set(zip(receiving.y, receiving.x, strict=True)) == {(3, 4), (2, 1), (0, 5)}
    assert set(zip(sending.y, sending.x, strict=True)) == {(2, 1), (0, 2)}
    assert fig.layout.meta["finding"] == "3 heads act on the answer directly and 2 through their queries; 1 does both"
    assert fig.layout.yaxis.range[0] > fig.layout.yaxis.range[1]


def test_roles_without_a_sender_say_so():
    found = with_senders()
    silent = {c: {label: replace(effect, per_pair=effect.per_pair * 0) for label, effect in probes.items()} for c, probes in found.senders.items()}
    assert role_maps(replace(found, senders=silent)).layout.meta["finding"] == "3 heads act on the answer directly; none acts through their queries"
    with pytest.raises(InputError, match="senders=True"):
        role_maps(scores())


def test_a_path_that_one_capability_lacks_is_that_of_the_other():
    both = {"a": {"x": effects_of([[[torch.nan, torch.nan]]])}, "b": {"y": effects_of([[[0.25, torch.nan]]])}}
    torch.testing.assert_close(strength(both), torch.tensor([[0.25, torch.nan]]), equal_nan=True)


@pytest.mark.parametrize("draw", [head_heatmap, probe_facets])
def test_a_detector_called_by_itself_is_drawn_in_its_own_unit(draw):
    """Its scores have no direct effects."""
    alone = scores_of(info(), "attention_mass", [replace(effects({(3, 4): 0.4}), mode="attention_mass", direction="none")], [])
    fig = draw(alone)
    assert "attention_mass" in fig.layout.meta["caption"] and "direct effect" not in fig.layout.meta["caption"]
    assert "IE" not in str(fig.to_dict())
