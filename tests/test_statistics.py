from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, fisher_exact, norm, pearsonr, spearmanr

from hydralens import statistics
from hydralens.errors import InputError
from hydralens.probes import retrieval
from hydralens.scores import scores_of
from hydralens.statistics import (
    agreement,
    clustered_bootstrap,
    clustered_difference,
    false_discovery,
    pairs_curve,
    pooled,
    positive_control,
    sign_flip_p,
    significance,
    smallest_p,
    split_half,
    stability,
    vary,
)
from tests.figures.examples import clear_knockout, knockout_frame, unclear_knockout
from tests.planted import HEADS, LAYERS, RETRIEVER, planted_model
from tests.test_effects import effects_of
from tests.toy_masks import toy_info


def column(*values) -> torch.Tensor:
    """One head's values, a pair each."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None]


def noise(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Eighths, so that sums and doubled values are exact.
pair_values = st.lists(st.integers(-400, 400).map(lambda n: n / 8), min_size=1, max_size=8)
alternatives = st.sampled_from(["two-sided", "greater"])


# --- sign-flip test ---


def test_p_by_hand():
    """The eight sums of 1, 2 and 3 with any signs are 6, 4, 2, 0, 0, -2, -4, -6; observed are 6, then 2, then -6."""
    assert sign_flip_p(column(1, 2, 3)) == 2 / 8 and sign_flip_p(column(1, 2, 3), "greater") == 1 / 8
    assert sign_flip_p(column(1, -2, 3)) == 6 / 8 and sign_flip_p(column(1, -2, 3), "greater") == 3 / 8
    assert sign_flip_p(column(-1, -2, -3), "greater") == 1
    assert sign_flip_p(column(5)) == 1 and sign_flip_p(column(0, 0, 0)) == 1


@pytest.mark.parametrize("alternative", ["two-sided", "greater"])
@pytest.mark.parametrize("n_pairs", [1, 2, 5, 9])
def test_p_is_the_enumerations(alternative, n_pairs):
    """Reference: every head and every sign pattern in a loop, in whole numbers, which tie."""
    values = (4 * noise(n_pairs, 2, 3, seed=n_pairs)).round()
    measure = abs if alternative == "two-sided" else float
    for layer, head in product(range(2), range(3)):
        mine = values[:, layer, head].tolist()
        sums = [sum(sign * value for sign, value in zip(signs, mine, strict=True)) for signs in product((1, -1), repeat=n_pairs)]
        expected = np.mean([measure(total) >= measure(sum(mine)) for total in sums])
        assert sign_flip_p(values, alternative)[layer, head] == pytest.approx(expected, abs=1e-12)


def test_sums_that_are_equal_but_for_rounding_tie():
    """Tenths, whose sums depend on the order they are added up in, have the p of whole numbers."""
    whole = torch.from_numpy(np.random.default_rng(0).integers(-9, 10, (7, 20, 20))).double()
    assert torch.equal(sign_flip_p(whole / 10), sign_flip_p(whole))


def test_random_flips_agree_with_all_flips(monkeypatch):
    values = noise(11, 2, 5) + 0.4
    exact = sign_flip_p(values)
    monkeypatch.setattr(statistics, "EXACT", 10)
    drawn = sign_flip_p(values, n_flips=20_000)
    standard_error = (exact * (1 - exact) / 20_000).sqrt()
    assert ((drawn - exact).abs() <= 5 * standard_error + 1e-4).all()
    assert torch.equal(drawn, sign_flip_p(values, n_flips=20_000)) and not torch.equal(drawn, sign_flip_p(values, n_flips=20_000, seed=1))


@pytest.mark.parametrize("n_pairs", [1, 6, 12, 13])
def test_the_smallest_p_is_that_of_equal_pairs(n_pairs):
    for alternative in ("two-sided", "greater"):
        reached = float(sign_flip_p(torch.ones(n_pairs, 1, 1), alternative, n_flips=50))
        least = smallest_p(n_pairs, alternative, n_flips=50)
        # Of random patterns one in thousands repeats the observed one.
        assert reached == pytest.approx(least, abs=1e-12)
    assert smallest_p(6) == 0.03125 and smallest_p(6, "greater") == 0.015625


def test_what_cannot_be_measured_has_no_p():
    values = torch.ones(4, 1, 3)
    values[:, 0, 0], values[2, 0, 1] = torch.nan, torch.nan
    assert sign_flip_p(values).isnan().tolist() == [[True, True, False]]
    assert sign_flip_p(values[:0]).isnan().all() and sign_flip_p(values[:0]).shape == (1, 3)
    with pytest.raises(InputError, match="alternative 'less' is not one of two-sided, greater"):
        sign_flip_p(values, "less")


@pytest.mark.parametrize(("n_pairs", "alternative"), [(10, "two-sided"), (10, "greater"), (25, "two-sided"), (25, "greater")])
def test_nulls_are_rejected_as_often_as_the_level_says(n_pairs, alternative):
    """Heavy-tailed symmetric noise whose spread differs from pair to pair: rejections at 5 % lie within the binomial's 99.99 % range."""
    n_heads, generator = 1000, np.random.default_rng(7)
    # Heads that share their flips are not quite independent experiments, so every fifty get flips of their own.
    values = torch.from_numpy(generator.standard_t(2, (n_pairs, 1, n_heads)) * generator.uniform(0.1, 3, (n_pairs, 1, 1)))
    p = torch.cat([sign_flip_p(block, alternative, n_flips=2000, seed=seed) for seed, block in enumerate(values.split(50, 2))], 1)
    for level in (0.05, 0.2):
        low, high = binom.ppf([5e-5, 1 - 5e-5], n_heads, level)
        assert low <= int((p <= level).sum()) <= high


