"""Blocks: planted ones are found with their size, and neither shuffled nor evenly decaying similarity has any."""

import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.similarity import Similarity, block_structure, head_blocks, layer_blocks
from hydralens.similarity.blocks import _best_starts, _drifting, _left
from tests.figures.examples import heads

N = 24


def layer_sim(matrix: np.ndarray) -> Similarity:
    return Similarity(torch.from_numpy(matrix).float(), [f"L{layer}" for layer in range(len(matrix))], "layer", "toy", 100)


def noise(size: float, seed: int = 0, n: int = N) -> np.ndarray:
    upper = np.triu(np.random.default_rng(seed).normal(0, size, (n, n)), 1)
    return upper + upper.T


def planted(starts: list[int] | tuple[int, ...] = (0, 7, 15), within: float = 0.8, between: float = 0.3, scatter: float = 0.05) -> np.ndarray:
    block = np.searchsorted(starts, np.arange(N), side="right")
    matrix = np.where(block[:, None] == block, within, between) + noise(scatter)
    np.fill_diagonal(matrix, 1)
    return matrix


def decaying(scatter: float = 0.0) -> np.ndarray:
    """Similarity of layers that falls with their distance and nothing else."""
    distance = np.abs(np.arange(N)[:, None] - np.arange(N))
    return np.exp(-distance / 8) + noise(scatter)


def drifting(seed: int, dimensions: int = 200) -> np.ndarray:
    """Cosines of a walk in which every step is as long as any other."""
    rng, x = np.random.default_rng(seed), []
    for _ in range(N):
        step = rng.standard_normal(dimensions)
        x.append(step if not x else 0.9 * x[-1] + (1 - 0.9**2) ** 0.5 * step)
    x = np.stack(x) / np.linalg.norm(x, axis=1, keepdims=True)
    return x @ x.T


@pytest.mark.parametrize("starts", [(0, 7, 15), (0, 4), (0, 12), (0, 5, 10, 15, 20)])
@pytest.mark.parametrize("scatter", [0.0, 0.05])
def test_planted_blocks_are_found_with_their_size(starts, scatter):
    for found in layer_blocks(layer_sim(planted(starts, scatter=scatter)), 99):
        assert found.starts == starts and found.is_real and found.p == 0.01
        assert found.gain == pytest.approx(0.5, abs=0.05) and found.within == pytest.approx(0.8, abs=0.03) and found.between == pytest.approx(0.3, abs=0.03)
        assert found.explained > min(0.8, 4 * found.null_explained)
    assert found.spans[0] == (0, starts[1] - 1) and found.spans[-1] == (starts[-1], N - 1)


def test_blocks_without_noise_explain_everything_and_beyond_distance_what_distance_leaves():
    ordered, beyond = layer_blocks(layer_sim(planted(scatter=0)), 19)
    assert ordered.explained == pytest.approx(1) and 0.3 < beyond.explained < 0.7
    same = planted(scatter=0) > 0.5
    pairs = np.triu_indices(N, 1)
    assert ordered.within_share == pytest.approx(0.8 * same[pairs].sum() / planted(scatter=0)[pairs].sum())


def test_shuffled_layers_have_no_blocks():
    ps = []
    for seed in range(8):
        order = np.random.default_rng(seed).permutation(N)
        ordered, beyond = layer_blocks(layer_sim(planted()[np.ix_(order, order)]), 49, seed)
        ps += [(ordered.p, beyond.p)]
    assert np.median(ps, axis=0).min() > 0.2 and (np.array(ps) <= 0.05).mean() < 0.25


@pytest.mark.parametrize("scatter", [0.0, 1e-7, 0.02])
def test_likeness_that_only_decays_with_distance_is_ordered_and_has_no_blocks(scatter):
    ordered, beyond = layer_blocks(layer_sim(decaying(scatter)), 99)
    assert ordered.is_real and not beyond.is_real and beyond.p > 0.05
    assert beyond.explained < 0.01
    assert scatter > 1e-6 or (beyond.starts, beyond.explained, beyond.p) == ((0,), 0, 1)


def test_even_drift_rarely_passes_and_always_beats_a_shuffle():
    """A p-value is right if drift passes at 0.05 about once in twenty times."""
    found = [layer_blocks(layer_sim(drifting(seed)), 39, seed) for seed in range(24)]
    assert all(ordered.p <= 0.05 for ordered, _ in found)
    assert sum(beyond.p <= 0.05 for _, beyond in found) <= 4 and np.median([beyond.p for _, beyond in found]) > 0.2


