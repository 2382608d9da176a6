"""Figures as files that open offline, with images where a browser is, and never a hang."""

import re
import shutil
import time
from pathlib import Path

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

import hydralens.figures.saving as saving
from hydralens import figures, statistics
from hydralens.errors import InputError
from hydralens.figures.style import finish
from tests.figures.examples import clear_knockout, clear_preview, heads, layers, many_prompts, scores, with_senders

FIGURES = {
    "head_heatmap": lambda: figures.head_heatmap(scores(model_id="<toy>")),
    "probe_facets": lambda: figures.probe_facets(scores()),
    "layer_profile": lambda: figures.layer_profile(scores()),
    "knockout_curve": lambda: figures.knockout_curve(clear_knockout()),
    "mask_preview": lambda: figures.mask_preview(clear_preview()),
    "role_maps": lambda: figures.role_maps(with_senders()),
    "volcano": lambda: figures.volcano(statistics.pooled(many_prompts())),
    "pairs_curve": lambda: figures.pairs_curve(statistics.pairs_curve(many_prompts(), 2, n_draws=2)),
    "stability_matrix": lambda: figures.stability_matrix(statistics.stability({"a": many_prompts(), "b": many_prompts()}, 2)),
    "layer_similarity": lambda: figures.layer_similarity(layers()),
    "head_similarity": lambda: figures.head_similarity(heads(0.3, 0.1)),
}


@pytest.fixture
def no_browser(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


def browser(folder: Path, script: str) -> None:
    folder.mkdir()
    program = folder / "chromium"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_returned_and_not_shown_and_reads_in_light_and_dark(name, monkeypatch):
    monkeypatch.setattr(go.Figure, "show", lambda *args, **options: pytest.fail("shown"))
    fig = FIGURES[name]()
    assert isinstance(fig, go.Figure)
    assert fig.layout.paper_bgcolor == fig.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert fig.layout.template.layout == go.layout.template.Layout()  # nothing white from a theme
    grey = int(fig.layout.font.color[1:3], 16) / 255
    luminance = ((grey + 0.055) / 1.055) ** 2.4
    assert 1.05 / (luminance + 0.05) > 4.2 and (luminance + 0.05) / 0.05 > 4.2  # on white, on black
    assert "\n" not in fig.layout.meta["finding"] and not fig.layout.meta["finding"].endswith(".")


def test_the_title_starts_below_the_upper_edge_however_long_it_is():
    """Plotly lowers one line by the height of its capitals (0.7 of 16 pixels) and several lines not at all."""
    short, long = (finish(go.Figure(), finding, "caption", height=100, max_width=500).layout for finding in ("short", "rather long " * 12))
    assert "<br>" not in short.title.text and long.title.text.count("<br>") == 2
    assert long.title.pad.t == pytest.approx(short.title.pad.t + 0.7 * 16, abs=1)
    assert long.margin.t - short.margin.t == 2 * 20 and long.height - short.height == 2 * 20


def test_html_opens_offline_beside_one_copy_of_plotly(tmp_path, no_browser):
    written = [figures.save_figure(make(), tmp_path / "figures" / name) for name, make in FIGURES.items()]
    assert [path.name for paths in written for path in paths] == [f"{name}.html" for name in FIGURES]
    assert (tmp_path / "figures" / "plotly.min.js").read_text(encoding="utf-8") == get_plotlyjs()
    for name in FIGURES:
        page = (tmp_path / "figures" / f"{name}.html").read_text(encoding="utf-8")
        assert re.findall(r'src="([^"]*)"', page) == ["plotly.min.js"]
        assert "http" not in page and len(page) < 100_000
    assert sorted(p.suffix for p in (tmp_path / "figures").iterdir()) == [".html"] * len(FIGURES) + [".js"]


def test_an_old_plotly_in_the_folder_is_replaced(tmp_path, no_browser):
    (tmp_path / "plotly.min.js").write_text("old")
    figures.save_figure(FIGURES["layer_profile"](), tmp_path / "one")
    assert (tmp_path / "plotly.min.js").stat().st_size > 1_000_000


def test_a_browser_that_hangs_or_fails_costs_only_the_image(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SECONDS_TO_START", 4)
    monkeypatch.setattr(saving, "SECONDS_A_FIGURE", 0)
    for name, script in (("hangs", "sleep 600"), ("fails", "exit 1")):
        browser(tmp_path / name, script)
        monkeypatch.setenv("PATH", f"{tmp_path / name}:/bin:/usr/bin")
        monkeypatch.setenv("BROWSER_PATH", str(tmp_path / name / "chromium"))
        start = time.monotonic()
        written = figures.save_figure(FIGURES["layer_profile"](), tmp_path / "out" / name)
        assert [path.suffix for path in written] == [".html"] and time.monotonic() - start < 8


@pytest.mark.skipif(not any(map(shutil.which, saving.BROWSERS)), reason="no browser to export images with")
def test_images_lie_beside_the_pages(tmp_path):
    written = figures.save_figures({name: FIGURES[name]() for name in ("layer_profile", "layer_similarity")}, tmp_path)
    assert [path.name for path in written] == ["layer_profile.html", "layer_similarity.html", "layer_profile.png", "layer_similarity.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[2:])


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, no_browser):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose a writable folder"):
        figures.save_figure(FIGURES["layer_profile"](), tmp_path / "file" / "figure")
