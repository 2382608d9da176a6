"""The analyses end to end on the planted model, whose one retrieving head makes their numbers computable by hand."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "analyses"
sys.path.append(str(FOLDER))  # as for a script: its folder is where ``shared`` is found

import shared  # noqa: E402

from analyses import block_vs_head_similarity, head_importance, knockout_curve, kv_budget, selection_rules, stability, transfer_miniature  # noqa: E402
from hydralens.comparison import compare  # noqa: E402
from hydralens.errors import InputError  # noqa: E402
from hydralens.figures import saving  # noqa: E402
from hydralens.models.loading import load_model  # noqa: E402
from hydralens.profiles import HeadProfile  # noqa: E402
from hydralens.scores import HeadScores  # noqa: E402
from hydralens.selection import RULES, select_heads  # noqa: E402
from tests.figures import examples  # noqa: E402
from tests.planted import HEADS, KV_HEADS, LAYERS, RETRIEVER, save_planted  # noqa: E402

TOKENS, PAIRS = 160, 4


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return save_planted(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def folder(planted, tmp_path_factory):
    """Where results go; it holds the scores that the analyses share, of two of the five sub-probes."""
    folder = tmp_path_factory.mktemp("analyses")
    arguments = [str(planted), "--out", str(folder), "--tokens", str(TOKENS), "--pairs", str(PAIRS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "SUB_PROBES", shared.TASKS)
        shared.head_scores(load_model(planted), shared.arguments_with_scores("").parse_args(arguments))
    return folder


@pytest.fixture(autouse=True)
def no_images(monkeypatch):
    monkeypatch.setattr(saving, "BROWSERS", ())


def run(analysis, planted, folder, *arguments) -> tuple[pd.DataFrame, str]:
    """The CSV and the markdown that a script wrote."""
    name = analysis.__name__.split(".")[-1]
    analysis.main([str(planted), "--out", str(folder), "--tokens", str(TOKENS), *arguments])
    assert (folder / f"{name}.md").read_text().splitlines()[2].startswith("`python ")
    return pd.read_csv(folder / f"{name}.csv"), (folder / f"{name}.md").read_text()


def test_layers_and_heads_are_compared_on_every_probe(planted, folder, monkeypatch):
    kept = []
    monkeypatch.setattr(block_vs_head_similarity, "compare", lambda *args, **kwargs: kept.append(compare(*args, **kwargs)) or kept[0])
    frame, text = run(block_vs_head_similarity, planted, folder, "--prompts", "1")
    assert list(frame["kind"]) == list(kept[0].blocks["kind"]) and len(frame) == 12
    np.testing.assert_allclose(frame["explained"], kept[0].blocks["explained"], atol=1e-3)
    assert kept[0].structure.finding in text and "14 prompts" in text  # eight retrieval shapes and six reasoning probes
    assert f"cosine of outputs: {'blocks' if kept[0].structure.layers.is_real else 'none'}" in text
    assert (folder / "figures" / "block_vs_head_similarity.html").exists()


def test_similarity_by_distance():
    near, far = block_vs_head_similarity.by_distance(examples.layers().matrix)
    assert near == pytest.approx(0.9)
    assert far == pytest.approx((4 * 0.5 + 2 * 0.1) / 6)  # of four layers, four cells lie two apart and two three apart


def test_one_head_of_the_planted_model_is_critical(planted, folder):
    frame, text = run(head_importance, planted, folder)
    own = frame[frame["importance"] == "restriction score"].set_index("layer")
    layer = own.loc[RETRIEVER[0]]
    assert layer["gini"] == pytest.approx((HEADS - 1) / HEADS) and layer["n_critical"] == 1 and layer["n_replaceable"] == HEADS - 1
    assert list(own["mixed"]) == [index == RETRIEVER[0] for index in range(LAYERS)]
    assert "1 of 12 (8.3%) | 1 of 12 (8.3%) | 29 of 448" in text and "11 of 12 (91.7%), below 0.005" in text
    assert "| 0.002 | 11 of 12 (91.7%) | 1 | 11 of 12 (91.7%) | 1 |" in text
    assert (folder / "figures" / "head_importance.html").exists()


def test_importance_is_summed_up_as_in_the_paper():
    profile = HeadProfile(torch.tensor([[0.4, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1], [0.007, 0.0, 0.0, -0.2]]))
    assert head_importance.summary(profile) == ["0.000 - 0.750", "0.500", "5 of 12 (41.7%)", "6 of 12 (50.0%), below 0.005", "1 of 3"]


def test_without_the_retriever_nothing_is_retrieved(planted, folder):
    frame, text = run(knockout_curve, planted, folder, "--prompts", "4", "--draws", "2")
    assert list(frame.loc[frame["order"] == "scored", "ranking"].unique()) == ["restriction", "paper"]
    at = frame[frame["k"] == 1].groupby(["ranking", "order"])["accuracy"].unique()
    for ranking in ("restriction", "paper"):
        assert list(at[ranking, "scored"]) == [0] and list(at[ranking, "random"]) == [1]  # the other heads of its layer do nothing
        assert f"By {ranking}. The positive control passed" in text
    assert set(frame["n_prompts"]) == {8} and "| paper | 1 (8.3%) | 0.00 [0.00 0.32] |" in text
    assert {"knockout_paper.html", "knockout_restriction.html"} <= {path.name for path in (folder / "figures").iterdir()}


def test_counts_are_shares_of_all_heads():
    assert knockout_curve.counts_of(448) == [0, 1, 4, 13, 56] and knockout_curve.counts_of(12) == [0, 1, 2]


def test_a_rule_keeps_retrieval_when_it_keeps_the_retriever(planted, folder):
    frame, text = run(selection_rules, planted, folder, "--prompts", "4", "--draws", "3", "--ratios", "3:1", "2:1")
    scores = HeadScores.load(folder / "head_scores")
    by = frame.fillna({"ratio": ""}).set_index(["ratio", "rule", "task"])
    assert len(by) == 2 * (2 * len(RULES) + 2)
    for ratio in ("3:1", "2:1"):
        for rule in RULES:
            masks = [select_heads(scores, ratio, rule=rule, seed=draw).array for draw in range(3 if "random" in rule else 1)]
            keeps = [bool(mask[RETRIEVER]) for mask in masks]
            for task in shared.TASKS:
                row = by.loc[ratio, rule, task]
                assert row["accuracy"] == pytest.approx(np.mean(keeps), abs=1e-3)
                assert (row["accuracy_worst_draw"], row["accuracy_best_draw"]) == (min(keeps), max(keeps))
                assert row["score_kept"] == pytest.approx(np.mean(keeps) * float(scores.composite[RETRIEVER]), rel=1e-3)
                assert (row["global_minus_this_margin"] > 1) == (np.mean(keeps) < 1)
    assert "| fixed | 0.00 [0.00 0.00]" in text and "59.40" in text and "All heads full: niah_single_2 1.00 [1.00 1.00]" in text
    whole = by.loc["3:1", "layers-top", "niah_single_2"]  # 3 heads are rounded to one layer of 4
    assert (whole["n_full"], whole["layers_without_full"], whole["kv_share"]) == (4, 2, pytest.approx(1 / 3, abs=1e-3))


def test_kv_heads_and_bytes_of_a_worked_example():
    """L3H4, L2H1 and L0H5 lie in three KV groups of three heads; as many heads in one group keep L3H4's alone."""
    found = kv_budget.budgets(examples.scores(), ["7:1"], n_draws=5, n_tokens=1000, seed=0).set_index("rule")
    assert list(found["n_full"]) == [3, 3, 3] and list(found["n_draws"]) == [1, 1, 5]
    assert (found.loc["global", "kv_heads_kept"], found.loc["kv-group", "kv_heads_kept"]) == (3, 1)
    assert (found.loc["global", "kv_share"], found.loc["global", "kv_bytes"]) == (3 / 8, 3 * 2 * 8 * 1000 * 2)
    assert found.loc["global", "score_share"] == pytest.approx(1) and found.loc["kv-group", "score_share"] == pytest.approx(1 / 1.8)
    assert found.loc["global", "score_share_of_groups"] == pytest.approx(1) and found.loc["kv-group", "score_share_of_groups"] == pytest.approx(1 / 1.8)
    assert 1 <= found.loc["global-random", "kv_heads_kept"] <= 3


