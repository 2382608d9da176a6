"""The matrix type: who is within a layer, and files."""

import pytest
import torch

from hydralens.similarity import Similarity


def test_within_and_between_layers_by_hand():
    matrix = torch.tensor([[1, 0.5, 0.1, 0.2], [0.5, 1, 0.3, 0.4], [0.1, 0.3, 1, -0.5], [0.2, 0.4, -0.5, 1]])
    found = Similarity(matrix, ["L0H0", "L0H1", "L1H0", "L1H1"], "head", "cosine", 1)
    assert found.mean_within_layer == pytest.approx(0.0, abs=1e-7)
    assert found.mean_between_layers == pytest.approx(0.25)
    layers = Similarity(matrix, ["L0", "L1", "L2", "L10"], "layer", "cosine", 1)
    assert layers.layers.tolist() == [0, 1, 2, 10]
    assert layers.mean_within_layer != layers.mean_within_layer
    assert found.within_layer.tolist() == pytest.approx([0.5, -0.5]) and found.between_layers.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert layers.within_layer.numel() == 0 and layers.between_layers.numel() == 6


def test_heads_without_anything_to_compare_do_not_spoil_the_means():
    matrix = torch.eye(4)
    matrix[0] = matrix[:, 0] = torch.nan
    matrix[1, 2] = matrix[2, 1] = 0.6
    found = Similarity(matrix, ["L0H0", "L0H1", "L1H0", "L1H1"], "head", "cosine", 1)
    assert found.mean_within_layer == 0 and found.mean_between_layers == pytest.approx(0.3)