@given(pair_values, alternatives, st.randoms(use_true_random=False))
def test_p_is_a_probability_and_knows_no_order_of_pairs(values, alternative, random):
    p = sign_flip_p(column(*values), alternative)
    shuffled = random.sample(values, len(values))
    assert smallest_p(len(values), alternative) <= p <= 1
    assert torch.equal(p, sign_flip_p(column(*shuffled), alternative))


@given(pair_values, st.integers(-20, 20))
def test_p_knows_neither_sign_nor_scale(values, power):
    p = sign_flip_p(column(*values))
    assert torch.equal(p, sign_flip_p(-column(*values)))
    assert torch.equal(p, sign_flip_p(column(*values) * 2.0**power))


@given(pair_values)
def test_the_two_sides_together_make_the_two_sided_test(values):
    up, down = (float(sign_flip_p(column(*signed), "greater")) for signed in (values, [-value for value in values]))
    assert sign_flip_p(column(*values)) == pytest.approx(min(1, 2 * min(up, down)))


# --- false discoveries ---


def test_benjamini_hochberg_by_hand():
    """0.01 * 4/1 = 0.04; 0.02 * 4/2 = 0.04; 0.03 * 4/3 = 0.04; 0.5; NaN is no test and adds none."""
    p = torch.tensor([[0.02, torch.nan, 0.5], [0.01, 0.03, torch.nan]])
    q = false_discovery(p)
    torch.testing.assert_close(q, torch.tensor([[0.04, torch.nan, 0.5], [0.04, 0.04, torch.nan]], dtype=torch.float64), equal_nan=True)
    strict = false_discovery(p, "by")  # times 1 + 1/2 + 1/3 + 1/4
    torch.testing.assert_close(strict, (q * 25 / 12).clamp(max=1), equal_nan=True)


def test_no_test_gives_no_q():
    assert false_discovery(torch.full((2, 3), torch.nan)).isnan().all()
    with pytest.raises(InputError, match="method 'bonferroni' is not one of bh, by"):
        false_discovery(torch.ones(1, 1), "bonferroni")


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=30))
def test_q_is_at_least_p_and_keeps_its_order(values):
    p = torch.tensor([values], dtype=torch.float64)
    q = false_discovery(p)
    assert (q >= p - 1e-12).all() and (q <= 1).all()
    assert (q[0, p[0].argsort()].diff() >= -1e-12).all()


