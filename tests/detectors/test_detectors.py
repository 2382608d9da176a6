"""All detectors through their one interface."""

from dataclasses import replace

import pytest
import torch

from hydralens import detectors
from hydralens.errors import InputError, ProbeNotSolvedError
from hydralens.models.lens import wrap_model
from hydralens.probes import niah, solve
from hydralens.scores import HeadScores
from tests.detectors.reference import answered_probe, padded
from tests.patching.test_activation import random_probe
from tests.planted import RETRIEVER, planted_model
from tests.tiny import tiny_hf

SMALL = {"induction": {"n_sequences": 2, "n_tokens": 8}, "echo": {"n_sequences": 2, "n_tokens": 8}, "duo_attention": {"steps": 2}}


@pytest.fixture(scope="module")
def far():
    """Needles further from the question than a window of 64, with answers that the model gets right to the last digit."""
    probe = niah(planted_model(), "niah_single_2", "value", 4, 200, depth=0.1)
    return probe.select(solve(planted_model(), probe).correct_all)


@pytest.mark.parametrize("name", sorted(set(detectors.PER_PROBE) - {"ablation_drop"}))
def test_the_planted_head_comes_first(name, far):
    scores = getattr(detectors, name)(planted_model(), [far])
    assert scores.top(1) == [RETRIEVER]
    rest = scores.composite.clone()
    rest[RETRIEVER] = -torch.inf
    assert scores.composite[RETRIEVER] > 3 * rest.max() and scores.n_with_signal >= 1


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_ablating_any_head_that_retrieval_goes_through_costs_all_and_any_other_nothing(how, far):
    """L0H0 and L0H1 tell the planted head where to look.

    Without L0H1 it may also look after the same token elsewhere, but the last norm divides by less, which lifts every digit: hence no sign there.
    """
    scores = detectors.ablation_drop(planted_model(), [far], how=how)
    expected = torch.zeros(3, 4)
    expected[0, 0] = expected[0, 1] = expected[RETRIEVER] = 1
    torch.testing.assert_close(scores.composite, expected)
    finer = detectors.ablation_drop(planted_model(), [far], how=how, metric="log-probability").composite
    assert finer[0, 0] > 1 and finer[RETRIEVER] > 1 and finer[expected == 0].abs().max() < 1e-3 < finer[0, 1].abs()


def test_hand_worked_scores_of_the_planted_head(far):
    """It attends to the answer's digit alone, whose vector it writes into the prediction: attention 1, copied always, HeadKV 1 / |needle|."""
    model, head = planted_model(), RETRIEVER
    lengths = (far.needle_span[:, 1] - far.needle_span[:, 0]).float()
    assert detectors.copy_paste(model, [far]).composite[head] == 1
    assert float(detectors.headkv(model, [far]).composite[head]) == pytest.approx(float((1 / lengths).mean()), rel=0.05)
    assert float(detectors.attention_mass(model, [far]).composite[head]) == pytest.approx(1, abs=0.05)
    assert float(detectors.locos(model, [far]).composite[head]) == pytest.approx(6, rel=0.05)  # the unembedding is 6 times the digit's unit vector


@pytest.mark.parametrize("name", [*detectors.PER_PROBE, *detectors.WHOLE])
def test_one_interface(name, tmp_path):
    """Probes in, HeadScores out, which survive a round trip; what only some pairs answer is averaged over those."""
    hf = tiny_hf("qwen3")
    model = wrap_model(hf)
    probes = [answered_probe(hf, n_pairs=3), replace(answered_probe(hf, n_pairs=2, seed=1), corruption="key", capability="reasoning")]
    scores = getattr(detectors, name)(model, probes, **SMALL.get(name, {}))
    assert isinstance(scores, HeadScores) and scores.method == name and scores.composite.shape == (4, 8) and scores.composite.isfinite().all()
    if name in detectors.PER_PROBE:
        effects = [detectors.PER_PROBE[name](model, probe) for probe in probes]
        means = [effect.per_pair[effect.answered].mean(0) for effect in effects]
        assert [effect.n_pairs for effect in effects] == [2, 1] == [entry["n_pairs"] for entry in scores.probes]
        torch.testing.assert_close(scores.composite, torch.stack(means).mean(0))
        assert [list(scores.measured[c]) for c in ("retrieval", "reasoning")] == [["random/value"], ["random/key"]]
        assert all(effect.mode == name and effect.direction == "none" for effect in effects)
    scores.save(tmp_path)
    again = HeadScores.load(tmp_path)
    assert torch.equal(again.composite, scores.composite) and again.method == name


@pytest.mark.parametrize("name", [*detectors.PER_PROBE, "duo_attention"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_padding_never_changes_a_number(name, family):
    hf = tiny_hf(family)
    model, probe = wrap_model(hf), answered_probe(hf, n_pairs=2)
    plain, moved = (getattr(detectors, name)(model, [p], **SMALL.get(name, {})).composite for p in (probe, padded(probe)))
    torch.testing.assert_close(plain, moved, atol=1e-6, rtol=1e-6)


def test_the_answer_may_be_shorter_in_one_pair_than_in_another():
    """A pair padded with -100 scores as it does alone."""
    hf = tiny_hf("llama")
    model, probe = wrap_model(hf), answered_probe(hf, n_pairs=2, n_answer=3)
    for field in (probe.answer, probe.foil, probe.read_positions):
        field[0, 2] = -100
    alone = replace(
        probe.select([0]), clean=probe.clean[:1, :-1], corrupt=probe.corrupt[:1, :-1], attention_mask=probe.attention_mask[:1, :-1],
        answer=probe.answer[:1, :2], foil=probe.foil[:1, :2], read_positions=probe.read_positions[:1, :2],
    )  # fmt: skip
    for effects in detectors.PER_PROBE.values():
        torch.testing.assert_close(effects(model, probe).per_pair[0], effects(model, alone).per_pair[0], atol=1e-6, rtol=1e-6)


def test_wrong_probes_are_refused():
    hf = tiny_hf("llama")
    model, probe = wrap_model(hf), answered_probe(hf)
    with pytest.raises(InputError, match="no probes to score with"):
        detectors.copy_paste(model, [])
    with pytest.raises(InputError, match="2 probes are called random/value; give each probe its own name"):
        detectors.headkv(model, [probe, probe])
    with pytest.raises(ProbeNotSolvedError, match="locos: the model answers 0 of 2 pairs; use shorter prompts"):
        detectors.locos(model, [random_probe()])


def test_a_probe_without_answered_pairs_is_left_out():
    hf = tiny_hf("llama")
    model, probe = wrap_model(hf), answered_probe(hf)
    unsolved = replace(random_probe(), name="hopeless")
    scores = detectors.attention_mass(model, [probe, unsolved])
    assert [entry["name"] for entry in scores.probes] == ["random/value"]
    assert torch.equal(scores.composite, detectors.attention_mass(model, [probe]).composite)