@pytest.mark.parametrize("dimensions", [8, 200])
def test_the_null_scatters_around_its_decay_as_the_data_do(dimensions):
    matrix, distance = drifting(0, dimensions), np.abs(np.arange(N)[:, None] - np.arange(N))
    draws = np.stack(list(_drifting(matrix, distance, 200, np.random.default_rng(0))))
    profile = np.array([[draw[distance == d].mean() for d in range(N)] for draw in draws])
    assert np.abs(profile.mean(0) - [matrix[distance == d].mean() for d in range(N)]).max() < 0.12
    scatter = np.mean([np.square(_left(draw, distance)).sum() for draw in draws])
    assert 0.5 < scatter / np.square(_left(matrix, distance)).sum() < 2


def test_uneven_drift_passes():
    """Small steps within blocks and large ones between them."""
    rng, x = np.random.default_rng(0), [np.random.default_rng(1).standard_normal(200)]
    for layer in range(1, N):
        keep = 0.4 if layer in (9, 17) else 0.98
        x.append(keep * x[-1] + (1 - keep**2) ** 0.5 * rng.standard_normal(200))
    x = np.stack(x) / np.linalg.norm(x, axis=1, keepdims=True)
    _, beyond = layer_blocks(layer_sim(x @ x.T), 99)
    assert beyond.is_real and beyond.starts == (0, 9, 17)


@settings(max_examples=40)
@given(st.integers(2, 8), st.integers(0, 10_000), st.booleans())
def test_the_search_is_exhaustive(n, seed, distance_only):
    matrix = np.random.default_rng(seed).normal(size=(n, n))
    matrix = matrix + matrix.T
    classes = np.abs(np.arange(n)[:, None] - np.arange(n))
    left = _left(matrix, classes if distance_only else np.minimum(classes, 1))

    def modularity(starts) -> float:
        return sum(left[i, j] for start, stop in zip(starts, [*starts[1:], n], strict=True) for i in range(start, stop) for j in range(i + 1, stop))

    best = max(modularity([0, *cuts]) for k in range(n) for cuts in combinations(range(1, n), k))
    assert modularity(_best_starts(left)) == pytest.approx(best, abs=1e-5)


def test_the_effect_is_that_of_a_regression_on_distance_and_block():
    """Explained variance beyond distance = what R^2 gains when "in one block" joins a dummy for every distance."""
    matrix = planted(scatter=0.1)
    _, beyond = layer_blocks(layer_sim(matrix), 1)
    i, j = np.triu_indices(N, 1)
    block = np.searchsorted(beyond.starts, np.arange(N), side="right")
    dummies, y = np.eye(N)[j - i][:, 1:], matrix[i, j]

    def fit(x):
        weights, *_ = np.linalg.lstsq(x, y, rcond=None)
        return weights, 1 - np.square(y - x @ weights).sum() / np.square(y - y.mean()).sum()

    weights, both = fit(np.column_stack([dummies, block[i] == block[j]]))
    assert beyond.gain == pytest.approx(weights[-1], abs=1e-5) and beyond.explained == pytest.approx(both - fit(dummies)[1], abs=1e-5)


# --- heads ---------------------------------------------------------------------------------------------------------


def noisy_heads(within: float, between: float, seed: int = 0, scatter: float = 0.1) -> Similarity:
    sim = heads(within, between, 6, 6)
    return replace(sim, matrix=sim.matrix + torch.from_numpy(noise(scatter, seed, 36)).float())


def test_layers_as_blocks_of_heads():
    alike, unlike = head_blocks(noisy_heads(0.5, 0.1), n_draws=99), head_blocks(noisy_heads(0.1, 0.1), n_draws=99)
    assert alike.is_real and alike.starts == tuple(range(0, 36, 6)) and alike.gain == pytest.approx(alike.within - alike.between, abs=1e-6)
    assert alike.gain == pytest.approx(0.4, abs=0.05) and alike.explained > 0.5
    assert not unlike.is_real and unlike.explained < 0.01


def test_heads_less_alike_within_a_layer_are_no_block():
    found = head_blocks(noisy_heads(-0.4, 0.1), n_draws=99)
    assert found.explained > 0.5 and found.gain < 0 and found.p > 0.9 and not found.is_real


def test_what_is_sure_but_small_is_no_block():
    sim = heads(0.13, 0.1, 12, 6)
    found = head_blocks(replace(sim, matrix=sim.matrix + torch.from_numpy(noise(0.2, n=72)).float()), n_draws=199)
    assert found.p < 0.05 and 0 < found.explained < 0.01 and not found.is_real


