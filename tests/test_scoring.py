import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from hydralens import scoring
from hydralens.errors import InputError, ProbeNotSolvedError
from hydralens.head_mask import HeadMask
from hydralens.hybrid import build_hybrid
from hydralens.models.lens import wrap_model
from hydralens.probes import induction, niah
from hydralens.scores import HeadScores, capability_score, mean_score, paper_score
from hydralens.scoring import score_heads
from hydralens.statistics import split_half
from tests.patching.test_activation import random_probe
from tests.planted import HEADS, LAYERS, RETRIEVER, planted_model
from tests.test_effects import effects_of
from tests.tiny import tiny_hf
from tests.toy_masks import toy_scores

COLUMNS = ["capability", "probe", "layer", "head", "kv_head", "receiver_ie", "sender_ie", "receiver_ie_raw", "ci_low", "ci_high", "n_pairs", "score", "rank"]


def one(*values) -> "scoring.HeadEffects":
    """One layer's effects, from one pair."""
    return effects_of([[values]])


def equal(score, *expected):
    torch.testing.assert_close(score, torch.tensor([expected]))


# --- Eq. 11 and 12 by hand ---


def test_capability_is_the_clipped_mean_times_the_share_of_probes_passed():
    """Means of the clipped effects 0.4, 0.0125, 0.1, 0.5045; passed in 2, 1, 1, 1 of 2 probes."""
    receivers = {"a": one(0.5, 0.005, -0.3, 1.4), "b": one(0.3, 0.02, 0.2, 0.009)}
    equal(capability_score(receivers, {}), 0.4, 0.00625, 0.05, 0.25225)


def test_one_hundredth_passes_and_what_is_impossible_does_not():
    equal(capability_score({"a": one(0.01, 0.0099, torch.nan)}, {}), 0.01, 0.0, 0.0)


def test_a_head_is_scored_in_its_stronger_role():
    """H0 is the stronger sender (0.45) but in one probe of two, H1 the stronger receiver, H2 impossible as a sender."""
    receivers = {"a": one(0.5, 0.5, 0.2), "b": one(0.3, 0.5, 0.2)}
    senders = {"b": one(0.0, 0.4, torch.nan), "a": one(0.9, 0.4, torch.nan)}
    equal(capability_score(receivers, senders), 0.225, 0.5, 0.2)


def test_composite_is_the_mean_of_capabilities_scaled_to_their_range():
    """Retrieval 0, 0.2, 0.4 becomes 0, 0.5, 1; reasoning 0.1, 0.1, 0.3 becomes 0, 0, 1."""
    both = {"retrieval": {"a": one(0.0, 0.2, 0.4)}, "reasoning": {"b": one(0.1, 0.1, 0.3)}}
    equal(paper_score(both, {}), 0.0, 0.25, 1.0)
    equal(paper_score({"retrieval": both["retrieval"]}, {}), 0.0, 0.5, 1.0)


def test_a_capability_in_which_all_heads_are_equal_adds_nothing():
    equal(paper_score({"retrieval": {"a": one(0.0, 0.2, 0.4)}, "reasoning": {"b": one(0.3, 0.3, 0.3)}}, {}), 0.0, 0.25, 0.5)


def test_restriction_counts_no_pair_below_zero_and_no_pair_that_was_dropped():
    a = effects_of([[[0.4, -0.2]], [[0.2, 0.6]], [[9.0, 9.0]]], kept=[True, True, False])
    equal(mean_score({"retrieval": {"a": a}, "reasoning": {"b": one(0.1, -0.5)}}, drop_negative=True), 0.2, 0.15)


# --- ranks and columns ---


def test_equal_scores_are_ranked_by_layer_then_head():
    scores = toy_scores([[0, 0.5, 0], [0.5, 1, 0]])
    assert scores.top(6) == [(1, 1), (0, 1), (1, 0), (0, 0), (0, 2), (1, 2)]
    assert scores.top(2) == [(1, 1), (0, 1)] and scores.n_with_signal == 3
    assert scores.rank.tolist() == [[3, 1, 4], [2, 0, 5]]


def test_columns_as_maps():
    scores = toy_scores([[0, 0.5], [0.25, 1]], raw=[[-0.5, 0.5], [0.005, 1.5]])
    assert torch.equal(scores.map("score"), scores.composite)
    assert torch.equal(scores.map("rank"), scores.rank.float())
    torch.testing.assert_close(scores.map("niah/value"), torch.tensor([[-0.5, 0.5], [0.005, 1.5]]))
    torch.testing.assert_close(scores.map("retrieval"), torch.tensor([[0, 0.5], [0, 1]]))
    with pytest.raises(InputError, match="no column 'ioi'; there are score, rank, retrieval, niah/value"):
        scores.map("ioi")


