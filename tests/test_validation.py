from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydralens import validation
from hydralens.errors import InputError
from hydralens.models.lens import wrap_model
from hydralens.probes import niah
from hydralens.validation import knockout_curve, mask_preview, random_masks
from tests.patching.reference import record, sites
from tests.patching.test_activation import random_probe
from tests.planted import HEADS, LAYERS, RETRIEVER, planted_model
from tests.tiny import tiny_hf

N_PAIRS = 3
ROWS = ("clean", "corrupt", "attention_mask", "answer", "foil", "read_positions", "needle_span")
OTHERS = [(1, 0), (1, 1), (1, 3), (2, 0), (2, 1)]  # heads of the planted model that do nothing


@pytest.fixture(scope="module")
def model():
    return planted_model()


@pytest.fixture(scope="module")
def far(model):
    """A needle further from the question than a window of 64."""
    return niah(model, "niah_single_2", "value", N_PAIRS, 200, depth=0.1)


def last_logits(hf, probe, pair):
    """What transformers itself says at the first read position."""
    with torch.no_grad():
        return hf(input_ids=probe.clean[pair : pair + 1], attention_mask=probe.attention_mask[pair : pair + 1]).logits[0, probe.read_positions[pair, 0]]


def margin(logits, answer):
    return float(logits[answer] - logits[torch.arange(len(logits)) != answer].max())


def mask_of(*heads, shape=(LAYERS, HEADS)):
    mask = torch.zeros(shape, dtype=torch.bool)
    for head in heads:
        mask[head] = True
    return mask


def reach(probe):
    """The widest window of each pair's question that leaves the needle out."""
    return probe.read_positions[:, 0] + 1 - probe.needle_span[:, 1]


def is_wilson(row) -> bool:
    """The score interval as in the textbook."""
    z, n, p = 1.959963984540054, row.n_prompts, row.accuracy
    centre, half = (p + z * z / 2 / n) / (1 + z * z / n), z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    return np.allclose([row.ci_low, row.ci_high], [centre - half, centre + half], atol=1e-9)


# --- knock-out ---


def test_knocking_out_the_planted_head_ends_retrieval_and_others_do_not(model, far):
    curve = knockout_curve(model, [RETRIEVER, *OTHERS], [far], counts=(0, 1), n_draws=2).set_index(["order", "k", "draw"])
    assert list(curve.index) == [("scored", 0, 0), ("scored", 1, 0), ("random", 1, 0), ("random", 1, 1)]
    assert curve["accuracy"].tolist() == [1, 0, 1, 1]
    whole = np.mean([margin(last_logits(model.hf, far, pair), far.answer[pair, 0]) for pair in range(N_PAIRS)])
    assert curve.loc[("scored", 0, 0), "margin"] == pytest.approx(whole, abs=1e-4)
    assert (curve["n_prompts"] == N_PAIRS).all()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_knockout_equals_a_full_forward_with_hooks_per_set(family, monkeypatch):
    """Reference: z of every prompt recorded by hooks, its mean put in place of the chosen heads' z at every position."""
    hf, probes = tiny_hf(family, dtype=torch.float64), [random_probe(pad=(2, 1)), random_probe(n_pairs=1, n_pos=17, seed=5)]
    model, sets, measured = wrap_model(hf), [], validation.ablated_margins
    d_head = model.info.head_dim

    def recorded(model, removed, *args):
        sets.extend(own.nonzero().tolist() for own in removed)
        return measured(model, removed, *args)

    monkeypatch.setattr(validation, "ablated_margins", recorded)
    curve = knockout_curve(model, [(2, 1), (0, 3), (2, 0), (3, 2)], probes, counts=(1, 3), n_draws=2, seed=4)

    prompts = [
        (tokens[mask.bool()], int(mask[: read[0]].sum()), answer[0])
        for probe in probes
        for tokens, mask, read, answer in zip(probe.clean, probe.attention_mask, probe.read_positions, probe.answer, strict=True)
    ]
    everything = [record(hf, tokens, "z")[0] for tokens, _, _ in prompts]
    means = [torch.cat([z[layer] for z in everything]).mean(0) for layer in range(4)]
    for row, heads in zip(curve.itertuples(), sets, strict=True):
        margins = []
        for tokens, read, answer in prompts:
            handles = []
            for layer, head in heads:
                where = slice(head * d_head, (head + 1) * d_head)

                def replace(module, args, layer=layer, where=where):
                    z = args[0].clone()
                    z[..., where] = means[layer][where]
                    return (z,)

                handles.append(sites(hf, layer)[0].register_forward_pre_hook(replace))
            with torch.no_grad():
                margins.append(margin(hf(input_ids=tokens[None], use_cache=False).logits[0, read], answer))
            for handle in handles:
                handle.remove()
        assert row.margin == pytest.approx(np.mean(margins), abs=1e-5)
        assert row.accuracy == np.mean(np.array(margins) > 0) and is_wilson(row)
    assert sets[:2] == [[[2, 1]], [[0, 3], [2, 0], [2, 1]]]