def test_false_discoveries_stay_under_the_rate_and_real_effects_are_found():
    """Twenty real heads of 200, fifty experiments of 12 pairs: the mean share of false ones among those reported is at most 5 %, plus four standard errors."""
    shares, found = [], []
    for seed in range(50):
        values = noise(12, 1, 200, seed=seed)
        values[:, 0, :20] += 2
        reported = (false_discovery(sign_flip_p(values)) < 0.05)[0]
        shares.append(float(reported[20:].sum()) / max(1, int(reported.sum())))
        found.append(float(reported[:20].float().mean()))
    assert np.mean(shares) <= 0.05 + 4 * np.std(shares) / np.sqrt(50)
    assert np.mean(found) > 0.9


def test_significance_tests_the_pairs_that_count():
    values = noise(9, 2, 3)
    frame = significance(effects_of(values, kept=[True] * 8 + [False]))
    expected = sign_flip_p(values[:8])
    assert frame["p"].tolist() == expected.flatten().tolist() and frame["q"].tolist() == false_discovery(expected).flatten().tolist()
    assert list(frame.columns[-3:]) == ["n_pairs", "p", "q"] and (frame["n_pairs"] == 8).all()


def test_pooled_has_one_row_a_prompt():
    """Two corruptions of probe a share prompts 0 (both), 1 (the first only) and 2 (both); probe b has its own."""
    first = replace(effects_of([[[1.0, 0.0]], [[3.0, 0.0]], [[5.0, torch.nan]]]), probe="a")
    second = replace(effects_of([[[2.0, 4.0]], [[9.0, 9.0]], [[7.0, torch.nan]]], kept=[True, False, True]), probe="a", corruption="key")
    other = replace(effects_of([[[8.0, 8.0]]]), probe="b")
    together = pooled(scores_of(toy_info(1, 2), "toy", [first, second, other], []))
    expected = torch.tensor([[[1.5, 2.0]], [[3.0, 0.0]], [[6.0, torch.nan]], [[8.0, 8.0]]])
    torch.testing.assert_close(together.per_pair, expected, equal_nan=True)
    assert together.n_pairs == 4 and together.kept.all() and together.clean_metric.tolist() == [1, 1, 1, 1]
    assert significance(together)["p"].isna().tolist() == [False, True]


# --- agreement ---


def test_agreement_by_hand():
    """Best two: H0 and H1 against H1 and H3; Spearman of (1, 2, 3, 4) and (3, 1, 4, 2) is 1 - 6 * 10 / 60 = 0."""
    same = agreement(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[2.0, 4.0, 1.0, 3.0]]), k=2)
    assert (same.k, same.top_k_overlap, same.jaccard) == (2, 0.5, pytest.approx(1 / 3))
    assert same.spearman == pytest.approx(0) and (same.zeros_a, same.zeros_b) == (0, 0)


def test_correlations_are_scipys_over_heads_known_in_both():
    a, b = noise(3, 4), noise(3, 4, seed=1)
    a[0, 0], b[1, 2] = torch.nan, torch.nan
    b[2], a[2, 0] = 0, 0
    known = (a.isfinite() & b.isfinite()).flatten().numpy()
    x, y = a.flatten().numpy()[known], b.flatten().numpy()[known]
    found = agreement(a, b, 3)
    assert (found.spearman, found.pearson) == pytest.approx((spearmanr(x, y).statistic, pearsonr(x, y).statistic))
    assert (found.zeros_a, found.zeros_b) == (1, 4)


def test_zeros_do_not_agree_by_sharing_a_tie_break():
    """Both maps have H0 only; the second place is any of three zeros, the same one a third of the time: (1 + 1/3) / 2."""
    one = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    found = agreement(one, one, k=2)
    assert found.top_k_overlap == pytest.approx(2 / 3) and agreement(one, one, k=1).top_k_overlap == 1
    apart = agreement(one, torch.tensor([[0.0, 0.0, 1.0, 0.0]]), k=2)  # 1/3 each for H0 and H2, 1/9 each for H1 and H3
    assert apart.top_k_overlap == pytest.approx((2 / 3 + 2 / 9) / 2)
    assert np.isnan(agreement(torch.zeros(1, 4), one, 1).spearman) and agreement(torch.zeros(1, 4), one, 1).top_k_overlap == 0.25