# --- scoring a model that is known inside out ---


@pytest.fixture(scope="module")
def model():
    return planted_model()


@pytest.fixture(scope="module")
def probes(model):
    made = [niah(model, shape, corruption, 2, 160, depth=0.2) for shape in ("niah_single_2", "niah_multikey_1") for corruption in ("value", "swap")]
    return [*made, niah(model, "niah_multivalue", "value", 2, 160), induction(model, 2)]


@pytest.fixture(scope="module")
def scores(model, probes):
    return score_heads(model, probes, method="paper")


def no_patching(*args, **kwargs):
    raise AssertionError("patched again")


def test_the_planted_head_has_the_whole_score(scores):
    planted = torch.zeros(LAYERS, HEADS)
    planted[RETRIEVER] = 1
    torch.testing.assert_close(scores.composite, planted, atol=1e-4, rtol=0)
    assert scores.top(1) == [RETRIEVER]
    for effects in scores.receivers.values():
        for effect in effects.values():
            torch.testing.assert_close(effect.values, planted, atol=1e-5, rtol=0)


def test_restriction_finds_the_planted_head_too(model, probes):
    """The heads that look one and two tokens back lose nothing to a window."""
    scores = score_heads(model, probes, method="restriction")
    assert scores.top(1) == [RETRIEVER] and scores.method == "restriction"
    others = scores.composite.clone()
    others[RETRIEVER] = 0
    assert others.max() < 1e-3 < 0.5 < scores.composite[RETRIEVER]


def test_against_linear_heads_every_head_of_the_planted_circuit_counts(model, probes, tmp_path):
    """Linear heads that learned nothing look neither one nor two tokens back; no other head writes anything."""
    nothing = HeadMask.of(torch.zeros(LAYERS, HEADS, dtype=torch.bool), model.info, rule="no full head")
    linear = wrap_model(build_hybrid(model, nothing))
    scores = score_heads(model, probes[:2], method="restriction", linear=linear, shards=tmp_path)
    assert scores.method == "linear_restriction" and set(scores.top(3)) == {(0, 0), (0, 1), RETRIEVER}
    assert scores.composite.flatten().sort(descending=True).values[3] < 1e-3
    scores.save(tmp_path / "scores")
    assert HeadScores.load(tmp_path / "scores").method == "linear_restriction"
    with pytest.raises(InputError, match="linear is for method 'restriction'"):
        score_heads(model, probes, method="paper", linear=linear)


def test_probes_that_are_not_solved_are_listed_and_left_out(scores):
    solved = {(entry["probe"], entry["corruption"]): (entry["n_solved"], entry["used"]) for entry in scores.solved}
    assert solved.pop(("niah_multivalue", "value")) == (0, False)
    assert set(solved.values()) == {(2, True)}
    assert list(scores.receivers) == ["retrieval", "reasoning"]
    assert [about["name"] for about in scores.probes] == [label for effects in scores.receivers.values() for label in effects]
    assert "niah_multivalue/value" not in scores.receivers["retrieval"]


def test_a_model_that_solves_nothing_is_refused_with_the_counts(model, probes):
    with pytest.raises(ProbeNotSolvedError, match="the model does not solve this probe: 0 of 2 pairs of niah_multivalue/value; use shorter prompts"):
        score_heads(model, [probes[4]])
    with pytest.raises(ProbeNotSolvedError, match="0 of 2 pairs of random/value"):
        score_heads(wrap_model(tiny_hf("llama")), [random_probe()])


def test_required_says_which_capabilities_must_be_solved(model, probes):
    unsolved, solved = probes[4], probes[5]
    with pytest.raises(ProbeNotSolvedError, match="niah_multivalue"):
        score_heads(model, [unsolved, solved])
    assert list(score_heads(model, [unsolved, solved], required=("reasoning",)).receivers) == ["reasoning"]


def test_a_required_capability_that_was_not_asked_is_refused(model, probes):
    with pytest.raises(InputError, match="reasoning"):
        score_heads(model, probes[:1], required=("reasoning",))


def test_pairs_under_the_floor_do_not_count(model, probes):
    effect = score_heads(model, probes[:1]).receivers["retrieval"]["niah_single_2/value"]
    low, high = sorted((effect.clean_metric - effect.corrupt_metric).tolist())
    between = score_heads(model, probes[:1], method="paper", floor=(low + high) / 2)
    assert between.solved[0]["n_solved"] == 1 and between.probes[0]["n_pairs"] == 1
    with pytest.raises(ProbeNotSolvedError, match="0 of 2 pairs"):
        score_heads(model, probes[:1], floor=high + 1)


