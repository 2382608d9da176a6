import json
from functools import partial
from html.parser import HTMLParser

import pandas as pd
import pytest
import torch

from hydralens import run as main_job
from hydralens import scoring
from hydralens.errors import InputError, ProbeNotSolvedError
from hydralens.figures import saving
from hydralens.head_mask import HeadMask
from hydralens.models.lens import wrap_model
from hydralens.models.loading import load_model
from hydralens.probes import reasoning, retrieval
from hydralens.report import run_figures
from hydralens.report.answer import in_short
from hydralens.run import run
from hydralens.scores import HeadScores
from hydralens.statistics import positive_control, split_half
from tests.planted import HEADS, LAYERS, RETRIEVER, planted_model, word_tokenizer
from tests.test_files import full_disk
from tests.tiny import tiny_hf

SMALL = {"n_pairs": 2, "n_tokens": 160, "n_check": 3, "n_draws": 2, "verbose": False}
FIGURES = {
    "head_heatmap",
    "volcano",
    "probe_facets",
    "role_maps",
    "knockout_curve",
    "mask_preview",
    "block_similarity",
    "layer_similarity",
    "head_similarity",
    "layer_profile",
}
FILES = {
    "run.json",
    "report.html",
    "head_scores.csv",
    "scores.json",
    "effects.safetensors",
    "head_mask.json",
    "layer_similarity.csv",
    "head_similarity.csv",
    "knockout.csv",
    "preview.csv",
    "figures/plotly.min.js",
    *(f"figures/{name}.html" for name in FIGURES),
}


