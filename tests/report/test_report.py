"""The report: the answer in words that follow the numbers, in one file that needs nothing else."""

import re
from dataclasses import replace
from html import unescape

import pandas as pd
import pytest
import torch
from plotly.offline import get_plotlyjs

from hydralens.errors import InputError
from hydralens.figures.findings import NEVER_NEGATIVE
from hydralens.report import RunResult, write_report
from hydralens.report.answer import DETECTORS, best_heads, headline, in_short, kept_heads, verdicts
from hydralens.scores import scores_of
from hydralens.scoring import METHODS
from tests.figures.examples import (
    clear_knockout,
    clear_preview,
    effects,
    heads,
    info,
    knockout_frame,
    layers,
    many_prompts,
    mask,
    preview_frame,
    scores,
    unclear_knockout,
    unclear_preview,
    with_senders,
)

SOLVED = [
    {"probe": "needle", "corruption": "value", "capability": "retrieval", "n_pairs": 4, "n_solved": 4, "used": True},
    {"probe": "products", "corruption": "value", "capability": "reasoning", "n_pairs": 4, "n_solved": 1, "used": False},
]


STABLE = {"k": 6, "n_splits": 20, "top_k_overlap": 5 / 6, "top_k_overlap_low": 4 / 6, "top_k_overlap_high": 1.0, "spearman": 0.4}


def run(found=None, **changes) -> RunResult:
    found = scores() if found is None else found
    whole = RunResult(
        found.model,
        found,
        mask(found),
        layers(),
        heads(0.3, 0.1),
        clear_knockout(),
        clear_preview(),
        SOLVED,
        STABLE,
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
        "The positive control passed: removing the heads found hurts. 5% of 20 prompts right without the 4 best-scored, 98% without 4 random, 100% with all",
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
    assert "Random heads are of the same layers, 2 draws; p is of Fisher's exact test, corrected for the 3 numbers" in said
    assert "So the scores find heads that this task cannot do without." in said
    assert "That is 40 prompts and 2 random draws, without training" in said
    assert "task 0 90% (random 12%, all heads 100%); task 1 50% (random 10%, all heads 80%)" in said
    assert status(run(many_prompts())) == ["yes"] * 4


def test_a_selection_that_does_not_beat_random_is_said_not_to(tmp_path):
    weak = run(knockout=unclear_knockout(), preview=unclear_preview(), stability=STABLE | {"top_k_overlap": 1 / 3, "spearman": 0.1})
    said = text(write_report(tmp_path / "report.html", weak))
    assert "The positive control failed: removing the heads found does not clearly hurt more than removing others. 80% of 20 prompts right" in said
    assert "Removing the best-scored heads does not clearly hurt more than removing random ones: 80% against 92% right at 12 heads" in said  # the figure agrees
    assert "The selected heads do not clearly beat random ones: 15% against 15% of prompts right (all heads 90%)." in said
    assert "2 of the top 6 heads agree (33%). That is the mean of 20 random splits, which give 67% to 100%." in said
    assert "use more pairs before relying on single heads" in said
    assert "cannot do without" not in said
    assert status(weak) == ["no", "no", "no", "no"]


def test_tasks_that_cannot_tell_masks_apart_are_exposed():
    easy = run(preview=preview_frame([20], [[19]], [20], [19]), knockout=knockout_frame({0: 4, 4: 0}, {4: [4]}))
    (*_, need, better) = verdicts(easy)
    assert need.sentences[0].startswith("The positive control cannot tell: the whole model answers 20% of 20 prompts") and need.status == "unknown"
    assert "With no full head at all 95% are right, so these prompts hardly need far context and cannot tell masks apart." in better.sentences


def test_what_was_not_measured_is_said_and_not_drawn(tmp_path):
    bare = run(layer_similarity=None, head_similarity=None, knockout=None, preview=None, stability={}, solved=[], settings={})
    path = write_report(tmp_path / "report.html", bare)
    assert text(path).count("Not measured in this run.") == 3 and status(bare) == ["no", "unknown", "unknown", "unknown"]
    assert "layer_similarity.csv" not in text(path) and "was not recorded" in text(path)
    assert figure_names(path) == ["head_heatmap", "probe_facets", "pairs_curve", "layer_profile"]


def figure_names(path) -> list[str]:
    return re.findall(r'<figure id="figure-(\w+)"', path.read_text())


def test_figures_are_drawn_where_their_data_suffice(tmp_path):
    found = with_senders()
    assert figure_names(write_report(tmp_path / "a.html", run(found)))[:3] == ["head_heatmap", "probe_facets", "role_maps"]
    assert figure_names(write_report(tmp_path / "b.html", run(many_prompts())))[:3] == ["head_heatmap", "volcano", "probe_facets"]
    three = found.select(lambda effect: effect.select(torch.arange(3)))
    assert "pairs_curve" not in figure_names(write_report(tmp_path / "c.html", run(three)))


def test_every_figure_has_a_title_a_caption_and_words_for_those_who_cannot_see_it(tmp_path):
    page = write_report(tmp_path / "report.html", run()).read_text(encoding="utf-8")
    names = ["head_heatmap", "probe_facets", "knockout_curve", "mask_preview", "pairs_curve"]
    names += ["block_similarity", "layer_similarity", "head_similarity", "layer_profile"]
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


def test_one_pair_has_no_interval_and_the_table_says_so(tmp_path):
    found = scores()
    single = {capability: {label: effect.select([0]) for label, effect in own.items()} for capability, own in found.receivers.items()}
    page = write_report(tmp_path / "report.html", run(replace(found, receivers=single)), {}).read_text()
    assert "one pair" in page and "nan to nan" not in page


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
    (*_, last) = verdicts(run(scores=found))[0].sentences
    assert last.startswith("For 2 of the 3 best heads the 95% interval of its largest IE lies above 0, with 4 pairs in each of 3 probes")


def test_heads_that_differ_from_zero_are_counted_over_all_prompts():
    """The mask keeps L3H4 and L2H1, which are sure, and L1H0, which is sure to be negative and scored by mistake."""
    found = many_prompts()
    found.composite[1, 0] = 0.1
    first = verdicts(run(found, mask=mask(found, k=3)))[0]
    assert first.sentences[0] == "2 of 3 kept heads with a signal lie clearly above zero, at a false-discovery rate of 5% over 24 heads."
    assert first.status == "partly"
    assert "over the 16 prompts of all probes together, by which 3 heads in all differ from zero, in either direction" in first.sentences[1]
    nothing = replace(found, composite=torch.zeros_like(found.composite).index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(1.0)))
    assert verdicts(run(nothing, mask=mask(nothing, k=1)))[0].status == "no"


