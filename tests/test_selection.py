from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.selection import RULES, TIE_BREAK, heads_for_ratio, select_heads, selection_report
from tests.toy_masks import PROBE, toy_info, toy_scores

quick = settings(deadline=None, max_examples=60)


def chosen(mask) -> list[tuple[int, int]]:
    return [tuple(cell) for cell in mask.array.nonzero().tolist()]


@st.composite
def toys(draw, kv=False):
    """Few layers, few heads, scores 0 to 3 so that ties abound, and a budget; with ``kv``, two heads to a KV head."""
    n_layers, n_heads = draw(st.integers(1, 4)), draw(st.sampled_from([2, 4] if kv else [1, 2, 3]))

    def grid(cell):
        return st.lists(st.lists(cell, min_size=n_heads, max_size=n_heads), min_size=n_layers, max_size=n_layers)

    raw = draw(grid(st.integers(-2, 2)))
    return toy_scores(draw(grid(st.integers(0, 3))), raw, n_heads // 2 if kv else 1), draw(st.integers(1, n_layers * n_heads))


def stated_order(scores) -> list[tuple[int, int]]:
    """The tie-break as it is written down: score, mean raw effect, lower layer, lower head."""
    raw = scores.receivers["retrieval"]["niah/value"].values
    cells = product(range(scores.model.n_layers), range(scores.model.n_heads))
    return sorted(cells, key=lambda at: (-float(scores.composite[at]), -float(raw[at]), *at))


def value(scores, cells) -> tuple[float, int]:
    """Summed score, then summed rank: what every exact rule maximises."""
    order = stated_order(scores)
    return sum(float(scores.composite[at]) for at in cells), -sum(order.index(tuple(at)) for at in cells)


# --- how many ---


@pytest.mark.parametrize(
    ("ratio", "total", "k"),
    [
        ("7:1", 30 * 9, 34),  # SmolLM2: 33.75
        ("3:1", 28 * 16, 112),  # Qwen3-1.7B, as in the paper
        ("7:1", 28 * 16, 56),
        ("3:1", 10, 3),  # 2.5: halves up, not to even
        ("3:1", 6, 2),  # 1.5
        ("2.5:1", 7, 2),
        ("0.5:1", 9, 6),
        ("0.1:1", 11, 10),  # exact: 11 / 1.1 is 10 and not 9.99
        ("19:1", 10, 1),  # 0.5
    ],
)
def test_ratio_gives_k_halves_up(ratio, total, k):
    assert heads_for_ratio(ratio, total) == k


def test_ratio_that_leaves_no_head_is_refused():
    with pytest.raises(InputError, match="ratio '20:1' leaves 0 of 10 heads; the highest ratio that leaves one is 19:1"):
        heads_for_ratio("20:1", 10)


@pytest.mark.parametrize("rule", RULES)
def test_smollm2_shape_at_seven_to_one(rule):
    scores = toy_scores(np.random.default_rng(0).random((30, 9)), n_kv_heads=3)
    mask = select_heads(scores, "7:1", rule=rule)
    assert mask.n_full == {"layers-top": 36, "layers-even": 36, "kv-group": 33}.get(rule, 34)
    assert mask.ratio == "7:1" and mask.selection.rule.startswith(rule) and mask.selection.k == mask.n_full
    assert mask.probes[0].model_dump() == PROBE


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"ratio": "0:1"}, "ratio '0:1' is not of the form r:1 "),
        ({"ratio": "1:0"}, "ratio '1:0' is not of the form r:1 "),
        ({"ratio": "abc"}, "ratio 'abc' is not of the form r:1 "),
        ({"ratio": "7"}, "ratio '7' is not of the form r:1 "),
        ({"ratio": "7:1", "k": 3}, "ratio '7:1' and k=3 are two budgets; "),
        ({"k": 7}, "k is 7, but the model has 2 layers x 3 heads; "),
        ({"k": 0}, "k is 0, "),
        ({"k": 2.0}, "k is 2.0, "),
        ({"k": True}, "k is True, "),
        ({"rule": "best"}, "rule 'best' is unknown; choose one of global, "),
        ({"k": 1, "rule": "global-constrained"}, "at most 0 of 2 layers in a row without a full head takes 2 heads, k is 1; "),
        ({"k": 1, "rule": "random-constrained"}, "at most 0 of 2 layers in a row without a full head takes 2 heads, k is 1; "),
        ({"k": 1, "rule": "global-spread", "max_gap": -1}, "max_gap is -1; "),
        ({"k": 1, "rule": "layers-top"}, "rule layers-top: k=1 is 0 whole layers of 3 heads, there are 2; "),
        ({"k": 1, "rule": "kv-group"}, "rule kv-group: k=1 is 0 KV groups of 3 heads, 2 were measured; "),
    ],
)
def test_impossible_budgets_are_refused(arguments, line):
    with pytest.raises(InputError) as error:
        select_heads(toy_scores([[1, 2, 3], [4, 5, 6]]), **arguments)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