def test_kv_cache_of_the_planted_model(planted, folder):
    frame, text = run(kv_budget, planted, folder, "--ratios", "1:1", "3:1", "--context", "1024")
    groups = frame[frame["rule"] == "kv-group"].set_index("ratio")
    assert groups.loc["1:1", "kv_share"] == 0.5 and groups.loc["1:1", "kv_bytes"] == LAYERS * KV_HEADS / 2 * 2 * 256 * 1024 * 2
    assert (groups["score_share"] == 1).all()
    assert "the whole cache of 1,024 tokens is 6.0 MiB" in text and "| 1:1 | kv-group | 6 (50.0%) | 3 (50.0%) | 3.0 | 1.0 | 100.0% | 100.0% |" in text


def test_the_retriever_is_found_by_any_pairs_seed_and_length(planted, folder):
    stability.main([str(planted), "--out", str(folder), "--tokens", str(TOKENS), "--condition-pairs", "2", "--draws", "2"])
    pairs, between = (pd.read_csv(folder / f"stability_{name}.csv") for name in ("pairs", "conditions"))
    assert set(pairs["map"]) == set(between["map"]) == {"restriction", "paper"} and set(pairs["k"]) == {1, 2}
    assert (pairs.loc[pairs["k"] == 1, "top_k_overlap"] == 1).all() and (between.loc[between["k"] == 1, "jaccard"] == 1).all()
    # The second place falls to one of eleven heads without a score, drawn for each map: (1 + 11 / 11^2) / 2.
    np.testing.assert_allclose(pairs.loc[pairs["k"] == 2, "top_k_overlap"], (1 + 1 / 11) / 2, atol=1e-3)
    assert {(row.a, row.b) for row in between.itertuples() if row.a != row.b} == {("seed 0", "seed 1"), ("seed 0", "320 tokens"), ("seed 1", "320 tokens")}
    text = (folder / "stability.md").read_text()
    assert "| other pairs | 1 | 1.00 | 0.55 | 1.00 | 0.55 | 1.00 | 1.00 |" in text and "1 of 12 (restriction), 1 of 12 (paper)" in text
    assert {f"stability_{kind}_{name}.html" for kind in ("pairs", "conditions") for name in ("paper", "restriction")} <= {
        path.name for path in (folder / "figures").iterdir()
    }


