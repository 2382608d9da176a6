"""The reordered head map: clusters come together, nothing is lost, and the dendrogram stands over its leaves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import dendrogram, linkage

import hydralens.figures.clusters as clusters
from hydralens.errors import InputError
from hydralens.figures.clusters import head_clusters
from hydralens.similarity import Similarity
from tests.figures.examples import heads, layers


def across_layers() -> Similarity:
    """Head h of every layer is like head h of the others: six clusters, none of them a layer."""
    sim = heads(0.0, 0.0)
    head = torch.arange(24) % 6
    noise = 0.01 * torch.rand(24, 24, generator=torch.Generator().manual_seed(0))
    return replace(sim, matrix=(torch.where(head[:, None] == head, 0.8, 0.0) + noise + noise.T).fill_diagonal_(1))


def test_clusters_come_together_whatever_layer_they_are_of():
    sim = across_layers()
    tree, strip, square = head_clusters(sim).data
    names = list(square.x)
    assert sorted(names) == sorted(sim.labels) and list(square.y) == names and strip.text[:, 0].tolist() == names
    number = [int(name.split("H")[1]) for name in names]
    assert sum(a != b for a, b in zip(number, number[1:], strict=False)) == 5  # four heads a piece
    assert strip.z[:, 0].tolist() == [int(name[1]) for name in names]
    order = [sim.labels.index(name) for name in names]
    assert np.allclose(square.z, sim.matrix[order][:, order].numpy(), atol=5e-4)
    assert head_clusters(sim).layout.meta["finding"] == "0% of heads are most like a head of their own layer; by chance it would be 22%"


def test_layers_of_like_heads_are_counted():
    assert head_clusters(heads(0.5, 0.1)).layout.meta["finding"].startswith("100% of heads")


def test_the_dendrogram_is_that_of_scipy():
    sim = across_layers()
    tree = head_clusters(sim).data[0]
    distance = (1 - sim.matrix.double()).fill_diagonal_(0).numpy()
    theirs = dendrogram(linkage(distance[np.triu_indices(24, 1)], "average"), no_plot=True)
    ours = np.stack([tree.x.reshape(-1, 5)[:, :4], tree.y.reshape(-1, 5)[:, :4]], -1)
    expected = np.stack([(np.array(theirs["icoord"]) - 5) / 10, np.array(theirs["dcoord"])], -1)
    assert np.isnan(tree.x.reshape(-1, 5)[:, 4]).all()
    assert np.allclose(sorted(map(np.ravel, ours), key=tuple), sorted(map(np.ravel, expected), key=tuple))


def test_unknown_heads_are_left_out_and_counted():
    sim = across_layers()
    sim.matrix[3] = sim.matrix[:, 3] = torch.nan
    fig = head_clusters(sim)
    assert fig.data[2].z.shape == (23, 23) and "L0H3" not in fig.data[2].x and "1 head without anything to compare left out" in fig.layout.meta["caption"]


def test_many_heads_are_averaged_in_the_new_order(monkeypatch):
    monkeypatch.setattr(clusters, "MOST_CELLS", 7)
    fig = head_clusters(across_layers())
    tree, strip, square = fig.data
    assert square.z.shape == (6, 6) and np.allclose(square.z.diagonal(), 0.81, atol=0.02) and np.nanmax(square.z[~np.eye(6, dtype=bool)]) < 0.1
    assert strip.z.shape == (24, 1) and square.x[0].endswith("and 3 more") and "mean over 4 x 4 neighbours" in fig.layout.meta["caption"]


def test_a_chain_of_thousands_of_heads_is_drawn():
    """Every merge adds one head: as deep a tree as there is."""
    n = 3000
    place = torch.arange(n, dtype=torch.float64) ** 1.01
    matrix = 1 - (place[:, None] - place).abs() / float(place[-1]) / 2
    fig = head_clusters(Similarity(matrix.float(), [f"L{i}H0" for i in range(n)], "head", "toy", 1))
    assert fig.data[2].z.shape == (750, 750) and len(fig.to_json()) < 8_000_000


def test_bfloat16_is_accepted():
    sim = across_layers()
    assert head_clusters(replace(sim, matrix=sim.matrix.to(torch.bfloat16))).data[2].z.dtype == np.float32


def test_layers_and_too_few_heads_are_refused():
    with pytest.raises(InputError, match="this is a layer similarity"):
        head_clusters(layers())
    with pytest.raises(InputError, match="with 2 rows that can"):
        head_clusters(heads(0.1, 0.1, 1, 2))