def test_too_few_prompts_for_any_head_are_said_to_be():
    """Eight prompts of two names: p is at least 2/256, and one head of 24 needs 0.05 / 24."""
    first = verdicts(run())[0]
    assert first.status == "no" and first.sentences[0] == (
        "Too few pairs for any head to pass a test against zero: 8 prompts allow no p below 0.0078, and 24 heads are tested."
    )
    assert "a p of 0.0021, 5% divided by the number of heads; use more pairs." in first.sentences[1]
    assert verdicts(run(scores().select(lambda effect: effect.select(torch.arange(1)))))[0].status == "no"


def test_halves_that_cannot_be_made_are_named(tmp_path):
    single = scores().select(lambda effect: effect.select(torch.arange(1)))
    assert "Not measured: two halves need two pairs in every probe; use more." in text(write_report(tmp_path / "a.html", run(single, stability={})))


@pytest.mark.parametrize("method", DETECTORS)
def test_detectors_are_described_and_not_tested_where_a_test_says_nothing(method, tmp_path):
    measured = replace(effects({(3, 4): 0.4, (2, 1): 0.2}), mode=method, direction="none")
    found = replace(scores_of(info(), method, [measured], []), receivers=scores().receivers)
    said = text(write_report(tmp_path / "a.html", run(found)))
    assert f"the detector {method} , averaged over prompts and probes: a head with a high score {DETECTORS[method]}." in said
    unsigned = f"Values of {method} are never negative" in said
    assert unsigned == (method not in ("locos", "logit_attribution", "ablation_drop"))
    assert "Each probe is a set of prompt pairs" not in said and f"largest {method} score lies above 0" in said


def test_every_method_is_described():
    assert {"restriction", "paper", "direct", *DETECTORS} == set(METHODS) and set(NEVER_NEGATIVE) < set(METHODS)


@pytest.mark.parametrize(("right", "said"), [(6, "clearly fewer than the selected one"), (13, "these prompts cannot tell the two apart"), (20, "clearly more")])
def test_the_papers_mask_is_compared_with_the_selected_one(right, said):
    """Selected: 28 of 40."""
    preview = clear_preview()
    papers = preview[preview["mask"] == "selected"].assign(mask="paper's composite", accuracy=right / 20)
    (*_, better) = verdicts(run(with_senders(), preview=pd.concat([preview, papers])))
    assert f"A mask of the same size from HydraHead's composite of receivers and senders keeps {5 * right}%: {said}" in " ".join(better.sentences)


def test_in_short_is_the_answer_and_how_sure_it_is():
    lines = in_short(run(many_prompts()))
    assert lines[:3] == headline(run(many_prompts())) and len(lines) == 7
    assert lines[5].startswith("The positive control passed") and all("\n" not in line for line in lines)


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
