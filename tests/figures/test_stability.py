"""Stability figures: what is drawn, where, and what the title says."""

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from hydralens import statistics
from hydralens.errors import InputError
from hydralens.figures import pairs_curve, stability_matrix, volcano
from hydralens.statistics import false_discovery, sign_flip_p
from tests.test_effects import effects_of
from tests.test_statistics import noise, simulated


def traces(fig: go.Figure) -> dict:
    return {trace.name: trace for trace in fig.data if trace.name}


def test_the_curve_draws_means_and_the_range_of_draws():
    frame = statistics.pairs_curve(simulated(spread=2.0), 10, n_draws=6)
    fig = pairs_curve(frame)
    lines, draws = traces(fig), frame.query("against == 'other pairs'").groupby("n_pairs")
    assert len(lines) == 4
    for name, measure in (("share of the top 10 in common", "top_k_overlap"), ("Spearman, all heads", "spearman")):
        line = lines[f"{name}, against other pairs"]
        assert list(line.x) == [1, 2, 4, 8, 12] and line.y == pytest.approx(draws[measure].mean().to_numpy())
        assert line.customdata[:, 1] == pytest.approx(draws[measure].max().to_numpy())
        band = next(trace for trace in fig.data if trace.fill and trace.fillcolor == line.line.color)
        assert np.asarray(band.y) == pytest.approx(np.concatenate([draws[measure].max(), draws[measure].min()[::-1]]))
    assert fig.layout.xaxis.type == "log" and fig.layout.xaxis.ticktext == ("1", "2", "4", "8", "12")
    assert "6 random draws" in fig.layout.meta["caption"]


def test_the_curves_title_says_how_many_pairs_are_enough():
    frame = statistics.pairs_curve(simulated(), 10, sizes=[1, 2], n_draws=2)
    for overlaps, finding in (
        ({1: 0.5, 2: 0.8}, "2 pairs a probe are enough: two runs of 2 share 80% of their top 10 heads"),
        ({1: 0.75, 2: 0.8}, "1 pair a probe is enough: two runs of 1 share 75% of their top 10 heads"),
        ({1: 0.5, 2: 0.6}, "2 pairs a probe are not enough: two runs of 2 share 60% of their top 10 heads"),
    ):
        fig = pairs_curve(frame.assign(top_k_overlap=frame["n_pairs"].map(overlaps)))
        assert fig.layout.meta["finding"] == finding
        assert fig.layout.title.text.replace("<br>", " ") == finding


def test_one_pair_has_nothing_to_compare_with():
    with pytest.raises(InputError, match="every probe needs at least 2 pairs"):
        pairs_curve(statistics.pairs_curve(simulated(n_pairs=1), 10, n_draws=1))


def test_the_matrix_is_symmetric_with_halves_on_the_diagonal():
    frame = statistics.stability({"seed 0": simulated(spread=3.0), "seed 1": simulated(spread=3.0, seed=1), "one": simulated(n_pairs=1, seed=2)}, 10)
    fig = stability_matrix(frame)
    (trace,) = fig.data
    value = {(row.a, row.b): row.top_k_overlap for row in frame.itertuples()}
    assert trace.x == trace.y == ("seed 0", "seed 1", "one")
    np.testing.assert_array_equal(trace.z, trace.z.T)
    assert trace.z[0, 1] == value["seed 0", "seed 1"] and trace.z[1, 1] == value["seed 1", "seed 1"] and np.isnan(trace.z[2, 2])
    assert trace.customdata[0, 2, 0] == frame.set_index(["a", "b"]).loc[("seed 0", "one"), "spearman"]
    assert (trace.zmin, trace.zmid, trace.zmax) == (-1, 0, 1) and fig.layout.yaxis.autorange == "reversed"
    off = [value[pair] for pair in value if pair[0] != pair[1]]
    own = [value[pair] for pair in value if pair[0] == pair[1]]
    expected = f"Two of 3 conditions share {100 * np.mean(off):.0f}% of their top 10 heads ({100 * min(off):.0f}% to {100 * max(off):.0f}%)"
    assert fig.layout.meta["finding"] == f"{expected}; halves of one {100 * np.mean(own):.0f}%"


def test_a_matrix_without_halves_says_nothing_of_them():
    found = stability_matrix(statistics.stability({"a": simulated(n_pairs=1, spread=0.01), "b": simulated(n_pairs=1, spread=0.01, seed=1)}, 10))
    assert found.layout.meta["finding"] == "Two of 2 conditions share 100% of their top 10 heads" and "Diagonal" not in found.layout.meta["caption"]


def shifted(n_pairs: int, strong: dict[tuple[int, int], float]):
    values = noise(n_pairs, 4, 6)
    for (layer, head), mean in strong.items():
        values[:, layer, head] += mean
    return values


def test_the_volcano_colours_and_names_the_heads_that_are_sure():
    values = shifted(20, {(3, 4): 4.0, (1, 2): -3.0})
    values[:, 0, 0] = torch.nan
    fig = volcano(effects_of(values))
    q = false_discovery(sign_flip_p(values))
    sure = {divmod(cell, 6) for cell in (q < 0.05).flatten().nonzero()[:, 0].tolist()}
    assert {(3, 4), (1, 2)} <= sure
    rest, found = fig.data
    assert {tuple(map(int, row[:2])) for row in found.customdata} == sure
    assert len(rest.x) + len(found.x) == 23  # the impossible head has no place
    place = [tuple(map(int, row[:2])) for row in found.customdata].index((1, 2))
    assert found.x[place] == pytest.approx(float(values[:, 1, 2].mean())) and found.y[place] == pytest.approx(-np.log10(float(q[1, 2])))
    assert {note.text for note in fig.layout.annotations} == {f"L{layer}H{head}" for layer, head in sure}
    assert fig.layout.meta["finding"] == f"{len(sure)} of 23 heads have effects that are clearly not zero; the strongest is L3H4, {values[:, 3, 4].mean():.2f}"
    assert "20 pairs, whose smallest possible p is 1e-05" in fig.layout.meta["caption"]
    assert found.name == f"{len(sure)} heads with q < 0.05"


def test_a_volcano_without_a_sure_head_says_why():
    assert volcano(effects_of(shifted(4, {(3, 4): 9.0}))).layout.meta["finding"] == "4 pairs are too few to tell any effect from zero"
    assert volcano(effects_of(shifted(12, {}))).layout.meta["finding"] == "No effect of 24 heads is clearly not zero with 12 pairs"


def test_a_volcano_of_values_counts_kv_heads():
    fig = volcano(replace(effects_of(shifted(20, {(3, 4): 4.0})), component="v"))
    assert "KV heads" in fig.layout.meta["finding"] and "of v" in fig.layout.meta["caption"]


def test_names_are_given_to_the_strongest_only():
    values = shifted(20, {cell: 2.0 for cell in np.ndindex(4, 6)})
    strongest = [divmod(cell, 6) for cell in values.mean(0).flatten().topk(8).indices.tolist()]
    assert {note.text for note in volcano(effects_of(values)).layout.annotations} == {f"L{layer}H{head}" for layer, head in strongest}