@given(chosen=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=20), seed=st.integers(0, 9))
@settings(deadline=None)
def test_random_heads_are_others_of_the_same_layers(chosen, seed):
    model = SimpleNamespace(info=SimpleNamespace(n_layers=4, n_heads=5))
    draw = validation._others_of_same_layers(list(chosen), model, np.random.default_rng(seed))
    assert len(set(draw)) == len(draw) == min(len(chosen), 20 - len(chosen))
    assert not chosen & set(draw) and all(layer in range(4) and head in range(5) for layer, head in draw)
    for layer in range(4):  # a layer gives as many as it lost, or all that it has left
        taken = sum(layer == other for other, _ in chosen)
        assert sum(layer == other for other, _ in draw) >= min(taken, 5 - taken)
    if all(sum(layer == other for other, _ in chosen) <= 2 for layer in range(4)):
        assert sorted(layer for layer, _ in draw) == sorted(layer for layer, _ in chosen)
    assert draw == validation._others_of_same_layers(list(chosen), model, np.random.default_rng(seed))


def test_the_seed_decides_the_random_heads(model, far):
    """Knocking out L0H0 or L0H1 ends retrieval too, so that draws differ."""
    one = far.select([0])
    curves = [knockout_curve(model, [(0, 2), (2, 0)], [one], counts=(2,), n_draws=6, seed=seed) for seed in (0, 0, 1)]
    pd.testing.assert_frame_equal(curves[0], curves[1])
    assert curves[0]["margin"].tolist() != curves[2]["margin"].tolist()


# --- preview ---


def test_a_mask_keeps_retrieval_if_it_keeps_the_planted_head(model, far):
    masks = {"all": [mask_of().logical_not()], "planted": [mask_of(RETRIEVER)], "others": [mask_of(*OTHERS), mask_of()]}
    rows = mask_preview(model, masks, [far]).set_index(["mask", "draw"])
    assert list(rows.index) == [("all", 0), ("planted", 0), ("others", 0), ("others", 1)]
    assert rows["accuracy"].tolist() == [1, 1, 0, 0] and (rows["task"] == "niah_single_2").all()
    assert rows["margin"].iloc[1] == pytest.approx(rows["margin"].iloc[0], abs=1e-4)  # the other heads need no more than the window
    assert all(is_wilson(row) for row in rows.itertuples())


def test_a_wide_window_or_many_sinks_need_no_full_head(model, far):
    assert mask_preview(model, {"none": [mask_of()]}, [far], window=int(reach(far).min()))["accuracy"].item() == 0
    assert mask_preview(model, {"none": [mask_of()]}, [far], sinks=far.n_tokens)["accuracy"].item() == 1


def test_prompts_whose_needle_is_near_are_left_out(model):
    """Depths 0, 0.4 and 1 of 160 tokens."""
    probes = [niah(model, "niah_single_2", "value", 1, 160, seed, depth) for seed, depth in enumerate((0.0, 0.4, 1.0))]
    mixed = replace(probes[0], **{name: torch.cat([vars(probe)[name] for probe in probes]) for name in ROWS})
    front, middle, end = reach(mixed).tolist()
    assert end < 64 < middle < front
    for window, expected in ((64, 2), (middle, 2), (middle + 1, 1), (1, 3)):
        assert mask_preview(model, {"none": [mask_of()]}, [mixed], window=window)["n_prompts"].item() == expected
    with pytest.raises(InputError, match="niah_single_2: every needle ends within the window of 64 positions before the answer; use longer prompts .n_tokens."):
        mask_preview(model, {"none": [mask_of()]}, [probes[2]])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_all_heads_full_is_the_model_itself(family):
    hf, probe = tiny_hf(family), random_probe(n_pairs=3, pad=(0, 2))
    rows = mask_preview(wrap_model(hf), {"all": [torch.ones(4, 4, dtype=torch.bool)]}, [probe], window=2, sinks=1)
    margins = [margin(last_logits(hf, probe, pair), probe.answer[pair, 0]) for pair in range(3)]
    assert rows["margin"].item() == pytest.approx(np.mean(margins), abs=1e-4)


def test_intervals_of_none_and_of_all():
    """Wilson's bounds have a closed form there: z^2 / (n + z^2) away from the end."""
    away = 1.959963984540054**2 / (7 + 1.959963984540054**2)
    none, every = validation._summary(np.full(7, -1.0)), validation._summary(np.full(7, 1.0))
    assert (none["accuracy"], none["ci_low"], none["ci_high"]) == (0, 0, pytest.approx(away))
    assert (every["accuracy"], every["ci_low"], every["ci_high"]) == (1, pytest.approx(1 - away), 1)
    assert validation._summary(np.array([0.0, 1.0, -3.0]))["accuracy"] == pytest.approx(1 / 3)  # a draw is no answer


def test_random_masks_have_k_heads_each_and_follow_the_seed():
    masks = random_masks((5, 7), 9, 4, seed=2)
    assert [(tuple(mask.shape), int(mask.sum())) for mask in masks] == [((5, 7), 9)] * 4
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 4
    assert all(map(torch.equal, masks, random_masks((5, 7), 9, 4, seed=2)))
    assert not all(map(torch.equal, masks, random_masks((5, 7), 9, 4, seed=3)))
