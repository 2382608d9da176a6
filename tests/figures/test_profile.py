"""The profile of layers: what is drawn equals what is counted."""

from dataclasses import replace

import pytest

from hydralens.figures.profile import layer_profile
from hydralens.scores import scores_of
from tests.figures.examples import effects, info, scores


def test_profile_counts_heads_on_both_sides_of_the_thresholds():
    found = scores({})
    found.receivers["retrieval"]["needle/value"].per_pair[:, 2, 2] = 0.015  # half of it on average over the two probes: neither critical nor replaceable
    fig = layer_profile(found)
    dots, critical, between, replaceable = fig.data
    assert critical.x.tolist() == [1, 0, 1, 1] and between.x.tolist() == [0, 0, 1, 0] and replaceable.x.tolist() == [5, 6, 4, 5]
    assert critical.y.tolist() == [0, 1, 2, 3] and fig.layout.barmode == "stack"
    assert dots.x[[0, 3]].tolist() == pytest.approx([5 / 6] * 2) and dots.x[2] < 5 / 6
    assert fig.layout.yaxis.range[0] > fig.layout.yaxis.range[1]
    assert fig.layout.meta["finding"] == "3 of 24 heads are critical and 20 replaceable, both in 3 layers; Gini 0.83 (0.82 to 0.83)"
    assert "critical from 0.01, replaceable below 0.005" in fig.layout.meta["caption"]


def test_a_detector_called_by_itself_is_drawn_in_its_own_unit():
    alone = scores_of(info(), "attention_mass", [replace(effects({(3, 4): 0.4}), mode="attention_mass", direction="none")], [])
    fig = layer_profile(alone)
    assert "attention_mass" in fig.layout.meta["caption"] and "direct effect" not in fig.layout.meta["caption"]
    assert "IE" not in str(fig.to_dict())
