"""Square similarity matrices: layers, heads in the order of their layers, and both side by side (HydraHead Fig. 2b and its head-wise counterpart)."""

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from plotly.subplots import make_subplots
from torch import Tensor
from torch.nn import functional as F

from hydralens.figures.style import INK, array, colorbar, count, finish, limit, number
from hydralens.similarity import Blocks, BlockStructure, Similarity

MOST_CELLS = 768  # cells a side: beyond this, neighbouring heads are averaged
CLIP_PERCENTILE = 99.5


def layer_similarity(sim: Similarity) -> go.Figure:
    """Layer by layer; similar layers form blocks along the diagonal."""
    matrix, n = _plain(sim), len(sim.labels)
    near = matrix.diagonal(1).nanmean().item()
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    far = matrix[distance >= max(1, n // 2)].nanmean().item()
    finding = f"Neighbouring layers have similarity {number(near)} on average, layers at least half the depth apart {number(far)}"
    return _square(matrix, sim.labels, list(enumerate(sim.labels)), finding, f"{settings(sim)}.")


def head_similarity(sim: Similarity) -> go.Figure:
    """Head by head, heads ordered by layer; layers would show as blocks along the diagonal if their heads were alike.

    Above 768 heads, neighbouring heads of a layer are averaged, and the caption says how many.
    """
    within, between = sim.mean_within_layer, sim.mean_between_layers
    matrix, labels, ticks, note = _by_layer(sim)
    size = replace(sim, matrix=_plain(sim).abs())  # similarities of both signs cancel in a mean
    note = f" Mean magnitude {number(size.mean_within_layer)} within a layer, {number(size.mean_between_layers)} between.{note}"
    closer = "no more alike than" if within <= between + 0.01 else "more alike than"
    finding = f"Heads of one layer are {closer} heads of different layers: mean similarity {number(within)} within, {number(between)} between"
    return _square(matrix, labels, ticks, finding, f"{settings(sim)}.{note}")


def block_similarity(layers: Similarity, heads: Similarity, structure: BlockStructure) -> go.Figure:
    """Layers beside heads, on one page as in HydraHead Fig. 2; lines mark the blocks of layers where the test finds any.

    Args:
        structure: what ``similarity.block_structure(layers, heads)`` returns.
    """
    head_matrix, head_labels, head_ticks, note = _by_layer(heads)
    panels = [(_plain(layers), layers.labels, list(enumerate(layers.labels))), (head_matrix, head_labels, head_ticks)]
    fig = make_subplots(1, 2, horizontal_spacing=0.08, subplot_titles=[f"{count(len(layers.labels), 'layer')}", f"{count(len(heads.labels), 'head')}"])
    bounds = []
    for column, (matrix, labels, ticks) in enumerate(panels, 1):
        fig.add_trace(_map(matrix, labels), row=1, col=column)
        fig.data[-1].update(colorbar={"orientation": "h", "x": (0.23, 0.77)[column - 1], "y": -0.09, "yanchor": "top", "len": 0.3})
        bounds.append(fig.data[-1].zmax)
        axis = {"row": 1, "col": column}
        fig.update_xaxes(constrain="domain", tickangle=0, **_ticks(labels, ticks), **axis)
        fig.update_yaxes(scaleanchor="x" if column == 1 else "x2", constrain="domain", autorange="reversed", **_ticks(labels, ticks), **axis)
    if structure.layers.is_real:
        for start in structure.layers.starts[1:]:
            edge = {"type": "line", "line": {"color": INK, "width": 1.5, "dash": "dot"}, "row": 1, "col": 1}
            fig.add_shape(x0=start - 0.5, x1=start - 0.5, y0=-0.5, y1=len(layers.labels) - 0.5, **edge)
            fig.add_shape(y0=start - 0.5, y1=start - 0.5, x0=-0.5, x1=len(layers.labels) - 0.5, **edge)
    fig.update_annotations(font_size=12)
    lines = " (dotted lines)" if structure.layers.is_real else ""
    caption = (
        f"Left: {settings(layers)}. Blocks{lines} {_tested(structure.layers)}, distance taken out; p = {structure.ordered.p:.2g} against "
        f"{structure.ordered.against}. Right: {settings(heads)}. Layers {_tested(structure.heads)}; of magnitudes {structure.magnitudes.explained:.1%}, "
        f"p = {structure.magnitudes.p:.2g}. Colours stop at ±{bounds[0]:.2f} and ±{bounds[1]:.2f}.{note}"
    )
    return finish(fig, structure.finding, caption, height=500, max_width=1040, min_width=640, headroom=24)


# --- shared shapes -------------------------------------------------------------------------------------------------


def settings(sim: Similarity) -> str:
    """What was compared, as captions begin."""
    return sim.metric[0].upper() + sim.metric[1:] + (f", over {sim.n_tokens:,} tokens" if sim.n_tokens else "")


def pooled(matrix: Float[Tensor, "item item"], size: int) -> Float[Tensor, "cell cell"]:
    """Means over ``size x size`` neighbours, of pairs of different items only: with each item's likeness to itself, the diagonal would look like a block.

    The last cell takes what is left.
    """
    if size == 1:
        return matrix
    rest = -len(matrix) % size
    matrix = F.pad(matrix, (0, rest, 0, rest), value=torch.nan)
    known, n = matrix.isfinite().fill_diagonal_(False), len(matrix) // size

    def cells(values: Float[Tensor, "item item"]) -> Float[Tensor, "cell cell"]:
        return values.reshape(n, size, n, size).sum((1, 3))

    return cells(matrix.where(known, 0)) / cells(known)


def _plain(sim: Similarity) -> Float[Tensor, "item item"]:
    return sim.matrix.detach().float().cpu()


def _by_layer(sim: Similarity) -> tuple[Float[Tensor, "cell cell"], list[str], list[tuple[int, str]], str]:
    """Heads in the order of their layers, few enough to draw: matrix, labels, ticks, and what the caption says of it."""
    n_layers = int(sim.layers.max()) + 1
    n_heads = len(sim.labels) // n_layers
    size = next(size for size in range(1, n_heads + 1) if n_heads % size == 0 and (len(sim.labels) // size <= MOST_CELLS or size == n_heads))
    ticks = [(layer * n_heads // size, f"L{layer}") for layer in range(n_layers)]
    if size == 1:
        return _plain(sim), sim.labels, ticks, ""
    labels = [f"{sim.labels[start]}..{(start + size - 1) % n_heads}" for start in range(0, len(sim.labels), size)]
    return pooled(_plain(sim), size), labels, ticks, f" Each cell is the mean over {size} x {size} neighbouring heads, without each head's likeness to itself."


def _map(matrix: Float[Tensor, "item item"], labels: list[str]) -> go.Heatmap:
    off_diagonal = array(matrix[~torch.eye(len(matrix), dtype=torch.bool)])
    bound = min(1.0, limit(off_diagonal, CLIP_PERCENTILE))
    return go.Heatmap(
        z=np.round(array(matrix), 3),
        x=labels,
        y=labels,
        hovertemplate="%{y} and %{x}: %{z:.3f}<extra></extra>",
        colorscale="RdBu",
        zmid=0,
        zmin=-bound,
        zmax=bound,
        colorbar=colorbar("similarity"),
    )


def _ticks(labels: list[str], ticks: list[tuple[int, str]]) -> dict:
    every = -(-len(ticks) // 10)
    return {"tickvals": [labels[i] for i, _ in ticks[::every]], "ticktext": [text for _, text in ticks[::every]], "showgrid": False, "ticks": ""}


def _tested(blocks: Blocks) -> str:
    return f"explain {blocks.explained:.1%} of the variance, p = {blocks.p:.2g} against {blocks.n_draws} draws of {blocks.against}"


def _square(matrix: Float[Tensor, "item item"], labels: list[str], ticks: list[tuple[int, str]], finding: str, caption: str) -> go.Figure:
    fig = go.Figure(_map(matrix, labels))
    bound = fig.data[0].zmax
    fig.update_xaxes(constrain="domain", tickangle=0, **_ticks(labels, ticks))
    fig.update_yaxes(scaleanchor="x", constrain="domain", autorange="reversed", **_ticks(labels, ticks))
    clipped = f" Colours stop at ±{bound:.2f} (the {CLIP_PERCENTILE}th percentile off the diagonal)." if bound < 0.995 else ""
    return finish(fig, finding, f"{caption}{clipped}", height=640, max_width=760, square=True)