def test_senders_act_through_the_receivers_and_join_the_composite(model, probes, scores):
    """Through q nothing is sent in the planted model: what is asked is asked alike by the clean and the corrupt prompt."""
    assert {c: list(m) for c, m in scores.senders.items()} == {c: list(m) for c, m in scores.receivers.items()}
    for effects in scores.senders.values():
        for effect in effects.values():
            assert effect.through == "q of L1H2" and effect.per_pair[:, 1:].isnan().all() and effect.values[0].abs().max() < 1e-3
    table = scores.to_frame().query("capability != 'composite'")
    assert (table["sender_ie"].notna() == (table["layer"] == 0)).all()
    assert score_heads(model, probes[:1], method="paper", senders=False).senders == {} == score_heads(model, probes[:1]).senders
    assert list(score_heads(model, probes[:1], senders=True).senders) == ["retrieval"]


@pytest.mark.parametrize("method", ["attention_mass", "copy_paste", "ablation_drop", "duo_attention", "induction"])
def test_detectors_score_beside_the_direct_effects(model, probes, method):
    scores = score_heads(model, probes[:2], method=method)
    assert scores.method == method and list(scores.receivers["retrieval"]) == ["niah_single_2/value", "niah_single_2/swap"]
    torch.testing.assert_close(mean_score(scores.measured), scores.composite)
    if method != "induction":
        assert RETRIEVER in scores.top(3) and scores.probes[0]["name"] == "niah_single_2/swap"


def test_wrong_arguments_are_refused(model, probes):
    with pytest.raises(InputError, match="no probes"):
        score_heads(model, [])
    with pytest.raises(InputError, match="2 probes are called niah_single_2/value"):
        score_heads(model, [probes[0], probes[0]])
    with pytest.raises(InputError, match="method 'magic' is not one of restriction, paper, direct, copy_paste"):
        score_heads(model, probes, method="magic")


# --- shards ---


def test_shards_spare_the_work_and_change_nothing(model, probes, scores, tmp_path, monkeypatch):
    first = score_heads(model, probes, method="paper", shards=tmp_path)
    receivers, senders = sum(probe.n_pairs for probe in probes), sum(min(3, probe["n_pairs"]) for probe in scores.probes)
    assert len(list(tmp_path.iterdir())) == receivers + senders  # receivers of all, senders of three pairs of those that are used
    for name in ("activation_patch", "path_patch"):
        monkeypatch.setattr(scoring, name, no_patching)
    second = score_heads(model, probes, method="paper", shards=tmp_path)
    for again in (first, second):
        pd.testing.assert_frame_equal(again.to_frame(), scores.to_frame(), check_exact=True)
        assert again.solved == scores.solved and again.probes == scores.probes


def test_a_killed_run_goes_on_where_it_stopped(model, probes, scores, tmp_path, monkeypatch):
    patch, done = scoring.activation_patch, []

    def killed(model, probe, **kwargs):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(probe.name)
        return patch(model, probe, **kwargs)

    monkeypatch.setattr(scoring, "activation_patch", killed)
    with pytest.raises(KeyboardInterrupt):
        score_heads(model, probes, method="paper", shards=tmp_path)
    shards = list(tmp_path.iterdir())
    assert len(shards) == 2 and all(shard.suffix == ".safetensors" and not shard.name.startswith(".") for shard in shards)
    done[:] = [None] * 3  # the third call passes now
    resumed = score_heads(model, probes, method="paper", shards=tmp_path)
    assert len(done) == 3 + sum(probe.n_pairs for probe in probes) - 2
    pd.testing.assert_frame_equal(resumed.to_frame(), scores.to_frame(), check_exact=True)


def test_shards_of_other_prompts_or_settings_are_not_taken(model, probes, tmp_path):
    score_heads(model, probes[:1], method="paper", senders=False, shards=tmp_path)
    score_heads(model, probes[:1], method="paper", senders=False, shards=tmp_path, floor=0.25)
    score_heads(model, [niah(model, "niah_single_2", "value", 2, 160, depth=0.2, seed=1)], method="paper", senders=False, shards=tmp_path)
    score_heads(wrap_model(model.hf.double(), model.tokenizer), probes[:1], method="paper", senders=False, shards=tmp_path)
    model.hf.float()
    assert len(list(tmp_path.iterdir())) == 3 * probes[0].n_pairs + 2


