"""An explorer of heads for notebooks: what a head looks at, what depends on it, and what it writes."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor, nn

from hydralens.detectors.rows import score_rows
from hydralens.detectors.writes import output_weight, pull_back
from hydralens.errors import InputError
from hydralens.figures.heads import head_heatmap
from hydralens.figures.saving import SETTINGS
from hydralens.models.forward import trace
from hydralens.models.lens import LensModel
from hydralens.patching.pairs import Pair, check_heads, unpad
from hydralens.probes.base import Probe
from hydralens.scores import HeadScores, all_probes, by_label

if TYPE_CHECKING:
    from ipywidgets import VBox

WRITTEN = 8  # tokens listed


@dataclass(frozen=True, eq=False)
class PromptView:
    """One clean prompt as all heads see it from the position that predicts the first answer token.

    Attributes:
        pair: the prompt, without padding.
        words: each token as text.
        attention: of the query at the read position, over all positions.
        z: every head's output there.
        written: the layers' attention outputs there, before a norm that follows attention.
        final: the residual stream there after the last layer.
    """

    pair: Pair
    words: list[str]
    attention: Float[Tensor, "layer head pos"]
    z: Float[Tensor, "layer head d_head"]
    written: Float[Tensor, "layer d_model"]
    final: Float[Tensor, "d_model"]


@torch.no_grad()
def view_prompt(model: LensModel, probe: Probe, pair: int = 0) -> PromptView:
    """Two forwards; of attention, only the rows of one query are ever made.

    Raises:
        InputError: there is no such pair, or the model is a hybrid, whose linear heads have no attention to show.
    """
    if not 0 <= pair < probe.n_pairs:
        raise InputError(f"pair {pair} is not there: {probe.label} has pairs 0..{probe.n_pairs - 1}")
    own = unpad(probe, pair, model.device)
    read = own.read[:1]
    rows, _ = score_rows(model.anatomy, own.clean, read, lambda rows, v, index, which: rows)
    run = trace(model.anatomy, own.clean[None], read, ("z",))
    written = torch.stack([layer.o(z[0].flatten(-2))[0] for layer, z in zip(model.anatomy.layers, run.z, strict=True)])
    words = [str(id) for id in own.clean.tolist()] if model.tokenizer is None else [model.tokenizer.decode([id]) for id in own.clean.tolist()]
    return PromptView(own, words, rows[:, 0], torch.stack([z[0, 0] for z in run.z]), written, run.final[0, 0])


@torch.no_grad()
def written_tokens(model: LensModel, view: PromptView, layer: int, head: int, k: int = WRITTEN) -> pd.DataFrame:
    """What a head adds to the logits directly, every norm on the way with the scale it has in this run.

    Returns:
        Columns token and logit: the ``k`` tokens it raises most, and the ``k`` it lowers most, highest first.
    """
    check_heads([(layer, head)], model.info.n_layers, model.info.n_heads)
    anatomy = model.anatomy
    part = view.z[layer, head].float() @ output_weight(anatomy.layers[layer])[head].float()
    after = anatomy.layers[layer].post_attention_norm
    if after is not None:
        part = carried(after, view.written[layer], part)
    logits = carried(anatomy.final_norm, view.final, part) @ anatomy.unembed.weight.float().T
    ranked = logits.argsort(descending=True)
    ranked = torch.cat((ranked[:k], ranked[-k:]))
    words = [str(id) if model.tokenizer is None else model.tokenizer.decode([id]) for id in ranked.tolist()]
    return pd.DataFrame({"token": words, "logit": logits[ranked].cpu()})


def carried(norm: nn.Module, x: Float[Tensor, "d_model"], part: Float[Tensor, "d_model"]) -> Float[Tensor, "d_model"]:
    """A part of x through a norm whose scale is held at what it is for x; parts that sum to x give norm(x), but for a bias."""
    if isinstance(norm, nn.LayerNorm):
        x = x.float()
        return (part - part.mean()) * (x.var(unbiased=False) + norm.eps).rsqrt() * norm.weight.float()
    return pull_back(norm, x[None], part[None])[0]  # an RMS norm of fixed scale is a diagonal matrix


def head_effects(scores: HeadScores, layer: int, head: int) -> pd.DataFrame:
    """Columns probe, effect, ci_low, ci_high, n_pairs: what every probe says of one head, largest first."""
    rows = []
    for label, effect in all_probes(scores.made_from).items():
        low, high = effect.interval()
        values = (float(x[layer, head]) for x in (effect.values, low, high))
        rows.append(dict(zip(("probe", "effect", "ci_low", "ci_high"), (label, *values), strict=True)) | {"n_pairs": effect.n_pairs})
    return pd.DataFrame(rows).sort_values("effect", ascending=False, ignore_index=True)


def head_explorer(model: LensModel, probes: Sequence[Probe], scores: HeadScores) -> "VBox":
    """A map of all heads; a click (or the two menus) chooses one, and below it stand its attention from the answer back to the prompt, its effect
    on every probe, and the tokens it raises and lowers.

    Needs a notebook with ipywidgets: ``pip install 'hydralens[notebooks]'``.

    Raises:
        InputError: ipywidgets is not installed, there is no probe, or the scores are another model's.
    """
    try:
        import anywidget  # noqa: F401  (plotly's FigureWidget is one)
        import ipywidgets as w
    except ImportError:
        raise InputError("head_explorer needs ipywidgets and anywidget: pip install 'hydralens[notebooks]'") from None
    if scores.model != model.info:
        raise InputError(f"the scores are of {scores.model.id} and the model is {model.info.id}; pass scores of this very model")
    labelled = by_label(probes)
    view = lru_cache(maxsize=16)(lambda label, pair: view_prompt(model, labelled[label], pair))
    first = scores.top(1)[0]
    strongest = max(float(effect.values.abs().nan_to_num().max()) for effect in all_probes(scores.made_from).values())
    figure = go.FigureWidget(head_heatmap(scores))
    about = figure.layout.meta
    # As HTML, title and caption wrap in a narrow window; in the figure they are drawn before the page can measure them, one on the other.
    title = w.HTML(f'<div style="line-height:1.5"><b>{html.escape(about["finding"])}</b><br>{html.escape(about["caption"])}</div>')
    figure.update_layout(title=None, margin={"t": 30}, height=about["height"] + 30)
    figure._config = figure._config | SETTINGS
    figure.layout.shapes = [{"type": "rect", "line": {"color": "#d9722e", "width": 3}}]
    wide = {"layout": w.Layout(width="260px"), "style": {"description_width": "50px"}}
    narrow = {"layout": w.Layout(width="120px"), "style": {"description_width": "50px"}}
    probe = w.Dropdown(options=list(labelled), description="probe", **wide)
    pair = w.Dropdown(options=range(labelled[probe.value].n_pairs), description="pair", **narrow)
    layer = w.Dropdown(options=range(model.info.n_layers), value=first[0], description="layer", **narrow)
    head = w.Dropdown(options=range(model.info.n_heads), value=first[1], description="head", **narrow)
    prompt, effects, written = w.HTML(), w.HTML(), w.HTML()

    def show(_=None) -> None:
        if pair.value is None:  # while its menu is being changed
            return
        at, seen = (layer.value, head.value), view(probe.value, pair.value)
        figure.layout.shapes[0].update(x0=at[1] - 0.5, x1=at[1] + 0.5, y0=at[0] - 0.5, y1=at[0] + 0.5)
        prompt.value = _prompt_html(seen, *at)
        effects.value = _effects_html(head_effects(scores, *at), strongest)
        written.value = _written_html(written_tokens(model, seen, *at))

    def other_probe(change) -> None:
        pair.options = range(labelled[change.new].n_pairs)

    def clicked(_, points, __) -> None:
        if points.ys:
            layer.value, head.value = int(points.ys[0]), int(points.xs[0])

    figure.data[0].on_click(clicked)
    probe.observe(other_probe, "value")
    for menu in (probe, pair, layer, head):
        menu.observe(show, "value")
    show()
    wrap = {"layout": w.Layout(flex_flow="row wrap")}
    return w.VBox([title, figure, w.HBox([layer, head, probe, pair], **wrap), prompt, w.HBox([effects, written], **wrap)])


# --- HTML ----------------------------------------------------------------------------------------------------------

_TABLE = "border-collapse:collapse;margin:4px 40px 4px 0;font-size:13px"


def _prompt_html(view: PromptView, layer: int, head: int) -> str:
    """Tokens with a background as strong as the attention they get; the needle is underlined, the query framed."""
    weights = view.attention[layer, head].float().cpu()
    strongest = float(weights.max())
    read, (start, stop) = int(view.pair.read[0]), view.pair.needle
    spans = []
    for index, (word, weight) in enumerate(zip(view.words, weights.tolist(), strict=True)):
        style = f"background:rgba(217,114,46,{weight / strongest:.3f});"
        style += "text-decoration:underline;" if start <= index < stop else ""
        style += "outline:2px solid #2f7fd1;" if index == read else ""
        text = html.escape(word).replace("\n", "↵<br>")
        spans.append(f'<span style="{style}" title="{weight:.4f}">{text}</span>')
    inside = float(weights[start:stop].sum())
    says = f"<b>L{layer}H{head}</b> looks from the framed token at the needle (underlined) with {inside:.0%} of its attention; "
    says += f"its strongest weight is {strongest:.3f}."
    text = f'<div style="max-height:220px;overflow:auto;white-space:pre-wrap;line-height:1.5;font-family:monospace;font-size:12px">{"".join(spans)}</div>'
    return f'<div style="line-height:1.5">{says}</div>{text}'


def _effects_html(effects: pd.DataFrame, strongest: float) -> str:
    """Bars as long as the effect is beside the strongest of all heads and probes."""
    rows = []
    for row in effects.itertuples():
        colour = "#2f7fd1" if row.effect >= 0 else "#d9722e"
        bar = f'<div style="width:{abs(row.effect) / strongest * 90:.0f}px;height:10px;background:{colour}"></div>'
        effect, low, high = (f"{round(value, 3) + 0.0:.3f}" for value in (row.effect, row.ci_low, row.ci_high))  # no minus before a zero
        cells = (html.escape(row.probe), effect, "" if row.n_pairs < 2 else f"[{low}, {high}]", bar)
        rows.append("<tr>" + "".join(f'<td style="padding-right:12px">{cell}</td>' for cell in cells) + "</tr>")
    return f'<b>Effect on each probe</b> (95% interval over pairs)<table style="{_TABLE}">{"".join(rows)}</table>'


def _written_html(written: pd.DataFrame) -> str:
    half = len(written) // 2
    cells = [(html.escape(repr(token)), f"{logit:+.2f}") for token, logit in written.itertuples(index=False)]
    raised, lowered = cells[:half], cells[half:][::-1]
    rows = "".join(
        f'<tr><td style="padding-right:12px">{up[0]}</td><td style="text-align:right;padding-right:24px">{up[1]}</td>'
        f'<td style="padding-right:12px">{down[0]}</td><td style="text-align:right">{down[1]}</td></tr>'
        for up, down in zip(raised, lowered, strict=True)
    )
    return f'<b>Tokens it raises and lowers</b> (logits, directly)<table style="{_TABLE}">{rows}</table>'