@given(st.lists(st.integers(-2, 2), min_size=6, max_size=6), st.lists(st.integers(-2, 2), min_size=6, max_size=6), st.integers(1, 6))
def test_overlap_is_the_mean_over_tie_breaks(a, b, k):
    """Reference: every way to fill the last places, in both maps."""

    def tops(values):
        return [set(top) for top in combinations(range(6), k) if min(values[i] for i in top) >= max([values[i] for i in range(6) if i not in top], default=-9)]

    expected = np.mean([len(one & other) / k for one in tops(a) for other in tops(b)])
    x, y = torch.tensor(a, dtype=torch.float32).reshape(2, 3), torch.tensor(b, dtype=torch.float32).reshape(2, 3)
    found, turned = agreement(x, y, k), agreement(y, x, k)
    assert found.top_k_overlap == pytest.approx(expected) == turned.top_k_overlap
    assert found.jaccard <= found.top_k_overlap + 1e-12
    assert agreement(3 * x + 1, y, k).top_k_overlap == pytest.approx(expected)  # only the order counts


@pytest.mark.parametrize(
    ("shape", "k", "said"), [((2, 2), 1, r"\(2, 3\) and \(2, 2\)"), ((2, 3), 0, "from 1 to the number of heads, 6"), ((2, 3), 7, "k is 7")]
)
def test_maps_that_cannot_be_compared_are_refused(shape, k, said):
    with pytest.raises(InputError, match=said):
        agreement(torch.ones(2, 3), torch.ones(shape), k)


# --- pairs: halves, curves, conditions ---

N_SIGNAL = 10


def simulated(n_pairs=24, spread=0.5, seed=0, probes=2, shape=(10, 10)):
    """Scores whose first ten heads have effect 1 and whose other ninety have none, each pair with noise of the given spread."""
    mean = torch.zeros(shape).flatten()
    mean[:N_SIGNAL] = 1
    effects = [
        replace(effects_of(mean.reshape(shape) + spread * noise(n_pairs, *shape, seed=100 * seed + i)), probe=f"probe {i}", clean_metric=torch.arange(n_pairs))
        for i in range(probes)
    ]
    return scores_of(toy_info(*shape), "toy", effects, [])


def test_halves_are_disjoint_cover_every_pair_and_keep_corruptions_together(monkeypatch):
    scores = simulated(n_pairs=7)
    (a, b) = scores.measured["retrieval"].values()
    a, b = replace(a, probe="a"), replace(b, probe="a", corruption="key", kept=torch.tensor([True] * 5 + [False] * 2))
    scores, halves = scores_of(scores.model, "toy", [a, b], []), []
    select = type(scores).select

    def recorded(self, choose):
        halves.append(select(self, choose))
        return halves[-1]

    monkeypatch.setattr(type(scores), "select", recorded)
    split_half(scores, 3, n_splits=4)
    pairs = [[set(map(int, effect.clean_metric)) for effect in half.measured["retrieval"].values()] for half in halves]
    assert len(pairs) == 8
    for (a_one, b_one), (a_two, b_two) in zip(pairs[::2], pairs[1::2], strict=True):
        assert not a_one & a_two and a_one | a_two == set(range(7))
        assert not b_one & b_two and b_one | b_two == set(range(5))
        assert abs(len(a_one) - len(a_two)) <= 1 and abs(len(b_one) - len(b_two)) <= 1
    assert len({frozenset(one) for (one, _) in pairs[::2]}) > 1  # not one split over and over


def test_where_all_pairs_count_a_prompts_corruptions_are_in_one_half(monkeypatch):
    scores, seen = simulated(n_pairs=6), []
    select = type(scores).select
    monkeypatch.setattr(type(scores), "select", lambda self, choose: seen.append(select(self, choose)) or seen[-1])
    split_half(scores, 3, n_splits=3)
    for half in seen:
        one, other = half.measured["retrieval"].values()
        assert set(one.clean_metric.tolist()) == set(other.clean_metric.tolist())