def files_in(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module", autouse=True)
def _same_day_and_no_images():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        patch.setattr(saving, "BROWSERS", ())
        yield


@pytest.fixture(scope="module")
def model():
    return planted_model()


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """The folder of a whole run, and what the run returned."""
    out = tmp_path_factory.mktemp("run") / "deep" / "er"
    return out, run(model, out, **SMALL)


@pytest.fixture
def quick(finished, monkeypatch):
    """``run`` with the finished run's scores and without figures and report: what is left takes two seconds."""
    monkeypatch.setattr(main_job, "score_heads", lambda *args, **kwargs: finished[1].scores)
    no_pictures(monkeypatch)


def no_pictures(monkeypatch):
    monkeypatch.setattr(main_job, "save_figures", lambda *args: None)
    monkeypatch.setattr(main_job, "write_report", lambda *args: None)


def test_every_file_of_a_run_is_there_and_no_other(finished):
    assert files_in(finished[0]) == FILES


def test_the_mask_keeps_the_planted_head(finished):
    out, result = finished
    mask = HeadMask.load(out / "head_mask.json", result.model)
    assert mask.n_full == 2 and mask.array[RETRIEVER]  # 12 / 8, halves up
    assert (mask.ratio, mask.selection.rule, mask.created_with.date) == ("7:1", "global", "2023-11-14")
    assert mask == result.mask and {probe.capability for probe in mask.probes} == {"retrieval"}


def test_the_checks_tell_the_planted_head_from_random_ones(finished):
    out, result = finished
    knockout, preview = pd.read_csv(out / "knockout.csv"), pd.read_csv(out / "preview.csv")
    assert knockout.query("k == 0")["accuracy"].tolist() == [1]
    assert knockout.query("k == 1 and order == 'scored'")["accuracy"].tolist() == [0]
    assert (knockout.query("k == 1 and order == 'random'")["accuracy"] == 1).all()
    assert (preview.query("mask in ['all heads full', 'selected', \"paper's composite\"]")["accuracy"] == 1).all()
    assert (preview.query("mask == 'no head full'")["accuracy"] == 0).all()
    assert len(preview) == 2 * (1 + 1 + 2 + 1 + 1) == len(result.preview)
    assert len(knockout) == 1 + 2 * (1 + 2) == len(result.knockout)


def test_tables_have_the_labels_of_the_model(finished):
    for name, labels in (
        ("layer", [f"L{layer}" for layer in range(LAYERS)]),
        ("head", [f"L{layer}H{head}" for layer in range(LAYERS) for head in range(HEADS)]),
    ):
        table = pd.read_csv(finished[0] / f"{name}_similarity.csv", index_col=0)
        assert list(table.index) == list(table.columns) == labels
    scores = HeadScores.load(finished[0])
    pd.testing.assert_frame_equal(scores.to_frame(), finished[1].scores.to_frame())
    assert len(pd.read_csv(finished[0] / "head_scores.csv")) == len(scores.to_frame())


def test_the_record_says_what_was_run(finished):
    record = json.loads((finished[0] / "run.json").read_text())
    assert record["model"] == finished[1].model.model_dump() and record["model"]["id"] == "planted"
    for name, value in {"ratio": "7:1", "rule": "global", "method": "restriction", "seed": 0, "dtype": "float32", **SMALL}.items():
        assert name == "verbose" or record[name] == value
    assert {"python", "hydralens", "torch", "transformers", "numpy"} == set(record["versions"])
    assert set(record["wall_seconds"]) == {"probes", "scores", "similarity", "knock-out", "mask preview", "files"}
    assert len(record["probes"]) == 8 * 3 + 6 and {"probe", "corruption", "n_pairs", "n_solved", "used"} <= set(record["probes"][0])
    assert record["device"].startswith("cpu") and "command" in record and "finished" in record
    assert record["stability"] == split_half(finished[1].scores, 1)  # one head has a signal
    assert record["stability"]["top_k_overlap_low"] == 1


def test_the_positive_control_passes_and_is_the_same_everywhere(finished):
    """One head of six prompts' answers: Fisher's p is 1 / 924, for two sizes."""
    out, result = finished
    control = json.loads((out / "run.json").read_text())["positive_control"]
    assert control["passed"] and (control["k"], control["scored"], control["random"], control["p"]) == (1, 0, 1, pytest.approx(2 / 924))
    assert control["sentence"] == positive_control(pd.read_csv(out / "knockout.csv")).sentence
    assert control["sentence"] in in_short(result) and control["sentence"] in Page((out / "report.html").read_text("utf-8")).text


def test_senders_are_measured_whatever_the_method_and_choose_the_papers_mask(finished, model):
    scores = finished[1].scores
    assert scores.method == "restriction" and {c: list(m) for c, m in scores.senders.items()} == {c: list(m) for c, m in scores.receivers.items()}
    assert "composite of receivers and senders keeps 100%" in Page((finished[0] / "report.html").read_text("utf-8")).text


@pytest.mark.parametrize(("method", "halves"), [("attention_mass", False), ("induction", True)])
def test_a_detector_can_score(method, halves, model, tmp_path, monkeypatch):
    """Of one pair there are no halves; induction makes its own repetitions."""
    no_pictures(monkeypatch)
    result = run(model, tmp_path, **{**SMALL, "n_pairs": 1}, method=method)
    record = json.loads((tmp_path / "run.json").read_text())
    assert result.scores.method == record["method"] == method and set(run_figures(result)) >= {"head_heatmap", "probe_facets", "role_maps", "layer_profile"}
    assert set(result.preview["mask"]) == {"all heads full", "selected", "random", "no head full", "paper's composite"}
    assert record["stability"] == result.stability and bool(result.stability) == halves
    assert ("Not measured: two halves need two pairs in every probe; use more." in in_short(result)) != halves


class Page(HTMLParser):
    """Balanced elements, text, and everything that a browser would fetch."""

    VOID = {"meta", "link", "br", "hr", "img", "input", "path", "col", "circle", "rect", "line"}

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.fetched = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        attributes = dict(attributes)
        self.fetched += [attributes[name] for name in ("src", "data") if name in attributes] + ([attributes["href"]] if tag == "link" else [])

    def handle_endtag(self, tag):
        assert tag in self.VOID or self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += f" {data.strip()}"


def test_the_report_opens_alone_and_begins_with_the_answer(finished):
    page = Page((finished[0] / "report.html").read_text("utf-8"))
    assert page.open == [] and [link for link in page.fetched if not link.startswith("data:")] == []
    assert "2 of 12 query heads keep full attention" in page.text and "L1H2" in page.text
    assert page.text.index("2 of 12 query heads") < page.text.index("niah_single_2")


def test_a_run_that_was_killed_and_went_on_gives_the_same_mask_to_the_byte(finished, model, tmp_path, monkeypatch):
    no_pictures(monkeypatch)
    patch, measured = scoring.activation_patch, []

    def killed(model, probe, **kwargs):
        measured.append(probe.name)
        if len(measured) == 15:
            raise KeyboardInterrupt
        return patch(model, probe, **kwargs)

    monkeypatch.setattr(scoring, "activation_patch", killed)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, **SMALL)
    assert {path.parent.name for path in tmp_path.rglob("*.*")} == {"shards"} and len(files_in(tmp_path)) == 14
    run(model, tmp_path, **SMALL)
    assert len(measured) == 15 + 30 * 2 - 14 and not (tmp_path / "shards").exists()
    for name in ("head_mask.json", "head_scores.csv", "scores.json", "knockout.csv", "preview.csv", "layer_similarity.csv", "head_similarity.csv"):
        assert (tmp_path / name).read_bytes() == (finished[0] / name).read_bytes(), name