# --- hand-worked toys ---

SCORES = [[0.9, 0.8, 0.7, 0.0], [0.0, 0.1, 0.0, 0.0], [0.0, 0.0, 0.3, 0.2], [0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("rule", "k", "cells"),
    [
        ("global", 4, [(0, 0), (0, 1), (0, 2), (2, 2)]),
        ("global-constrained", 5, [(0, 0), (0, 1), (1, 1), (2, 2), (3, 0)]),
        ("global-spread", 3, [(0, 0), (0, 1), (2, 2)]),  # max_gap=2: the three best leave layers 1 to 3 bare, the cheapest repair is L2H2 for L0H2
        ("per-layer", 6, [(0, 0), (0, 1), (1, 1), (2, 2), (2, 3), (3, 0)]),  # one a layer, then the best seconds: 0.8 and 0.2
        ("fixed", 6, [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]),  # head 0 everywhere, head 1 in layers 1 and 3
        ("layers-top", 8, [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 1), (2, 2), (2, 3)]),
        ("layers-top", 5, [(0, 0), (0, 1), (0, 2), (0, 3)]),
        ("layers-top", 6, [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 1), (2, 2), (2, 3)]),  # one and a half layers are two
        ("layers-even", 8, [(1, 0), (1, 1), (1, 2), (1, 3), (3, 0), (3, 1), (3, 2), (3, 3)]),
        ("kv-group", 4, [(0, 0), (0, 1), (0, 2), (0, 3)]),  # groups: 1.7, 0.7, 0.1, 0, 0, 0.5, 0, 0
        ("kv-group", 6, [(0, 0), (0, 1), (0, 2), (0, 3), (2, 2), (2, 3)]),
    ],
)
def test_rule_chooses(rule, k, cells):
    assert chosen(select_heads(toy_scores(SCORES, n_kv_heads=2), k=k, rule=rule, max_gap=2)) == cells


def test_kv_group_budget_is_in_kv_heads():
    mask = select_heads(toy_scores(SCORES, n_kv_heads=2), "3:1", rule="kv-group")  # 8 KV heads / 4 = 2
    assert mask.selection.rule == "kv-group(2 KV heads)" and int(mask.kept_kv_heads.sum()) == 2 and mask.kv_share == 0.25
    assert select_heads(toy_scores(SCORES, n_kv_heads=2), "3:1").kv_share == 0.375  # the global rule's 4 heads touch 3 KV heads


