"""Evaluation on a model whose answers are known: the planted one retrieves exactly, and without its head not at all."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import hydralens as hl
from hydralens.errors import InputError
from hydralens.evaluate import TASKS, evaluate
from hydralens.evaluation import answered, ask_reasoning, ask_retrieval, harness, perplexity, speed
from hydralens.evaluation.perplexity import token_losses
from hydralens.models.lens import LensModel, wrap_model
from hydralens.probes import solve
from tests.hybrid.examples import mask_of
from tests.planted import RETRIEVER, planted_hf, planted_model, word_tokenizer
from tests.tiny import tiny_hf


def broken_model() -> LensModel:
    """The planted model whose retrieving head writes the opposite."""
    tokenizer = word_tokenizer()
    hf = planted_hf(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    layer, head = RETRIEVER
    with torch.no_grad():
        hf.model.layers[layer].self_attn.o_proj.weight.unflatten(1, (4, -1))[:, head] *= -1
    return wrap_model(hf, tokenizer, id="broken")


@pytest.mark.parametrize("batch_tokens", [None, 1, 500])
def test_batches_judge_as_one_prompt_at_a_time_does(batch_tokens):
    model = planted_model()
    probe = hl.probes.niah(model, "niah_multikey_1", n_pairs=7, n_tokens=150)
    slow = solve(model, probe).correct_all
    assert torch.equal(answered(model, probe, batch_tokens=batch_tokens), slow) and slow.any()


def test_padding_changes_no_judgement():
    """A random model, so that some prompts are right by chance: tokens whose answer is what it says anyway."""
    lens = wrap_model(tiny_hf("qwen3"))
    generator = torch.Generator().manual_seed(0)
    probes = hl.probes
    lengths = [5, 9, 17, 6]
    tokens = [torch.randint(0, 97, (n,), generator=generator) for n in lengths]
    choice = [int(lens.hf(row[None]).logits[0, -1].argmax()) for row in tokens]
    answers = [choice[0], choice[1] + 1, choice[2], choice[3] + 2]
    clean, mask = torch.zeros(4, 20, dtype=torch.long), torch.zeros(4, 20, dtype=torch.long)
    for row, own in enumerate(tokens):
        clean[row, 1 : 1 + len(own)], mask[row, 1 : 1 + len(own)] = own, 1
    read = torch.tensor([[n] for n in lengths])
    answer = torch.tensor(answers)[:, None] % 97
    probe = probes.Probe("chance", "retrieval", "value", 0, clean, clean, mask, answer, (answer + 1) % 97, read, torch.tensor([[1, 2]] * 4))
    assert answered(lens, probe).tolist() == [True, False, True, False]


def test_retrieval_by_depth(tmp_path):
    found = ask_retrieval(planted_model(), "niah_single_2", 120, depths=(0.1, 0.9), n_prompts=6)
    assert list(found["depth"]) == [0.1, 0.9] and list(found["n"]) == [3, 3] and found["ci_low"].max() < 1
    broken = ask_retrieval(broken_model(), "niah_single_2", 120, depths=(0.1, 0.9), n_prompts=6)
    assert found["accuracy"].mean() > 0.6 and broken["accuracy"].max() == 0 and broken["ci_high"].min() > 0


def test_reasoning_is_asked_whole():
    found = ask_reasoning(planted_model(), "ioi", n_prompts=4)
    assert list(found["task"]) == ["ioi"] and found["n"][0] == 4 and found["depth"].isna().all() and found["length"][0] > 10


@pytest.mark.parametrize("hybrid", [False, True])
def test_losses_equal_all_logits_at_once(hybrid):
    lens = wrap_model(tiny_hf("llama"))
    if hybrid:
        lens = wrap_model(hl.build_hybrid(lens, mask_of(lens, torch.eye(4, lens.info.n_heads, dtype=torch.bool))))
    tokens = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(1))
    logits = lens.hf(tokens[None]).logits[0].double()
    expected = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
    torch.testing.assert_close(token_losses(lens, tokens).double(), expected, atol=1e-4, rtol=1e-4)


def test_perplexity_stands_at_its_position():
    lens = wrap_model(tiny_hf("llama"))
    documents = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in (40, 41, 90, 10)]
    found = perplexity(lens, documents, 40)
    assert list(found["position_from"]) == [1, 16, 32] and list(found["position_to"]) == [15, 31, 39] and set(found["n_documents"]) == {3}
    losses = torch.stack([token_losses(lens, document[:40]) for document in documents[:3]])
    for row, part in zip(found.itertuples(), losses.split((15, 16, 8), dim=1), strict=True):
        assert row.nll == pytest.approx(float(part.mean()), rel=1e-5) and row.ci_low <= row.nll <= row.ci_high
    with pytest.raises(InputError, match="no document has 200 tokens, the longest has 90"):
        perplexity(lens, documents, 200)


def test_speed_measures_what_the_cache_holds():
    lens = wrap_model(tiny_hf("llama"))
    hybrid = wrap_model(hl.build_hybrid(lens, mask_of(lens, torch.eye(4, lens.info.n_heads, dtype=torch.bool))))
    base, own = (speed(model, 64, repeats=1, steps=2) for model in (lens, hybrid))
    assert {"base": base["cache_bytes"], "hybrid": own["cache_bytes"]}.items() <= hybrid.hf.cache_bytes(64).items()
    assert min(base["prefill_tokens_per_s"], own["decode_tokens_per_s"]) > 0


def test_two_models_side_by_side_and_again_from_the_cells(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("the boat and the map went to the old clock near the window . " * 20)
    models = {"planted": planted_model(), "broken": broken_model()}
    asked = {"tasks": ["niah_single_2", "ioi", "perplexity", "speed"], "lengths": [100], "depths": (0.0, 1.0), "n_prompts": 4, "text": tmp_path / "text.txt"}
    tables = evaluate(models, tmp_path / "out", **asked)
    written = pd.read_csv(tmp_path / "out" / "evaluation.csv")
    assert list(written.columns) == ["model", "task", "length", "depth", "n", "accuracy", "ci_low", "ci_high"] and len(written) == 2 * (2 + 1)
    by = written[written["task"] == "niah_single_2"].groupby("model")["accuracy"].mean()
    assert by["planted"] > by["broken"] == 0
    page = (tmp_path / "out" / "evaluation.html").read_text()
    assert "niah_single_2, 100 tokens" in page and "broken answers" in page and 'src="http' not in page
    about = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert list(about["models"]) == ["planted", "broken"] and about["versions"]["torch"]
    assert {path.name for path in (tmp_path / "out" / "figures").glob("*.html")} == {"depth_heatmap.html", "perplexity.html"}

    def never(*_, **__):
        raise AssertionError("computed again")

    import hydralens.evaluate as job

    for name in ("ask_retrieval", "ask_reasoning", "perplexity", "speed"):
        monkeypatch.setattr(job, name, never)
    again = evaluate(models, tmp_path / "out", **asked)
    for kind, frame in tables.items():
        pd.testing.assert_frame_equal(again[kind], frame, check_dtype=False)
    with pytest.raises(AssertionError, match="computed again"):
        evaluate(models, tmp_path / "out", **asked | {"n_prompts": 8})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tasks": ["magic"]}, "task 'magic' is unknown; choose from niah_single_1"),
        ({"tasks": []}, "no task"),
        ({"lengths": []}, "lengths are"),
        ({"tasks": ["perplexity"]}, "perplexity needs a text"),
        ({"lengths": [20]}, "has no room for needle and question"),
    ],
)
def test_wrong_questions_are_named(asked, said, tmp_path):
    with pytest.raises(InputError, match=said):
        evaluate({"planted": planted_model()}, tmp_path, **asked)


def test_models_that_read_differently_are_not_compared(tmp_path):
    bare = wrap_model(tiny_hf("llama"))
    with pytest.raises(InputError, match="bare has no tokenizer"):
        evaluate({"planted": planted_model(), "bare": bare}, tmp_path)
    other = wrap_model(tiny_hf("llama"), SimpleNamespace(get_vocab=lambda: {"a": 0}))
    with pytest.raises(InputError, match="other and planted have different tokenizers"):
        evaluate({"planted": planted_model(), "other": other}, tmp_path)


def test_without_lm_eval_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(InputError, match="pip install 'hydralens\\[eval\\]'"):
        harness(planted_model(), ["arc_easy"])


def test_every_task_can_be_asked():
    assert len(TASKS) == len(set(TASKS)) and {"niah_single_3", "niah_multikey_3", "niah_multivalue", "ioi", "speed"} <= set(TASKS)
    hard = ask_retrieval(planted_model(), "niah_multikey_3", 300, depths=(0.5,), n_prompts=1)
    assert np.isfinite(hard["accuracy"]).all()