@pytest.mark.parametrize("keep", [0, 0.5])
def test_a_damaged_shard_is_measured_again(model, probes, tmp_path, keep):
    expected = score_heads(model, probes[:1], method="paper", senders=False, shards=tmp_path)
    shard = sorted(tmp_path.iterdir())[1]
    shard.write_bytes(shard.read_bytes()[: int(keep * shard.stat().st_size)])
    assert torch.equal(score_heads(model, probes[:1], method="paper", senders=False, shards=tmp_path).composite, expected.composite)


# --- files ---


@pytest.fixture
def saved(scores, tmp_path) -> Path:
    scores.save(tmp_path)
    return tmp_path


def test_what_is_saved_is_loaded(scores, saved):
    assert {path.name for path in saved.iterdir()} == {"head_scores.csv", "scores.json", "effects.safetensors"}
    again = HeadScores.load(saved)
    pd.testing.assert_frame_equal(again.to_frame(), scores.to_frame(), check_exact=True)
    assert (again.model, again.probes, again.solved, again.method) == (scores.model, scores.probes, scores.solved, scores.method)
    assert split_half(again, 2) == split_half(scores, 2)
    again.save(saved / "again")
    for name in ("head_scores.csv", "scores.json"):
        assert (saved / name).read_bytes() == (saved / "again" / name).read_bytes()


def test_restriction_scores_are_saved_with_what_made_them(model, probes, tmp_path):
    scores = score_heads(model, probes[:2], method="restriction")
    scores.save(tmp_path)
    again = HeadScores.load(tmp_path)
    assert again.method == "restriction" and torch.equal(mean_score(again.measured, drop_negative=True), scores.composite)
    pd.testing.assert_frame_equal(again.to_frame(), scores.to_frame(), check_exact=True)


def test_csv_has_the_columns_and_rows_that_were_promised(scores, saved):
    table = pd.read_csv(saved / "head_scores.csv")
    assert [column for column in table.columns if column in COLUMNS] == COLUMNS
    n_heads = LAYERS * HEADS
    per_probe, composite = table[table["capability"] != "composite"], table[table["capability"] == "composite"]
    assert len(per_probe) == 5 * n_heads and len(composite) == n_heads
    assert (table["kv_head"] == table["head"] // 2).all()

    assert composite[["score", "rank"]].notna().all(axis=None) and composite["receiver_ie"].isna().all()
    assert sorted(composite["rank"]) == list(range(n_heads))
    assert composite.loc[composite["rank"] == 0, ["layer", "head"]].values.tolist() == [list(RETRIEVER)]

    assert per_probe[["score", "rank"]].isna().all(axis=None) and (per_probe["sender_ie"].isna() == (per_probe["layer"] > 0)).all()
    assert per_probe["receiver_ie"].between(0, 1).all() and (per_probe["n_pairs"] == 2).all()
    assert (per_probe["ci_low"] <= per_probe["receiver_ie_raw"] + 1e-5).all() and (per_probe["receiver_ie_raw"] <= per_probe["ci_high"] + 1e-5).all()
    (value,) = per_probe.query("probe == 'niah_single_2/value' and layer == 1 and head == 2")["receiver_ie_raw"]
    assert value == pytest.approx(float(scores.receivers["retrieval"]["niah_single_2/value"].values[RETRIEVER]), rel=1e-5)


def test_a_folder_without_scores_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere holds no head scores .scores.json is missing.; make them with: hydralens score MODEL --out"):
        HeadScores.load(tmp_path / "nowhere")


def test_scores_without_their_effects_are_refused(saved):
    (saved / "effects.safetensors").unlink()
    with pytest.raises(InputError, match="effects.safetensors is missing"):
        HeadScores.load(saved)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without(path, *keys):
    about = json.loads(path.read_text())
    inner = about
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    path.write_text(json.dumps(about))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: cut(folder / "effects.safetensors"),
        lambda folder: (folder / "effects.safetensors").write_bytes(b""),
        lambda folder: cut(folder / "scores.json"),
        lambda folder: (folder / "scores.json").write_text("[]"),
        lambda folder: (folder / "scores.json").write_bytes(b"\xff\xfe"),
        lambda folder: without(folder / "scores.json", "model", "fingerprint"),
        lambda folder: without(folder / "scores.json", "method"),
        lambda folder: without(folder / "scores.json", "effects", 0, "effect", "component"),
    ],
)
def test_damaged_scores_are_refused(saved, damage):
    damage(saved)
    with pytest.raises(InputError, match="the head scores in .* are damaged .*; make them with: hydralens score"):
        HeadScores.load(saved)
