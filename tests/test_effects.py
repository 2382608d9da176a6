import numpy as np
import pytest
import torch

from hydralens.patching.effects import HeadEffects


def effects_of(per_pair, kept=None, component="z", n_heads=None, n_kv_heads=None) -> HeadEffects:
    """Effects with given values ``[pair, layer, head]``; all pairs count unless ``kept`` says otherwise."""
    per_pair = torch.as_tensor(per_pair, dtype=torch.float32)
    n_pairs = len(per_pair)
    n_heads = n_heads or per_pair.shape[2]
    return HeadEffects(
        per_pair=per_pair,
        component=component,
        mode="direct",
        direction="noise",
        positions="answer",
        clean_metric=torch.ones(n_pairs),
        corrupt_metric=torch.zeros(n_pairs),
        kept=torch.ones(n_pairs, dtype=torch.bool) if kept is None else torch.tensor(kept),
        answered=torch.ones(n_pairs, dtype=torch.bool),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        probe="toy",
        capability="retrieval",
        corruption="value",
    )


def random_effects(n_pairs=7, **kwargs) -> HeadEffects:
    return effects_of(torch.rand(n_pairs, 2, 3, generator=torch.Generator().manual_seed(0)), **kwargs)


def test_values_are_the_mean_over_the_pairs_that_count():
    effects = effects_of([[[1.0, 2.0]], [[3.0, 5.0]], [[100.0, 100.0]]], kept=[True, True, False])
    torch.testing.assert_close(effects.values, torch.tensor([[2.0, 3.5]]))
    assert effects.n_pairs == 2


def test_interval_equals_a_resampling_loop_with_the_same_draws():
    effects, n_pairs = random_effects(kept=[True] * 5 + [False] * 2), 5
    draws = np.random.default_rng(3).multinomial(n_pairs, [1 / n_pairs] * n_pairs, size=50)
    means = [np.repeat(effects.per_pair[:5].numpy(), times, axis=0).astype(float).mean(0) for times in draws]
    for bound, quantile in zip(effects.interval(0.9, n_resamples=50, seed=3), (0.05, 0.95), strict=True):
        np.testing.assert_allclose(bound, np.quantile(means, quantile, axis=0), atol=1e-6)


def test_interval_is_the_bootstraps():
    """The textbook loop, with draws of its own: pairs drawn with replacement."""
    effects, generator = random_effects(n_pairs=12), np.random.default_rng(99)
    pairs = effects.per_pair.numpy()
    means = np.stack([pairs[generator.integers(12, size=12)].mean(0) for _ in range(4000)])
    for bound, quantile in zip(effects.interval(n_resamples=4000), (0.025, 0.975), strict=True):
        np.testing.assert_allclose(bound, np.quantile(means, quantile, axis=0), atol=0.02)  # about four standard errors
    low, high = effects.interval()
    assert (low < effects.values).all() and (effects.values < high).all()


def test_pairs_that_do_not_count_cannot_move_the_interval():
    kept, dropped = random_effects(n_pairs=5), random_effects(kept=[True] * 5 + [False] * 2)
    dropped.per_pair[:5], dropped.per_pair[5:] = kept.per_pair, torch.nan
    assert torch.equal(torch.stack(kept.interval()), torch.stack(dropped.interval()))


def test_impossible_heads_stay_nan_and_spoil_no_other():
    effects = random_effects()
    expected = torch.stack(effects.interval())
    effects.per_pair[:, 1, 0] = torch.nan
    low, high = effects.interval()
    assert low[1, 0].isnan() and high[1, 0].isnan() and effects.values[1, 0].isnan()
    expected[:, 1, 0] = torch.nan
    torch.testing.assert_close(torch.stack((low, high)), expected, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("kept", [[True, False], [False, False]])
def test_fewer_than_two_pairs_have_no_interval(kept):
    low, high = random_effects(n_pairs=2, kept=kept).interval()
    assert low.shape == high.shape == (2, 3)
    assert low.isnan().all() and high.isnan().all()


def test_frame_of_query_heads():
    effects = random_effects(n_kv_heads=1)
    frame, (low, high) = effects.to_frame(), effects.interval()
    columns = "probe capability corruption layer head kv_head component mode direction positions value ci_low ci_high n_pairs"
    assert list(frame.columns) == columns.split()
    assert frame[["layer", "head", "kv_head"]].values.tolist() == [[0, 0, 0], [0, 1, 0], [0, 2, 0], [1, 0, 0], [1, 1, 0], [1, 2, 0]]
    for row in frame.itertuples():
        at = row.layer, row.head
        assert (row.value, row.ci_low, row.ci_high) == (effects.values[at], low[at], high[at])
        assert (row.probe, row.component, row.mode, row.direction, row.positions, row.n_pairs) == ("toy", "z", "direct", "noise", "answer", 7)


def test_frame_of_key_heads_counts_kv_heads():
    frame = effects_of(torch.zeros(2, 2, 3), component="k", n_heads=12, n_kv_heads=3).to_frame()
    assert frame["head"].tolist() == frame["kv_head"].tolist() == [0, 1, 2] * 2
    assert effects_of(torch.zeros(2, 1, 6), n_kv_heads=3).to_frame()["kv_head"].tolist() == [0, 0, 1, 1, 2, 2]


def test_select_and_split_keep_everything_in_step():
    effects = random_effects(kept=[True, False] * 3 + [True])
    half = effects.select(torch.tensor([6, 1]))
    assert half.kept.tolist() == [True, False] and torch.equal(half.per_pair, effects.per_pair[[6, 1]])
    tensors, fields = effects.split()
    again = HeadEffects(**tensors, **fields)
    assert vars(again).keys() == vars(effects).keys()
    for name, value in vars(effects).items():
        assert torch.equal(vars(again)[name], value) if isinstance(value, torch.Tensor) else vars(again)[name] == value