def test_split_half_is_sure_of_signal_and_not_of_noise():
    sure = split_half(simulated(spread=0.1), N_SIGNAL)
    assert sure["k"] == N_SIGNAL and sure["n_splits"] == 20
    assert sure["top_k_overlap"] == sure["top_k_overlap_low"] == sure["top_k_overlap_high"] == 1
    assert sure["spearman_low"] <= sure["spearman"] <= sure["spearman_high"] < 0.6  # ninety heads of noise: Spearman is blind to the perfect top
    alone = split_half(simulated(spread=0.1).measured["retrieval"]["probe 0/value"], N_SIGNAL)  # effects as well as scores
    assert alone["top_k_overlap"] == 1
    blank = split_half(scores_of(toy_info(10, 10), "toy", [effects_of(noise(20, 10, 10))], []), 10)
    assert blank["top_k_overlap"] < 0.3
    with pytest.raises(InputError, match="1 pairs that count"):
        split_half(simulated(n_pairs=1), 3)


def test_more_pairs_agree_more():
    frame = pairs_curve(simulated(spread=2.0), N_SIGNAL, n_draws=12)
    assert list(frame.columns[:5]) == ["n_pairs", "against", "draw", "k", "top_k_overlap"]
    others, everything = (frame[frame["against"] == f"{which} pairs"].groupby("n_pairs")["top_k_overlap"] for which in ("other", "all"))
    assert list(others.mean().index) == [1, 2, 4, 8, 12] and (others.size() == 12).all()
    for means in (others.mean(), everything.mean()):
        assert (means.diff().dropna() > 0).all()
    assert (everything.mean() > others.mean()).all()  # the pairs are among all pairs


def test_the_curve_is_what_theory_expects():
    """One head at 2 and one at 0, each pair with noise of spread 2: the difference of their means over n pairs is N(2, 8 / n), so a map ranks
    them right with chance r = Phi(2 / sqrt(8 / n)), and two maps agree with chance r^2 + (1 - r)^2: 0.635, 0.855."""
    values = 2 * noise(400, 1, 2)
    values[:, 0, 0] += 2
    frame = pairs_curve(effects_of(values), k=1, sizes=[1, 4], n_draws=600)
    found = frame.query("against == 'other pairs'").groupby("n_pairs")["top_k_overlap"].mean()
    r = norm.cdf(2 / np.sqrt(8 / found.index.to_numpy()))
    assert found.to_numpy() == pytest.approx(r**2 + (1 - r) ** 2, abs=0.06)


def test_sizes_beyond_half_are_compared_with_all_pairs_only():
    frame = pairs_curve(simulated(n_pairs=6), 5, sizes=[3, 4, 6], n_draws=2)
    assert set(frame.query("against == 'other pairs'")["n_pairs"]) == {3} and set(frame.query("against == 'all pairs'")["n_pairs"]) == {3, 4, 6}
    assert (frame.query("against == 'all pairs' and n_pairs == 6")["spearman"] > 1 - 1e-9).all()
    for size in (0, 7):
        with pytest.raises(InputError, match=f"sizes has {size} pairs; .* a probe, 6"):
            pairs_curve(simulated(n_pairs=6), 5, sizes=[size])
    assert set(pairs_curve(simulated(n_pairs=1), 5, n_draws=1)["against"]) == {"all pairs"}


def test_stability_compares_every_two_conditions_and_each_with_itself():
    by = {"seed 0": simulated(seed=0), "seed 1": simulated(seed=1), "one pair": simulated(n_pairs=1, seed=2)}
    frame = stability(by, N_SIGNAL).set_index(["a", "b"])
    assert set(frame.index) == {("seed 0", "seed 0"), ("seed 1", "seed 1"), ("seed 0", "seed 1"), ("seed 0", "one pair"), ("seed 1", "one pair")}
    expected = agreement(by["seed 0"].composite, by["seed 1"].composite, N_SIGNAL)
    assert frame.loc[("seed 0", "seed 1"), "spearman"] == expected.spearman and (frame["k"] == N_SIGNAL).all()
    assert frame.loc[("seed 0", "seed 0"), "top_k_overlap"] == pytest.approx(split_half(by["seed 0"], N_SIGNAL)["top_k_overlap"])
    with pytest.raises(InputError, match="1 given, give at least two"):
        stability({"seed 0": by["seed 0"]}, 3)