def test_shared_scores_are_whole_and_of_this_model(planted, folder, tmp_path):
    scores = HeadScores.load(folder / "head_scores")
    assert {path.name for path in (folder / "head_scores").iterdir()} == {"head_scores.csv", "scores.json", "effects.safetensors"}
    assert [probe["n_pairs"] for probe in scores.probes] == [PAIRS] * 2 and set(scores.receivers) == {"retrieval", "reasoning"}
    replace(scores, receivers={}).save(tmp_path / "head_scores")
    with pytest.raises(InputError, match="hold no direct effects; make them with"):
        kv_budget.main([str(planted), "--out", str(tmp_path)])
    replace(scores, model=examples.info()).save(tmp_path / "head_scores")
    with pytest.raises(InputError, match="are of toy/model, the model is .*; give the folder of its own scores"):
        kv_budget.main([str(planted), "--out", str(tmp_path)])


def test_wrong_input_is_one_line_and_exit_code_2(tmp_path):
    done = subprocess.run([sys.executable, str(FOLDER / "kv_budget.py"), str(tmp_path), "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("kv_budget: ") and done.stderr.count("\n") == 1


def test_transfer_in_miniature_runs_arm_by_arm_and_goes_on(planted, tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for index in range(12):
        (tmp_path / "text" / f"{index}.txt").write_text("the boat and the map went to the old clock near the window . " * (10 + index))
    small = ["--scores", str(tmp_path / "scores"), "--text", str(tmp_path / "text"), "--pairs", "3", "--lengths", "100", "--prompts", "4", "--device", "cpu"]
    small += ["--align-tokens", "512", "--distil-tokens", "512", "--finetune-tokens", "256", "--length", "32", "--long", "64", "--align-rows", "4"]
    small += ["--distil-rows", "4", "--finetune-rows", "2", "--synthetic", "0", "--held-out", "0.3", "--warmup", "1", "--seeds", "2"]
    frame, text = run(transfer_miniature, planted, tmp_path, *small, "--arms", "restriction", "conversion gap")
    assert set(frame["arm"]) == {"restriction", "conversion gap", "base model"} and list(frame[frame["arm"] == "restriction"]["seed"].unique()) == [0, 1]
    assert frame.query("arm == 'base model' and task == 'niah_single_2'")["accuracy"].iloc[0] >= 0.5
    masks = {path.parent.name: path.read_text() for path in tmp_path.glob("transfer/arms/*/head_mask.json")}
    assert '"global"' in masks["restriction-0"] and len(masks) == 3
    assert "| **restriction** | 2 |" in text and "p = " in text
    monkeypatch.setattr(transfer_miniature, "transfer", lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setattr(transfer_miniature, "bank_of", lambda *_: tmp_path / "transfer" / "banks" / "default" / "align")
    again, _ = run(transfer_miniature, planted, tmp_path, *small, "--arms", "restriction")
    pd.testing.assert_frame_equal(again, frame)


def test_the_sign_test_of_the_miniature_pairs_questions():
    """Of 8 questions the default alone answers 5, the other alone none, and on the rest the two agree."""
    default = np.array([[True] * 6 + [False] * 2] * 2)
    other = np.array([[True] + [False] * 7] * 3)
    gap, p = transfer_miniature.paired(default, other)
    assert gap == pytest.approx(5 / 8) and p == pytest.approx(2 / 2**5)


def test_every_arm_names_a_rule_and_scores():
    assert {arm.rule for arm in transfer_miniature.ARMS.values()} <= set(RULES)
    assert {arm.heads for arm in transfer_miniature.ARMS.values()} == {*transfer_miniature.METHODS, "gap", "restriction x gap", None}
