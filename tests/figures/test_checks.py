"""Knock-out and preview: what is drawn, and verdicts that are honest both ways."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.figures import knockout_curve, mask_preview
from hydralens.figures.findings import preview, previews_by_task
from hydralens.statistics import positive_control
from tests.figures.examples import clear_knockout, clear_preview, knockout_frame, preview_frame, unclear_knockout, unclear_preview


def test_the_curve_shows_scored_heads_with_interval_and_every_random_draw():
    frame = clear_knockout()
    fig = knockout_curve(frame)
    traces = {trace.name: trace for trace in fig.data if trace.name}
    scored = traces["best-scored heads (band: 95% interval)"]
    assert list(scored.y) == [1.0, 0.95, 0.05, 0.0] and [k for k, _ in scored.customdata] == [0, 1, 4, 12]
    assert list(scored.x) == pytest.approx(np.log2([1, 2, 5, 13]))
    assert list(traces["random, draw 1"].y) == [1.0, 1.0, 1.0, 0.95]
    assert list(traces["random heads (mean; thin lines: draws)"].y) == pytest.approx([1.0, 1.0, 0.975, 0.95])
    (band,) = [trace for trace in fig.data if trace.fill == "toself"]
    top = frame[frame["order"] == "scored"]
    assert list(band.y) == pytest.approx([*top["ci_high"], *top["ci_low"][::-1]])
    assert list(fig.layout.xaxis.ticktext) == ["0", "1", "4", "12"]
    assert "20 prompts; 2 random draws" in fig.layout.meta["caption"] and "corrected for 3 sizes" in fig.layout.meta["caption"]


def test_rows_may_come_in_any_order():
    shuffled = clear_knockout().sample(frac=1, random_state=0)
    assert [list(t.y) for t in knockout_curve(shuffled).data] == [list(t.y) for t in knockout_curve(clear_knockout()).data]


def test_titles_follow_the_data():
    assert knockout_curve(clear_knockout()).layout.meta["finding"] == (
        "Removing the 4 best-scored heads takes accuracy from 100% to 5%; removing 4 random heads leaves 98%"
    )
    assert "does not clearly hurt more" in knockout_curve(unclear_knockout()).layout.meta["finding"]
    hopeless = knockout_curve(knockout_frame({0: 3, 4: 0}, {4: [3, 3]})).layout.meta["finding"]
    assert hopeless == "The whole model answers 15% of 20 prompts, too few to tell what removing heads costs"
    assert mask_preview(clear_preview()).layout.meta["finding"] == "The selected heads keep 70% of prompts right; random heads keep 11%, all heads 90%"
    assert "do not clearly beat random ones: 15% against 15%" in mask_preview(unclear_preview()).layout.meta["finding"]


@given(st.lists(st.integers(0, 20), min_size=2, max_size=2), st.lists(st.integers(0, 20), min_size=2, max_size=2))
def test_the_title_claims_damage_only_where_the_control_passed(scored, random):
    frame = knockout_frame({0: 20} | dict(zip((1, 4), scored, strict=True)), dict(zip((1, 4), ([n, n] for n in random), strict=True)))
    assert knockout_curve(frame).layout.meta["finding"].startswith("Removing the best-scored heads does not") != positive_control(frame).passed


@given(st.lists(st.integers(0, 20), min_size=3, max_size=3))
def test_random_heads_never_beat_themselves(right):
    curve = dict(zip((1, 4, 12), right, strict=True))
    assert not positive_control(knockout_frame({0: 20} | curve, {k: [n, n] for k, n in curve.items()})).passed
    assert not preview(preview_frame(right, [right, right], [20] * 3, [0] * 3)).beats_random


def test_the_preview_pools_prompts_over_tasks():
    result = preview(clear_preview())
    assert (result.selected, result.full, result.none, result.n_prompts, result.n_draws) == (0.7, 0.9, 0.05, 40, 2)
    assert result.random == pytest.approx((5 + 4) / 80)
    assert result.low < 0.7 < result.high and result.beats_random
    assert [(task.task, task.selected) for task in previews_by_task(clear_preview())] == [("task 0", 0.9), ("task 1", 0.5)]


def test_one_lucky_random_draw_is_enough_to_doubt():
    assert not preview(preview_frame([12], [[2], [13]], [20], [1])).beats_random


def test_the_preview_shows_every_mask_draw_and_interval_by_task():
    frame = clear_preview()
    fig = mask_preview(frame)
    traces = {trace.name: trace for trace in fig.data}
    assert list(traces) == ["all heads full", "selected", "random (2 draws)", "no head full"]
    assert list(traces["selected"].x) == [0.9, 0.5] and len(traces["random (2 draws)"].x) == 4
    assert len(set(traces["random (2 draws)"].y)) == 4  # equal draws do not hide each other
    chosen = frame[frame["mask"] == "selected"]
    assert list(traces["selected"].error_x.array) == pytest.approx(list(chosen["ci_high"] - chosen["accuracy"]))
    assert list(fig.layout.yaxis.ticktext) == ["task 0", "task 1"] and fig.layout.yaxis.range[0] > fig.layout.yaxis.range[1]
    assert fig.layout.meta["caption"].startswith("40 prompts in all")


def test_masks_that_were_not_run_are_left_out():
    frame = clear_preview()
    assert [trace.name for trace in mask_preview(frame[frame["mask"] != "no head full"]).data][-1] == "random (2 draws)"


@pytest.mark.parametrize(
    ("draw", "frame", "said"),
    [
        (knockout_curve, clear_knockout().drop(columns="k"), "knock-out frame lacks k"),
        (knockout_curve, clear_knockout().query("order == 'scored'"), "same k > 0"),
        (mask_preview, clear_preview().drop(columns=["task", "draw"]), "preview frame lacks draw and task"),
        (mask_preview, clear_preview().query("mask != 'random'"), 'needs rows with mask "selected" and "random"'),
    ],
)
def test_wrong_frames_are_named(draw, frame, said):
    with pytest.raises(InputError, match=said):
        draw(frame)