def test_ties_fall_to_raw_effect_then_layer_then_head():
    scores = toy_scores([[0, 0, 0], [0, 0, 1], [0, 0, 0]], [[0.0, 0.2, -0.1], [0.0, 0.2, -5.0], [0.3, 0.0, 0.0]])
    order = [(1, 2), (2, 0), (0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (2, 2), (0, 2)]
    for k in range(1, 10):
        mask = select_heads(scores, k=k)
        assert chosen(mask) == sorted(order[:k])
        assert mask.selection.n_with_signal == 1 and mask.selection.tie_break == TIE_BREAK


def test_ties_without_effects_fall_to_layer_and_head():
    assert chosen(select_heads(toy_scores([[0, 0], [0, 1]]), k=3)) == [(0, 0), (0, 1), (1, 1)]


def test_signal_is_counted_among_the_chosen():
    scores = toy_scores(SCORES)
    assert [select_heads(scores, k=k).selection.n_with_signal for k in (3, 6, 9, 16)] == [3, 6, 6, 6]
    assert select_heads(scores, k=4, rule="fixed").selection.n_with_signal == 1  # L0H0; the other first heads have none


def test_unmeasured_heads_are_never_chosen():
    nan = float("nan")
    scores = toy_scores([[nan, 0.0, -1.0, nan], [nan, nan, nan, nan], [0.5, 0.0, 0.0, 0.0]])
    for rule in RULES:
        for k in (1, 2, 3, 4, 5, 6):
            if rule == "kv-group" or rule.startswith("layers") or (k == 1 and "constrained" in rule):
                continue
            mask = select_heads(scores, k=k, rule=rule)
            assert mask.n_full == k and not bool((mask.array & scores.composite.isnan()).any()), rule
            assert mask.scores is None
    assert chosen(select_heads(scores, k=2, rule="global-constrained")) == [(0, 1), (2, 0)]  # layer 1 has nothing to keep
    assert chosen(select_heads(scores, k=4, rule="layers-top")) == chosen(select_heads(scores, k=4, rule="kv-group")) == [(2, 0), (2, 1), (2, 2), (2, 3)]
    with pytest.raises(InputError, match=r"k is 7, but only 6 of 12 heads were measured"):
        select_heads(scores, k=7)
    with pytest.raises(InputError, match="k=6 is 2 whole layers of 4 heads, there are 1"):
        select_heads(scores, k=6, rule="layers-even")
    with pytest.raises(InputError, match="infinite"):
        select_heads(toy_scores([[float("inf"), 0.0]]), k=1)


def test_report_says_what_a_rule_cost():
    scores = toy_scores(SCORES, n_kv_heads=2)
    report = selection_report(scores, select_heads(scores, k=5, rule="global-constrained"))
    kept, ceiling = 0.9 + 0.8 + 0.1 + 0.3, 0.9 + 0.8 + 0.7 + 0.3 + 0.2
    assert report == {
        "rule": "global-constrained",
        "n_full": 5,
        "head_share": 5 / 16,
        "n_with_signal": 4,
        "score_kept": pytest.approx(kept),
        "score_global": pytest.approx(ceiling),
        "cost": pytest.approx(1 - kept / ceiling),
        "n_forced": 2,
        "layers_without_full": 0,
        "kv_heads_kept": 4,
        "kv_share": 0.5,
    }
    assert selection_report(scores, select_heads(scores, k=5))["cost"] == 0
    with pytest.raises(InputError, match="model.n_layers is 16, but the model has 4"):
        selection_report(scores, select_heads(toy_scores(np.zeros((16, 4))), k=5))


# --- properties ---


@quick
@given(toy=toys())
def test_global_is_the_stated_order(toy):
    scores, k = toy
    assert chosen(select_heads(scores, k=k)) == sorted(stated_order(scores)[:k])


@quick
@given(toy=toys(), max_gap=st.integers(0, 3))
def test_spread_is_the_best_of_all_choices(toy, max_gap):
    scores, k = toy
    n_layers = scores.model.n_layers
    assume(k >= n_layers // (max_gap + 1))

    def longest_gap(cells) -> int:
        marks = "".join("1" if any(layer == at[0] for at in cells) else "0" for layer in range(n_layers))
        return max(map(len, marks.split("1")))

    allowed = [cells for cells in combinations(stated_order(scores), k) if longest_gap(cells) <= max_gap]
    mask = select_heads(scores, k=k, rule="global-spread", max_gap=max_gap)
    assert longest_gap(chosen(mask)) <= max_gap
    assert value(scores, chosen(mask)) == max(value(scores, cells) for cells in allowed)
    if max_gap == 0:
        assert select_heads(scores, k=k, rule="global-constrained").mask == mask.mask


def test_spread_with_room_is_global():
    scores = toy_scores(np.random.default_rng(1).random((12, 6)))
    assert select_heads(scores, k=9, rule="global-spread", max_gap=12).mask == select_heads(scores, k=9).mask


@quick
@given(toy=toys(kv=True))
def test_kv_group_keeps_the_most_score_of_its_cache(toy):
    scores, k = toy
    info = scores.model
    mask = select_heads(scores, k=k, rule="kv-group")
    budget = int(mask.kept_kv_heads.sum())
    assert budget == (k + 1) // 2 and mask.n_full == 2 * budget
    ceiling = max(
        sum(float(scores.composite[layer, 2 * kv : 2 * kv + 2].sum()) for layer, kv in groups)
        for groups in combinations(product(range(info.n_layers), range(info.n_kv_heads)), budget)
    )
    assert float(scores.composite[mask.array].sum()) == ceiling


@quick
@given(toy=toys())
def test_layer_rules_share_the_heads_evenly(toy):
    scores, k = toy
    n_layers = scores.model.n_layers
    for rule in ("per-layer", "layer-random", "fixed"):
        mask = select_heads(scores, k=k, rule=rule)
        counts = mask.array.sum(1)
        assert int(counts.sum()) == k and set(counts.tolist()) <= {k // n_layers, -(-k // n_layers)}
    for layer, row in enumerate(select_heads(scores, k=k, rule="per-layer").array):
        ranked = [at for at in stated_order(scores) if at[0] == layer]
        assert sorted(ranked[: int(row.sum())]) == [(layer, head) for head in row.nonzero().flatten().tolist()]


@quick
@given(toy=toys(), seed=st.integers(0, 99))
def test_random_rules_are_seeded_and_recorded(toy, seed):
    scores, k = toy
    for rule in ("layer-random", "global-random", "random-constrained"):
        if rule == "random-constrained" and k < scores.model.n_layers:
            continue
        mask = select_heads(scores, k=k, rule=rule, seed=seed)
        assert mask.mask == select_heads(scores, k=k, rule=rule, seed=seed).mask
        assert mask.n_full == k and mask.selection.rule == f"{rule}(seed={seed})" and f"default_rng({seed})" in mask.selection.tie_break
        assert rule != "random-constrained" or bool(mask.array.any(1).all())


def test_random_rules_reach_every_head():
    scores = toy_scores(SCORES)
    for rule in ("layer-random", "global-random", "random-constrained"):
        often = sum(select_heads(scores, k=8, rule=rule, seed=seed).array.double() for seed in range(200)) / 200
        assert bool(((often > 0.35) & (often < 0.65)).all()), rule  # half of the heads, each about half of the time


def test_equal_scores_give_equal_files(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    for rule in RULES:
        first, second = (select_heads(toy_scores(SCORES, SCORES, 2), k=8, rule=rule).to_text() for _ in range(2))
        assert first == second


def test_default_is_seven_to_one():
    scores = toy_scores(torch.rand(4, 8).tolist())
    assert select_heads(scores).ratio == "7:1" and select_heads(scores).n_full == 4
    assert select_heads(scores, k=4).ratio is None and select_heads(scores).model == toy_info(4, 8)


def test_a_negative_seed_is_refused():
    with pytest.raises(InputError, match="seed is -1; give a whole number from 0 on"):
        select_heads(toy_scores([[1.0, 2.0]]), k=1, rule="global-random", seed=-1)
