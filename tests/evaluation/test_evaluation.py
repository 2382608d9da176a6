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
from hydralens.evaluation import answered, ask_reasoning, ask_retrieval, harness, made_documents, perplexity, speed
from hydralens.evaluation.perplexity import token_losses
from hydralens.figures import saving
from hydralens.models.lens import LensModel, wrap_model
from hydralens.probes import solve
from tests.hybrid.examples import TEACHER, mask_of, tiny_hybrid
from tests.planted import RETRIEVER, planted_hf, planted_model, word_tokenizer
from tests.tiny import FAMILIES, tiny_hf


@pytest.fixture(autouse=True)
def no_images(monkeypatch):
    """A browser for every table would take most of the time."""
    monkeypatch.setattr(saving, "BROWSERS", ())


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


def tiny_lens(kind: str) -> LensModel:
    return wrap_model(tiny_hybrid()[0] if kind == "hybrid" else tiny_hf(kind))


@pytest.mark.parametrize("kind", [*FAMILIES, "hybrid"])
def test_padding_changes_no_judgement(kind):
    """A random model, so that some prompts are right by chance: tokens whose answer is what it says anyway."""
    lens = tiny_lens(kind)
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


def test_a_batch_of_prompts_needs_no_mask(monkeypatch):
    """Prompts of unlike length side by side: a mask would be of tokens x tokens."""
    model, seen = planted_model(), []
    forward = model.hf.forward
    monkeypatch.setattr(model.hf, "forward", lambda **given: seen.append(given) or forward(**given))
    probe = hl.probes.niah(model, "niah_multikey_2", n_pairs=6, n_tokens=150)
    assert len(set(probe.attention_mask.sum(1).tolist())) > 1
    answered(model, probe)
    assert len(seen) == 1 and seen[0].keys() == {"input_ids", "logits_to_keep", "use_cache"} and seen[0]["logits_to_keep"] < 40


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
    assert len(about["cells"]) == 8 and about["seconds"] == pytest.approx(sum(cell["seconds"] for cell in about["cells"]), abs=0.1)
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
        ({"depths": []}, "depths are empty"),
        ({"depths": [1.5]}, "depth=1.5 is not in 0..1"),
        ({"n_prompts": 0}, "n_prompts is 0; it must be at least 1"),
    ],
)
def test_wrong_questions_are_named(asked, said, tmp_path):
    with pytest.raises(InputError, match=said):
        evaluate({"planted": planted_model()}, tmp_path, **asked)


def test_what_cannot_be_asked_is_refused_before_anything_is_asked(tmp_path):
    (tmp_path / "short.txt").write_text("the boat and the map")
    for asked, said in (
        ({"tasks": ["niah_single_2", "niah_multivalue"], "lengths": [300, 20]}, "n_tokens=20 has no room for needle and question of niah_single_2/value"),
        ({"tasks": ["speed", "perplexity"], "text": tmp_path / "short.txt"}, "no document of .*short.txt has 1024 tokens, the longest has 5"),
    ):
        with pytest.raises(InputError, match=said):
            evaluate({"planted": planted_model()}, tmp_path / "out", **asked)
        assert not (tmp_path / "out").exists()


def test_what_is_named_twice_is_asked_once(tmp_path):
    found = evaluate({"planted": planted_model()}, tmp_path, tasks=["niah_single_2", "niah_single_2"], lengths=[100, 100], depths=(0.5, 0.5), n_prompts=2)
    assert len(found["evaluation"]) == 1


@pytest.mark.parametrize(("n_prompts", "each"), [(7, [3, 2, 2]), (2, [1, 1])])
def test_prompts_are_as_many_as_asked(n_prompts, each):
    assert list(ask_retrieval(planted_model(), "niah_single_2", 100, depths=(0, 0.5, 1), n_prompts=n_prompts)["n"]) == each


def test_models_of_the_same_weights_are_not_taken_for_each_other(tmp_path):
    """A hybrid's window, scale and positions are no weights."""
    tokenizer = word_tokenizer()
    lens = wrap_model(planted_hf(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))), tokenizer)
    kept = mask_of(lens, torch.ones(3, 4, dtype=torch.bool))
    teacher, other = (wrap_model(hl.build_hybrid(lens, kept, **(TEACHER | {"full_rope": rope})), tokenizer) for rope in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(teacher.hf.parameters(), other.hf.parameters(), strict=True))
    asked = {"tasks": ["niah_single_2"], "lengths": [100], "n_prompts": 5}
    alone = evaluate({"other": other}, tmp_path / "alone", **asked)["evaluation"]
    both = evaluate({"teacher": teacher, "other": other}, tmp_path / "both", **asked)["evaluation"]
    assert both[both["model"] == "teacher"]["accuracy"].mean() > 0.5
    pd.testing.assert_frame_equal(both[both["model"] == "other"].reset_index(drop=True), alone)
    assert alone["accuracy"].max() == 0


