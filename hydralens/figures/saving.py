"""Figures as files: HTML that opens offline, and a PNG beside it where an image exporter is there."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from html import escape
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from hydralens.files import write_atomically, write_text

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS_TO_START, SECONDS_A_FIGURE = 30, 10
SETTINGS = {"responsive": True, "displayModeBar": False}  # the bar would lie on the title; dragging zooms and a double click goes back

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>body {{ margin: 1rem auto; max-width: {width}px }} @media (prefers-color-scheme: dark) {{ body {{ background: #14161a }} }}</style>
</head>
<body>
{figure}
</body>
</html>
"""

# Runs by itself, so that a browser that hangs can be ended with everything it started.
EXPORT = """
import json, sys
import kaleido
kaleido.write_fig_from_object_sync(json.load(sys.stdin), kopts={"mathjax": False})
"""


def save_figure(fig: go.Figure, path_without_suffix: str | Path) -> list[Path]:
    """Write ``.html`` (with one ``plotly.min.js`` in its folder) and, where kaleido finds a browser, ``.png``; returns the files written.

    Raises:
        InputError: the folder cannot be written.
    """
    path = Path(path_without_suffix)
    return save_figures({path.name: fig}, path.parent)


def save_figures(figures: Mapping[str, go.Figure], folder: str | Path) -> list[Path]:
    """``save_figure`` of several figures, named by the keys, with one browser for all images.

    Raises:
        InputError: the folder cannot be written.
    """
    folder = Path(folder)
    script = folder / "plotly.min.js"
    if not script.exists() or script.stat().st_size != len(get_plotlyjs().encode()):
        write_text(script, get_plotlyjs())
    written = []
    for name, fig in figures.items():
        meta = fig.layout.meta
        figure = plotly.io.to_html(fig, full_html=False, include_plotlyjs="directory", div_id="figure", config=SETTINGS)
        written.append(write_text(folder / f"{name}.html", PAGE.format(title=escape(meta["finding"]), width=meta["max_width"], figure=figure)))
    return written + _save_images(figures, folder)


def _save_images(figures: Mapping[str, go.Figure], folder: Path) -> list[Path]:
    if importlib.util.find_spec("kaleido") is None or not any(map(shutil.which, BROWSERS)):
        return []
    with tempfile.TemporaryDirectory() as scratch:
        jobs = [
            {
                "fig": json.loads(fig.to_json()),
                "path": f"{scratch}/{name}.png",
                "opts": {"format": "png", "width": fig.layout.meta["max_width"], "height": fig.layout.height, "scale": 2},
            }
            for name, fig in figures.items()
        ]
        _run(EXPORT, json.dumps(jobs), SECONDS_TO_START + SECONDS_A_FIGURE * len(jobs))
        made = [(Path(job["path"]), folder / f"{name}.png") for job, name in zip(jobs, figures, strict=True)]
        return [write_atomically(target, lambda temporary, source=source: shutil.copyfile(source, temporary)) for source, target in made if source.exists()]


def _run(program: str, text: str, seconds: int) -> None:
    """Run ``program`` on ``text``; after ``seconds`` it and every process it started are killed. Its failure is not ours."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        process.communicate(text, timeout=seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
