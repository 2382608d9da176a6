"""The page: sentences, tables and figures put into the template."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
import plotly.io
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from hydralens import figures as draw
from hydralens.figures.findings import all_prompts, can_be_negative, quantity, too_few
from hydralens.files import write_text
from hydralens.report import answer
from hydralens.report.result import RunResult
from hydralens.similarity import block_structure
from hydralens.statistics import fewest_pairs, pairs_curve

HERE = Path(__file__).parent
# Dragging would fight with scrolling on a phone; the files in figures/ zoom.
STATIC = {"responsive": True, "displayModeBar": False}


def write_report(path: str | Path, run: RunResult, figures: Mapping[str, go.Figure] | None = None) -> Path:
    """Write ``report.html``: one page that needs no other file and no network.

    Args:
        figures: those of ``run_figures(run)``, where they are made already.

    Raises:
        InputError: the folder cannot be written, or a frame of ``run`` lacks a column.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("report.html.jinja").render(
        run=run,
        headline=answer.headline(run),
        verdicts=answer.verdicts(run),
        best_heads=answer.best_heads(run),
        kept_heads=answer.kept_heads(run),
        quantity=quantity(all_prompts(run.scores)),
        detectors=answer.DETECTORS,
        figures=[embed(name, fig) for name, fig in (run_figures(run) if figures is None else figures).items()],
        settings=list(flat(run.settings)),
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
    )
    return write_text(path, page)


def run_figures(run: RunResult) -> dict[str, go.Figure]:
    """The figures of a run under the names of their files, in the report's order; those whose data were measured."""
    scores, effects = run.scores, all_prompts(run.scores)
    made = {"head_heatmap": draw.head_heatmap(scores, run.mask)}
    if can_be_negative(effects) and not too_few(effects):
        made["volcano"] = draw.volcano(effects)
    made["probe_facets"] = draw.probe_facets(scores)
    if scores.senders:
        made["role_maps"] = draw.role_maps(scores)
    if run.knockout is not None:
        made["knockout_curve"] = draw.knockout_curve(run.knockout)
    if run.preview is not None:
        made["mask_preview"] = draw.mask_preview(run.preview)
    if fewest_pairs(scores) >= 4:  # two sizes of which there are two sets
        made["pairs_curve"] = draw.pairs_curve(pairs_curve(scores, run.mask.to_query().n_full))
    if run.layer_similarity is not None and run.head_similarity is not None:
        structure = block_structure(run.layer_similarity, run.head_similarity)
        made["block_similarity"] = draw.block_similarity(run.layer_similarity, run.head_similarity, structure)
    if run.layer_similarity is not None:
        made["layer_similarity"] = draw.layer_similarity(run.layer_similarity)
    if run.head_similarity is not None:
        made["head_similarity"] = draw.head_similarity(run.head_similarity)
    return made | {"layer_profile": draw.layer_profile(scores)}


def embed(name: str, fig: go.Figure) -> dict[str, Any]:
    """The figure without title and caption, which the page sets as text that wraps."""
    about = fig.layout.meta
    bare = go.Figure(fig)
    bare.update_layout(title=None, height=None, margin={"t": 12 + about["headroom"]}, dragmode=False)
    html = plotly.io.to_html(bare, full_html=False, include_plotlyjs=False, div_id=name, config=STATIC)
    return about | {"name": name, "height": about["height"] + 12 + about["headroom"] + 48, "html": Markup(html)}


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}: ")
        elif isinstance(value, list | tuple):
            yield name, ", ".join(map(str, value))
        else:
            yield name, f"{value:.4g}" if isinstance(value, float) else str(value)