def test_p_of_heads_equals_dealing_by_hand():
    sim = noisy_heads(0.13, 0.1, scatter=0.2)
    found, pairs = head_blocks(sim, n_draws=199, seed=3), np.triu_indices(36, 1)
    layer = np.arange(36) // 6
    rng, matrix = np.random.default_rng(3), sim.matrix.double().numpy()

    def gain(order):
        same = (layer[order][:, None] == layer[order])[pairs]
        return matrix[pairs][same].mean() - matrix[pairs][~same].mean()

    # Dealing the heads ``order`` to the layers in turn is giving head order[i] the layer of place i.
    own, drawn = gain(np.arange(36)), [gain(np.argsort(rng.permutation(36))) for _ in range(199)]
    assert found.gain == pytest.approx(own, abs=1e-6) and found.p == pytest.approx((1 + sum(draw >= own for draw in drawn)) / 200) and 0.01 < found.p < 0.99


def test_kv_groups_as_blocks():
    sim = heads(0.1, 0.1, 4, 6)
    group = torch.arange(24) // 3
    sim = replace(sim, matrix=torch.where(group[:, None] == group, 0.7, 0.1).fill_diagonal_(1))
    groups = head_blocks(sim, 3, n_draws=49)
    assert groups.explained == pytest.approx(1) and groups.starts == tuple(range(0, 24, 3)) and "groups" in groups.against
    assert head_blocks(sim, n_draws=49).explained < 0.5


def test_heads_that_cannot_be_compared_are_left_out():
    sim = noisy_heads(0.5, 0.1)
    for head in (0, 7):
        sim.matrix[head] = sim.matrix[:, head] = torch.nan
    found = head_blocks(sim, n_draws=49)
    assert found.n_items == 34 and found.starts == (0, 5, 10, 16, 22, 28) and found.is_real


# --- both ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "of_heads", "said"),
    [
        (
            planted(),
            noisy_heads(0.1, 0.1),
            r"^Layers are alike in blocks \(\d+% of the variance, \d+% beyond distance\); the heads of a layer are not \(0\.\d%\)$",
        ),
        (planted(), noisy_heads(0.5, 0.1), r"in blocks .*; the heads of a layer are \(\d+\.\d%\)$"),
        (planted(), noisy_heads(0.17, 0.1), r"in blocks .*; the heads of a layer hardly are \(\d\.\d%\)$"),
        (decaying(0.02), noisy_heads(0.1, 0.1), r"^Layers drift apart evenly with depth, in no blocks; the heads of a layer are not alike"),
        (noise(0.1, 1), noisy_heads(0.1, 0.1), r"^Layers are alike in no order of depth"),
    ],
)
def test_the_finding_follows_the_data(layers, of_heads, said):
    assert re.search(said, block_structure(layer_sim(layers), of_heads, 99).finding)


def test_opposite_heads_that_cancel_in_the_mean_are_seen_by_their_magnitude():
    sim = heads(0.6, 0.02, 6, 6)
    sign = torch.tensor([1.0, -1.0]).repeat(18)
    structure = block_structure(layer_sim(planted()), replace(sim, matrix=sim.matrix * sign * sign[:, None]), 99)
    assert structure.magnitudes.is_real and structure.magnitudes.explained > 0.9 > 10 * structure.heads.explained
    assert "the heads of a layer are (" in structure.finding


def test_equal_seeds_give_equal_results():
    assert layer_blocks(layer_sim(planted(scatter=0.3)), 19, 1) == layer_blocks(layer_sim(planted(scatter=0.3)), 19, 1)


@pytest.mark.parametrize("n", [2, 3])
def test_few_layers_are_no_blocks_and_no_failure(n):
    ordered, beyond = layer_blocks(layer_sim(np.full((n, n), 0.5) + 0.5 * np.eye(n)), 19)
    assert not ordered.is_real and not beyond.is_real and ordered.starts == beyond.starts == (0,)


def test_wrong_input_is_one_line():
    with pytest.raises(InputError, match="this is a head similarity; pass the result of layer_similarity"):
        layer_blocks(heads(0.3, 0.1))
    with pytest.raises(InputError, match="this is a layer similarity"):
        head_blocks(layer_sim(planted()))
    with pytest.raises(InputError, match="0 of 4 layers can be compared"):
        layer_blocks(layer_sim(np.full((4, 4), np.nan)))