def test_the_planted_head_is_found_whatever_the_seed_length_and_depth():
    model = planted_model()
    conditions = {"seed 0": {"seed": 0}, "seed 1": {"seed": 1}, "long": {"n_tokens": 160}, "early": {"depth": 0.1}}
    found = vary(model, conditions, method="paper", n_pairs=2, n_tokens=96, shapes=["niah_single_2"], corruptions=["value"])
    assert list(found) == list(conditions)
    assert all(scores.receivers["retrieval"]["niah_single_2/value"].n_pairs == 2 for scores in found.values())
    assert found["long"].probes[0]["n_tokens"] == 160 and found["seed 1"].probes[0]["seed"] == 1
    probe = retrieval(model, 2, 96, shapes=["niah_single_2"], corruptions=["value"], depth=0.1)[0]
    assert found["early"].probes[0]["n_tokens"] == probe.n_tokens and found["early"].composite.shape == (LAYERS, HEADS)
    assert all(scores.top(1) == [RETRIEVER] for scores in found.values())
    assert (stability(found, 1)["top_k_overlap"] == 1).all()


# --- clustered intervals ---


def test_clusters_are_drawn_whole():
    """Two clusters of which one is all right: a resample is 0, 1/4 or 1 right when sizes are 3 and 1."""
    result = clustered_bootstrap([0, 0, 0, 1], ["a", "a", "a", "b"])
    assert result == (0.25, 0.0, 1.0)
    narrow = clustered_bootstrap([0, 0, 0, 1], ["a", "a", "a", "b"], confidence=0.4)
    assert narrow.low == narrow.high == 0.25  # half of all resamples have both


def test_the_interval_is_the_resampling_loops():
    generator = np.random.default_rng(5)
    clusters = np.repeat(np.arange(12), generator.integers(1, 6, 12))
    values = generator.normal(size=len(clusters)) + clusters / 4
    loop = []
    for _ in range(4000):
        drawn = generator.integers(12, size=12)
        loop.append(np.concatenate([values[clusters == cluster] for cluster in drawn]).mean())
    result = clustered_bootstrap(values, clusters)
    assert result.mean == pytest.approx(values.mean())
    assert result[1:] == pytest.approx(np.quantile(loop, [0.025, 0.975]), abs=0.06)


def test_the_interval_covers_what_a_plain_one_does_not():
    """Five questions to each of 30 haystacks whose difficulty varies; the truth is 1/2. Of 200 experiments 95 % should cover it."""
    generator, covered, plain = np.random.default_rng(0), 0, 0
    clusters = np.repeat(np.arange(30), 5)
    for seed in range(200):
        right = generator.random(150) < generator.beta(0.5, 0.5, 30)[clusters]
        _, low, high = clustered_bootstrap(right, clusters, n_resamples=500, seed=seed)
        covered += low <= 0.5 <= high
        _, low, high = clustered_bootstrap(right, np.arange(150), n_resamples=500, seed=seed)
        plain += low <= 0.5 <= high
    assert 200 * 0.88 <= covered <= 199 and plain < 200 * 0.85


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 3)), min_size=1, max_size=12), st.integers(-5, 5))
def test_intervals_move_with_the_values(items, shift):
    values, clusters = map(np.array, zip(*items, strict=True))
    plain, moved = (clustered_bootstrap(v, clusters, n_resamples=50) for v in (values, values + shift))
    np.testing.assert_allclose(np.array(moved), np.array(plain) + shift, atol=1e-9)
    assert np.isnan(plain.low) == (len(set(clusters)) == 1)


def test_differences_are_taken_item_by_item():
    """Clusters as different as can be, and b one below a everywhere: the difference is certain where each mean is not."""
    a, clusters = np.repeat([0.0, 9.0, 3.0, 6.0], 2), np.repeat(np.arange(4), 2)
    assert clustered_difference(a, a - 1, clusters) == pytest.approx((1, 1, 1))
    assert clustered_bootstrap(a, clusters).high - clustered_bootstrap(a, clusters).low > 3


