"""The report: the answer in words that follow the numbers, in one file that needs nothing else."""

import re
from dataclasses import replace
from html import unescape

import pytest
import torch
from plotly.offline import get_plotlyjs

from hydralens.errors import InputError
from hydralens.report import RunResult, write_report
from hydralens.report.answer import best_heads, headline, kept_heads, verdicts
from tests.figures.examples import (
    clear_knockout,
    clear_preview,
    heads,
    info,
    knockout_frame,
    layers,
    mask,
    preview_frame,
    scores,
    unclear_knockout,
    unclear_preview,
)

SOLVED = [
    {"probe": "needle", "corruption": "value", "capability": "retrieval", "n_pairs": 4, "n_solved": 4, "used": True},
    {"probe": "products", "corruption": "value", "capability": "reasoning", "n_pairs": 4, "n_solved": 1, "used": False},
]


def run(**changes) -> RunResult:
    found = scores()
    whole = RunResult(
        found.model,
        found,
        mask(found),
        layers(),
        heads(0.3, 0.1),
        clear_knockout(),
        clear_preview(),
        SOLVED,
        {"k": 6, "top_k_overlap": 5 / 6, "spearman": 0.4},
        {"command": "hydralens run", "seconds": {"scoring": 12.3456}, "tasks": ["a", "b"]},
    )
    return replace(whole, **changes)


