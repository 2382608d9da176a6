"""Similarity matrices: values, order, size and titles."""

import numpy as np
import pytest
import torch

import hydralens.figures.matrices as matrices
from hydralens.figures import saving
from hydralens.figures.matrices import block_similarity, head_similarity, layer_similarity, pooled
from hydralens.figures.saving import save_figures
from hydralens.similarity import Similarity, block_structure
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
    assert z[0, 7] == pytest.approx((8 * 0.1 + 1) / 9, abs=5e-4) and z[2, 3] == pytest.approx(0.3)
    assert z[2, 2] == pytest.approx(0.3)  # a head's likeness to itself is no likeness of heads
    assert list(fig.data[0].x[:3]) == ["L0H0..2", "L0H3..5", "L1H0..2"]
    assert "mean over 3 x 3 neighbouring heads, without each head's likeness to itself" in fig.layout.meta["caption"]


def test_pooling_leaves_out_what_is_unknown_and_keeps_a_short_last_cell():
    matrix = torch.tensor([[1, 0.2, 0.4], [0.2, 1, torch.nan], [0.4, torch.nan, 1]])
    torch.testing.assert_close(pooled(matrix, 2), torch.tensor([[0.2, 0.4], [0.4, torch.nan]]), equal_nan=True)
    assert pooled(matrix, 1) is matrix


# --- both side by side ---------------------------------------------------------------------------------------------


def blocky(n: int = 12, start: int = 5) -> Similarity:
    block = torch.arange(n) >= start
    matrix = torch.where(block[:, None] == block, 0.9, 0.2).fill_diagonal_(1)
    return Similarity(matrix, [f"L{i}" for i in range(n)], "layer", "cosine of layer outputs", 77)


def test_blocks_are_marked_where_the_test_finds_them():
    structure = block_structure(blocky(), heads(0.3, 0.1), 49)
    fig = block_similarity(blocky(), heads(0.3, 0.1), structure)
    left, right = fig.data
    assert left.z.shape == (12, 12) and right.z.shape == (24, 24)
    assert sorted((shape.x0, shape.x1, shape.y0, shape.y1) for shape in fig.layout.shapes) == [(-0.5, 11.5, 4.5, 4.5), (4.5, 4.5, -0.5, 11.5)]
    assert {shape.xref for shape in fig.layout.shapes} == {"x"}
    meta = fig.layout.meta
    assert meta["finding"] == structure.finding
    assert f"explain {structure.layers.explained:.1%} of the variance, p = 0.02 against 49 draws of layers that drift evenly" in meta["caption"]
    assert "over 77 tokens" in meta["caption"] and "over 1,234 tokens" in meta["caption"]
    assert left.zmin == -left.zmax and right.zmin == -right.zmax and left.zmax != right.zmax


def test_no_line_is_drawn_where_there_are_no_blocks():
    structure = block_structure(layers(), heads(0.1, 0.1), 19)
    fig = block_similarity(layers(), heads(0.1, 0.1), structure)
    assert not fig.layout.shapes and "dotted" not in fig.layout.meta["caption"]


def test_64_layers_of_128_heads_stay_under_10_megabytes(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "BROWSERS", ())
    layer = torch.arange(64).repeat_interleave(128)
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(8192, generator=generator)
    matrix = torch.where(layer[:, None] == layer, 0.3, 0.1) * noise * noise[:, None]
    sim = Similarity(matrix, [f"L{i}H{h}" for i in range(64) for h in range(128)], "head", "cosine of heads' contributions", 1234)
    structure = block_structure(blocky(64, 20), heads(0.3, 0.1), 9)
    fig = block_similarity(blocky(64, 20), sim, structure)
    assert fig.data[1].z.shape == (512, 512) and "16 x 16" in fig.layout.meta["caption"]
    (path,) = save_figures({"both": fig}, tmp_path)
    assert path.stat().st_size < 10e6


def test_files_of_270_heads_stay_small():
    assert len(head_similarity(heads(0.3, 0.1, 30, 9)).to_json()) < 1_000_000


def test_bfloat16_is_accepted():
    sim = heads(0.25, 0.125)
    object.__setattr__(sim, "matrix", sim.matrix.to(torch.bfloat16))
    assert head_similarity(sim).data[0].z[0, 1] == 0.25
