"""Similarity matrices: values, order, size and titles."""

import numpy as np
import pytest
import torch

import hydralens.figures.matrices as matrices
from hydralens.figures import head_similarity, layer_similarity
from tests.figures.examples import heads, layers


@pytest.mark.parametrize(("draw", "sim"), [(layer_similarity, layers()), (head_similarity, heads(0.3, 0.1))])
def test_the_matrix_is_square_ordered_by_layer_and_centred_at_zero(draw, sim):
    fig = draw(sim)
    (trace,) = fig.data
    assert np.allclose(trace.z, sim.matrix.numpy(), atol=5e-4)
    assert list(trace.x) == list(trace.y) == sim.labels
    assert fig.layout.yaxis.autorange == "reversed" and fig.layout.yaxis.scaleanchor == "x"
    assert trace.zmid == 0 and trace.zmin == -trace.zmax
    assert "1,234 tokens" in fig.layout.meta["caption"]


def test_titles_follow_the_data():
    assert layer_similarity(layers()).layout.meta["finding"] == "Neighbouring layers have similarity 0.90 on average, layers at least half the depth apart 0.37"
    assert head_similarity(heads(0.1, 0.1)).layout.meta["finding"].startswith("Heads of one layer are no more alike than heads of different layers")
    assert (
        head_similarity(heads(0.5, -0.001))
        .layout.meta["finding"]
        .endswith("more alike than heads of different layers: mean similarity 0.50 within, 0.00 between")
    )


def test_opposite_cosines_that_cancel_in_the_mean_are_not_hidden():
    sim = heads(0.6, 0.1)
    sim.matrix[::2, 1::2] *= -1
    sim.matrix[1::2, ::2] *= -1
    assert "Mean magnitude 0.60 within a layer, 0.10 between." in head_similarity(sim).layout.meta["caption"]


def test_the_diagonal_does_not_set_the_colours():
    fig = head_similarity(heads(0.2, 0.05))
    assert fig.data[0].zmax == pytest.approx(0.2) and "Colours stop at ±0.20" in fig.layout.meta["caption"]


def test_large_models_are_averaged_within_layers_and_say_so(monkeypatch):
    monkeypatch.setattr(matrices, "MOST_CELLS", 8)
    sim = heads(0.3, 0.1)  # 4 layers of 6 heads: cells of 3 heads make 8 a side
    sim.matrix[0, 23] = sim.matrix[23, 0] = 1.0
    fig = head_similarity(sim)
    z = fig.data[0].z
    assert z.shape == (8, 8)
    assert z[0, 7] == pytest.approx((8 * 0.1 + 1) / 9, abs=5e-4) and z[2, 3] == pytest.approx(0.3) and z[2, 2] == pytest.approx((6 * 0.3 + 3) / 9, abs=5e-4)
    assert list(fig.data[0].x[:3]) == ["L0H0..2", "L0H3..5", "L1H0..2"]
    assert "mean over 3 x 3 neighbouring heads" in fig.layout.meta["caption"]


def test_files_of_270_heads_stay_small():
    assert len(head_similarity(heads(0.3, 0.1, 30, 9)).to_json()) < 1_000_000


def test_bfloat16_is_accepted():
    sim = heads(0.25, 0.125)
    object.__setattr__(sim, "matrix", sim.matrix.to(torch.bfloat16))
    assert head_similarity(sim).data[0].z[0, 1] == 0.25