def text(path) -> str:
    """What a person reads: the body's words, on one line."""
    body = path.read_text(encoding="utf-8").split("<body>")[1]
    return " ".join(unescape(re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]*>", " ", body, flags=re.DOTALL)).split())


def status(result: RunResult) -> list[str]:
    return [verdict.status for verdict in verdicts(result)]


def test_the_answer_comes_first_then_figures_then_how_it_was_made(tmp_path):
    said = text(write_report(tmp_path / "report.html", run()))
    order = [
        "6 of 24 query heads keep full attention (ratio 3:1, rule global)",
        "3 of them carry a measured signal; the other 3 only fill the budget, by tie-break: lower layer, then lower head.",
        "They read 50% of the KV heads",
        "Removing the 4 best-scored heads takes accuracy from 100% to 5%; removing 4 random heads leaves 98%.",
        "The selected heads keep 70% of prompts right; random heads keep 11%, all heads 90%.",
        "The best heads",
        "1 head of layer 3 carries half of the score",
        "Each probe is a set of prompt pairs",
        "Query head 2 of layer 23",
    ]
    places = [said.find(phrase) for phrase in order]
    assert -1 not in places and places == sorted(places)


def test_a_selection_that_beats_random_is_said_to_with_the_number_of_prompts(tmp_path):
    said = text(write_report(tmp_path / "report.html", run()))
    assert "That is 20 prompts and 2 random draws" in said and "So the scores find heads that this task cannot do without." in said
    assert "That is 40 prompts and 2 random draws, without training" in said
    assert "task 0 90% (random 12%, all heads 100%); task 1 50% (random 10%, all heads 80%)" in said
    assert status(run()) == ["yes"] * 4


def test_a_selection_that_does_not_beat_random_is_said_not_to(tmp_path):
    weak = run(knockout=unclear_knockout(), preview=unclear_preview(), stability={"k": 6, "top_k_overlap": 0.33, "spearman": 0.1})
    said = text(write_report(tmp_path / "report.html", weak))
    assert "Removing the best-scored heads does not clearly hurt more than removing random ones: 80% against 92% right at 12 heads." in said
    assert "So these prompts do not show that the scored heads matter more than others." in said
    assert "The selected heads do not clearly beat random ones: 15% against 15% of prompts right (all heads 90%)." in said
    assert "2 of the top 6 heads are the same (33%)" in said and "use more pairs before relying on single heads" in said
    assert "cannot do without" not in said
    assert status(weak) == ["yes", "no", "no", "no"]


def test_tasks_that_cannot_tell_masks_apart_are_exposed():
    easy = run(preview=preview_frame([20], [[19]], [20], [19]), knockout=knockout_frame({0: 4, 4: 0}, {4: [4]}))
    (*_, need, better) = verdicts(easy)
    assert "The unchanged model gets only 20% right, which leaves little to lose." in need.sentences
    assert "With no full head at all 95% are right, so these prompts hardly need far context and cannot tell masks apart." in better.sentences


def test_what_was_not_measured_is_said_and_not_drawn(tmp_path):
    bare = run(layer_similarity=None, head_similarity=None, knockout=None, preview=None, stability={}, solved=[], settings={})
    path = write_report(tmp_path / "report.html", bare)
    assert text(path).count("Not measured in this run.") == 3 and status(bare) == ["yes", "unknown", "unknown", "unknown"]
    assert "layer_similarity.csv" not in text(path) and "was not recorded" in text(path)
    assert re.findall(r'<figure id="figure-(\w+)"', path.read_text()) == ["head_heatmap", "probe_facets", "layer_profile"]


def test_every_figure_has_a_title_a_caption_and_words_for_those_who_cannot_see_it(tmp_path):
    page = write_report(tmp_path / "report.html", run()).read_text(encoding="utf-8")
    names = ["head_heatmap", "probe_facets", "knockout_curve", "mask_preview", "layer_similarity", "head_similarity", "layer_profile"]
    found = re.findall(r'<figure id="figure-(\w+)".*?<h3>(.+?)</h3>.*?role="img" aria-label="(.+?)".*?<figcaption>(.+?)</figcaption>', page, re.DOTALL)
    assert [name for name, *_ in found] == names
    assert all(label == f"{title}. {caption}" for _, title, label, caption in found)
    assert page.count("Plotly.newPlot(") == len(names) + get_plotlyjs().count("Plotly.newPlot(")


def test_the_page_needs_no_other_file_and_no_network(tmp_path):
    page = write_report(tmp_path / "report.html", run()).read_text(encoding="utf-8")
    assert page.count(get_plotlyjs()) == 1
    ours = page.replace(get_plotlyjs(), "")
    assert "http" not in ours and " src=" not in ours and "<link" not in ours and "@import" not in ours and "url(" not in ours
    links = set(re.findall(r'href="([^#"]+)"', ours))
    assert links == {"head_mask.json", "head_scores.csv", "layer_similarity.csv", "head_similarity.csv", "figures/", "run.json"}


def test_names_from_outside_are_escaped(tmp_path):
    evil = '<script>alert("x")</script>&co'
    found = scores(model_id=evil)
    path = write_report(tmp_path / "report.html", run(model=info(evil), scores=found, mask=mask(found), settings={"command": "<b>bold</b>"}))
    ours = path.read_text(encoding="utf-8").replace(get_plotlyjs(), "")
    assert "<script>alert" not in ours and "<b>bold" not in ours
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;&amp;co" in ours and "&lt;b&gt;bold&lt;/b&gt;" in ours


def test_the_table_of_best_heads_holds_only_heads_with_signal():
    rows = best_heads(run())
    assert [(row.name, row.kv_head, row.probe, row.kept) for row in rows] == [
        ("L3H4", 1, "names/value", True),
        ("L2H1", 0, "needle/value", True),
        ("L0H5", 1, "needle/key", True),
    ]
    assert [row.share for row in rows] == pytest.approx([1, 0.5, 0.3]) and rows[0].low < rows[0].effect < rows[0].high
    chips = {layer: [(chip.head, chip.signal) for chip in chips] for layer, chips in kept_heads(run()).items()}
    assert chips == {0: [(0, False), (1, False), (2, False), (5, True)], 2: [(1, True)], 3: [(4, True)]}


def test_scores_without_signal_are_not_dressed_up(tmp_path):
    nothing = scores({(0, 0): 0.0})
    empty = run(scores=nothing, mask=mask(nothing))
    said = text(write_report(tmp_path / "report.html", empty))
    assert "0 of them carry a measured signal; the other 6 only fill the budget" in said
    assert "No head has a score: the probes found nothing, and the whole mask is tie-break." in said and "The best heads" not in said


def test_intervals_that_touch_zero_are_counted():
    found = scores()
    shaky = found.receivers["retrieval"]["needle/key"]
    shaky.per_pair[:, 0, 5] = torch.tensor([-0.5, 0.6, 0.6, -0.1])
    first = verdicts(run(scores=found))[0]
    assert first.sentences[0] == "For 2 of the 3 best heads the 95% interval of its largest effect lies above 0." and first.status == "partly"


def test_a_mask_of_kv_heads_is_counted_in_kv_heads():
    found = scores()
    assert headline(run(mask=mask(found).to_kv()))[0].startswith("4 of 8 KV heads keep full attention")


def test_settings_and_probes_are_all_listed(tmp_path):
    said = text(write_report(tmp_path / "report.html", run()))
    assert "command hydralens run" in said and "seconds: scoring 12.35" in said and "tasks a, b" in said
    assert "products value reasoning 1 of 4 no: not solved" in said and "needle value retrieval 4 of 4 yes" in said


def test_the_file_is_whole_or_not_there(tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    target.write_text("before")
    with pytest.raises(InputError, match="knock-out frame lacks k"):
        write_report(target, run(knockout=clear_knockout().drop(columns="k")))
    assert target.read_text() == "before"
    monkeypatch.setattr("pathlib.Path.replace", lambda self, other: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(InputError, match="No space left on device"):
        write_report(target, run())
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"] and target.read_text() == "before"


def test_equal_runs_give_equal_pages(tmp_path):
    assert write_report(tmp_path / "a.html", run()).read_bytes() == write_report(tmp_path / "b.html", run()).read_bytes()