@pytest.mark.parametrize(("values", "clusters"), [([], []), ([1, 2], [1]), ([[1]], [[1]])])
def test_items_without_clusters_are_refused(values, clusters):
    with pytest.raises(InputError, match=r"both must be \[item\]"):
        clustered_bootstrap(values, clusters)


def test_differences_need_the_same_items():
    with pytest.raises(InputError, match=r"shapes \(2,\) and \(3,\)"):
        clustered_difference([1, 2], [1, 2, 3], [0, 1])


# --- positive control ---


def test_the_control_passes_where_the_found_heads_hurt():
    """At one head 19 of 20 against 20: nothing. At four, 1 against 19.5, counted as 19; Holm multiplies the second-smallest of three p by two."""
    result = positive_control(clear_knockout())
    assert result.passed and result.could_pass and result.at_ceiling
    assert (result.k, result.baseline, result.scored, result.random) == (4, 1, 0.05, 0.975)
    assert result.p == pytest.approx(2 * fisher_exact([[1, 19], [19, 1]], alternative="less").pvalue)
    assert (result.n_prompts, result.n_draws, result.n_sizes) == (20, 2, 3)
    assert result.sentence.startswith("The positive control passed") and "5% of 20 prompts right without the 4 best-scored" in result.sentence
    assert "\n" not in result.sentence


def test_the_control_fails_where_they_do_not():
    result = positive_control(unclear_knockout())
    assert not result.passed and result.could_pass and result.p > 0.05 and result.k == 12
    assert result.sentence.startswith("The positive control failed") and result.sentence.endswith("a harder probe might still show damage.")
    assert "harder" not in positive_control(knockout_frame({0: 19, 4: 18}, {4: [19, 19]})).sentence


def test_one_random_draw_that_hurts_as_much_spoils_the_control():
    frame = knockout_frame({0: 20, 4: 2}, {4: [20, 20, 20, 2]})
    result = positive_control(frame)
    assert result.p < 0.05 and not result.passed
    assert positive_control(knockout_frame({0: 20, 4: 2}, {4: [20, 20, 20, 3]})).passed


def test_a_probe_that_is_hardly_solved_cannot_tell():
    """Three of twenty right: their loss would have p = 0.12."""
    result = positive_control(knockout_frame({0: 3, 4: 0}, {4: [3, 3]}))
    assert not result.could_pass and not result.passed and not result.at_ceiling
    assert "cannot tell: the whole model answers 15% of 20 prompts" in result.sentence
    # Five have p = 0.024, which stands for one size and not for three.
    assert positive_control(knockout_frame({0: 5, 4: 0}, {4: [5, 5]})).passed
    assert not positive_control(knockout_frame({0: 5, 1: 0, 2: 0, 4: 0}, {1: [5], 2: [5], 4: [5]})).could_pass


def test_many_sizes_do_not_make_the_control_pass_by_chance():
    """Heads no better than random, eight sizes, 120 experiments: at most 5 % pass, within the binomial's 99.9 % range."""
    generator = np.random.default_rng(1)
    sizes, passed = range(1, 9), 0
    for _ in range(120):
        right = generator.binomial(30, 0.7, (3, 8))
        frame = knockout_frame({0: 21} | dict(zip(sizes, right[0].tolist(), strict=True)), dict(zip(sizes, right[1:].T.tolist(), strict=True)), n=30)
        passed += positive_control(frame).passed
    assert passed <= binom.ppf(0.999, 120, 0.05)


def test_a_frame_that_is_no_knockout_is_refused():
    with pytest.raises(InputError, match="lacks draw, n_prompts"):
        positive_control(clear_knockout().drop(columns=["draw", "n_prompts"]))
    for rows in ("k > 0", "order == 'scored'", "k == 0"):
        with pytest.raises(InputError, match="needs a row with k = 0"):
            positive_control(pd.DataFrame(clear_knockout().query(rows)))