def test_all_models_read_the_tokens_of_the_first(tmp_path, monkeypatch):
    import hydralens.evaluate as job

    tokenizers = []
    monkeypatch.setattr(job, "ask_retrieval", lambda model, *rest, **asked: tokenizers.append(model.tokenizer) or ask_retrieval(model, *rest, **asked))
    models = {"planted": planted_model(), "broken": broken_model()}
    evaluate(models, tmp_path, tasks=["niah_single_2"], lengths=[100], n_prompts=1)
    assert len(tokenizers) == 2 and all(own is models["planted"].tokenizer for own in tokenizers)


def test_made_prose_is_the_same_wherever_it_is_made():
    tokenizer = word_tokenizer()
    documents, again = (made_documents(tokenizer, 3, 200, seed=1) for _ in range(2))
    assert [len(document) for document in documents] == [200] * 3 and all(map(torch.equal, documents, again))
    assert not torch.equal(documents[0], documents[1]) and not torch.equal(documents[0], made_documents(tokenizer, 1, 200, seed=2)[0])
    assert perplexity(planted_model(), documents, 200)["n_documents"].tolist() == [3] * 5


def test_models_that_read_differently_are_not_compared(tmp_path):
    bare = wrap_model(tiny_hf("llama"))
    with pytest.raises(InputError, match="bare has no tokenizer"):
        evaluate({"planted": planted_model(), "bare": bare}, tmp_path)
    other = wrap_model(tiny_hf("llama"), SimpleNamespace(get_vocab=lambda: {"a": 0}))
    with pytest.raises(InputError, match="other and planted have different tokenizers"):
        evaluate({"planted": planted_model(), "other": other}, tmp_path)


def test_learned_positions_end(tmp_path):
    short = wrap_model(tiny_hf("gpt2"), word_tokenizer())
    for tasks, length, reach in ((["niah_single_2"], 257, 257), (["speed"], 241, 257)):
        with pytest.raises(InputError, match=f"short has positions for 256 tokens and would read {reach}; give shorter lengths"):
            evaluate({"short": short}, tmp_path, tasks=tasks, lengths=[length])
    assert len(evaluate({"short": short}, tmp_path, tasks=["speed"], lengths=[240])["speed"]) == 1


def test_without_lm_eval_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(InputError, match="pip install 'hydralens\\[eval\\]'"):
        harness(planted_model(), ["arc_easy"])


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("hybrid", [False, True])
def test_lm_eval_asks_base_and_hybrid_alike(hybrid, batch_size, tmp_path):
    tasks = pytest.importorskip("lm_eval.tasks", reason="needs pip install 'hydralens[eval]'")
    asked = [("boat map clock fence and then boat map", "clock", "letter"), ("the jar bridge inn of it is jar bridge", "inn", "gate")]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"q": q, "right": right, "both": [right, wrong]}) + "\n" for q, right, wrong in asked))
    own = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "asked.jsonl")}}, "test_split": "test", "doc_to_text": "{{q}}"}
    choose = {
        "task": "choose",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{both}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    say = {"task": "say", "output_type": "generate_until", "doc_to_target": "{{right}}", "metric_list": [{"metric": "exact_match"}]}
    for task in (choose, say | {"generation_kwargs": {"until": ["."], "max_gen_toks": 1, "do_sample": False}}):
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(own | task))
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "<unk>"
    base = planted_model()
    hf = hl.build_hybrid(base, mask_of(base, torch.ones(3, 4, dtype=torch.bool)), **TEACHER) if hybrid else base.hf
    found = harness(
        wrap_model(hf, tokenizer), ["choose", "say"], task_manager=tasks.TaskManager(include_path=str(tmp_path), include_defaults=False), batch_size=batch_size
    )
    assert found["choose"]["acc,none"] == found["say"]["exact_match,none"] == 1 and tokenizer.pad_token is None


def test_every_task_can_be_asked():
    assert len(TASKS) == len(set(TASKS)) and {"niah_single_3", "niah_multikey_3", "niah_multivalue", "ioi", "speed"} <= set(TASKS)
    hard = ask_retrieval(planted_model(), "niah_multikey_3", 300, depths=(0.5,), n_prompts=1)
    assert np.isfinite(hard["accuracy"]).all()
