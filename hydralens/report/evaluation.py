"""The page of an evaluation: the models in one table, then the figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from hydralens.evaluation.asking import share
from hydralens.files import write_text
from hydralens.report.page import HERE, embed, flat


def write_evaluation(path: str | Path, tables: Mapping[str, pd.DataFrame], figures: Mapping[str, go.Figure], settings: Mapping[str, Any]) -> Path:
    """Write ``evaluation.html``: one page that needs no other file and no network.

    Raises:
        InputError: the folder cannot be written.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    models = list(settings["models"])
    page = environment.get_template("evaluation.html.jinja").render(
        models=models,
        sentence=sentence(tables, models),
        rows=side_by_side(tables, models),
        figures=[embed(name, fig) for name, fig in figures.items()],
        settings=list(flat({name: value for name, value in settings.items() if name not in ("models", "cells")})),
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
    )
    return write_text(path, page)


def sentence(tables: Mapping[str, pd.DataFrame], models: list[str]) -> str:
    """The answer first."""
    if "evaluation" not in tables:
        return f"{' and '.join(models)}, measured alike."
    found = tables["evaluation"].assign(right=lambda frame: frame["accuracy"] * frame["n"]).groupby("model", sort=False)[["right", "n"]].sum()
    said = [f"{model} answers {row.right:.0f} of {row.n:.0f} prompts" for model, row in zip(found.index, found.itertuples(), strict=True)]
    return f"{', '.join(said)}."


def side_by_side(tables: Mapping[str, pd.DataFrame], models: list[str]) -> list[tuple[str, list[str]]]:
    """What was measured, and each model's value as text."""
    rows = []
    if "evaluation" in tables:
        frame = tables["evaluation"].assign(right=lambda frame: (frame["accuracy"] * frame["n"]).round())
        for (task, length), own in frame.groupby(["task", "length"], sort=False):
            sums = own.groupby("model", sort=False)[["right", "n"]].sum().reindex(models)
            rows.append((f"{task}, {length} tokens", [_share(int(row.right), int(row.n)) for row in sums.itertuples()]))
    if "perplexity" in tables:
        for (start, stop), own in tables["perplexity"].groupby(["position_from", "position_to"], sort=False):
            by = own.groupby("model").mean(numeric_only=True).reindex(models)
            rows.append((f"nats a token, positions {start} to {stop}", [_nll(row) for row in by.itertuples()]))
    if "speed" in tables:
        for length, own in tables["speed"].groupby("length", sort=False):
            by = own.set_index("model").reindex(models)
            rows.append((f"tokens/s reading {length} tokens", [f"{value:,.0f}" for value in by["prefill_tokens_per_s"]]))
            rows.append((f"tokens/s after {length} tokens", [f"{value:,.1f}" for value in by["decode_tokens_per_s"]]))
            rows.append((f"cache of {length} tokens, MiB", [f"{value / 2**20:.1f}" for value in by["cache_bytes"]]))
    return rows


def _share(right: int, n: int) -> str:
    """With the interval of all depths together."""
    found = share(right, n)
    return f"{right} of {n}, {found['accuracy']:.0%} [{found['ci_low']:.0%}, {found['ci_high']:.0%}]"


def _nll(row: Any) -> str:
    """Without an interval where there was one document."""
    return f"{row.nll:.3f}" if row.ci_low != row.ci_low else f"{row.nll:.3f} [{row.ci_low:.3f}, {row.ci_high:.3f}]"