def test_random_masks_are_as_large_as_the_selected_one(quick, model, tmp_path, monkeypatch):
    """Whole layers round K: 12 / 4 = 3 heads become one layer of four."""
    preview, seen = main_job.mask_preview, {}
    monkeypatch.setattr(main_job, "mask_preview", lambda model, masks, *args, **kwargs: seen.update(masks) or preview(model, masks, *args, **kwargs))
    assert run(model, tmp_path, **SMALL, ratio="3:1", rule="layers-top").mask.n_full == 4
    assert [int(mask.sum()) for mask in seen["random"]] == [4, 4]


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ({"n_pairs": 0}, "n_pairs is 0; it must be at least 1"),
        ({"n_check": -1}, "n_check is -1; it must be at least 1"),
        ({"n_draws": 0}, "n_draws is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"ratio": "0:1"}, "ratio '0:1' is not of the form r:1"),
        ({"ratio": "24:1"}, "ratio '24:1' leaves 0 of 12 heads; the highest ratio that leaves one is 23:1"),
        ({"rule": "best"}, "rule 'best' is not one of global, global-constrained"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_done(argument, line, model, tmp_path):
    with pytest.raises(InputError) as error:
        run(model, tmp_path / "out", **{**SMALL, **argument})
    assert str(error.value).startswith(line) and not (tmp_path / "out").exists()


def test_prompts_too_short_for_the_question_or_the_preview_are_refused(model, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="n_tokens=20 has no room for needle and question of niah_single_1/value; ask for at least "):
        run(model, tmp_path, **{**SMALL, "n_tokens": 20})
    monkeypatch.setattr(main_job, "score_heads", None)  # not reached
    with pytest.raises(InputError, match="every needle ends within the window of 64 positions before the answer; use longer prompts"):
        run(model, tmp_path, **{**SMALL, "n_tokens": 120, "n_check": 1})
    assert files_in(tmp_path) == set()


def test_a_model_that_retrieves_nothing_gets_no_mask(tmp_path):
    tokenizer = word_tokenizer()
    config = tiny_hf("llama").config
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    model = wrap_model(type(tiny_hf("llama"))(config), tokenizer, id="random")
    with pytest.raises(ProbeNotSolvedError, match="the model does not solve this probe: 0 of 2 pairs of niah_single_1/value, the best of 24 retrieval probes"):
        run(model, tmp_path, **SMALL)
    assert {name for name in files_in(tmp_path) if not name.startswith("shards/")} == set()


def test_a_disk_that_fills_up_at_the_end_leaves_whole_files_only(quick, model, finished, tmp_path):
    first_file = (finished[0] / "effects.safetensors").stat().st_size
    with full_disk(first_file - 1), pytest.raises(InputError, match="cannot write .*effects.safetensors: .*; choose a writable folder with free space"):
        run(model, tmp_path, **SMALL)
    assert files_in(tmp_path) == set()


@pytest.mark.embedded
def test_the_embedded_model_at_seven_to_one(tmp_path, monkeypatch):
    """One shape of probes and one pair each: fifteen seconds."""
    monkeypatch.setattr(main_job, "retrieval", lambda *args, **kwargs: retrieval(*args, **{**kwargs, "shapes": ("niah_single_2",)}))
    monkeypatch.setattr(main_job, "reasoning", partial(reasoning, tasks=("induction",)))
    no_pictures(monkeypatch)
    model = load_model("embedded", device="cpu", dtype="float32")
    result = run(model, tmp_path, method="paper", n_pairs=1, n_tokens=160, n_check=2, n_draws=1, verbose=False)
    mask = HeadMask.load(tmp_path / "head_mask.json", model)
    assert (mask.n_full, mask.array.numel()) == (34, 270) and mask.model.id == "SmolLM2-135M-Instruct"
    assert len(result.solved) == 4 and result.scores.n_with_signal > 10
