"""Heads in the order of their likeness, whatever layer they are of."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from hydralens.errors import InputError
from hydralens.figures.matrices import CLIP_PERCENTILE, MOST_CELLS, pooled, settings
from hydralens.figures.style import INK, array, colorbar, count, finish, limit, percent
from hydralens.similarity import Similarity


def head_clusters(sim: Similarity) -> go.Figure:
    """The head map reordered by hierarchical clustering, with the dendrogram above it and each head's layer beside it.

    If heads of one layer were alike, the strip of layers would be in pieces of one colour. Above 768 heads, neighbours in the new order are
    averaged, and the caption says how many.

    Raises:
        InputError: not a matrix of heads, or fewer than three heads can be compared.
    """
    known = sim.matrix.diagonal().isfinite()
    n = int(known.sum())
    if sim.kind != "head" or n < 3:
        raise InputError(f"head_clusters needs at least 3 heads that can be compared; this is a {sim.kind} similarity with {n} rows that can")
    matrix, layers = sim.matrix.detach().float().cpu()[known][:, known], sim.layers[known]
    distance = (1 - matrix).clamp(min=0).double().fill_diagonal_(0).numpy()
    merges = linkage(squareform(distance, checks=False), "average")
    order = leaves_list(merges)
    names = [sim.labels[i] for i in known.nonzero().flatten()[order].tolist()]
    size = -(-n // MOST_CELLS)
    cells = [names[start] if size == 1 else f"{names[start]} and {len(names[start + 1 : start + size])} more" for start in range(0, n, size)]

    fig = make_subplots(
        2, 2, specs=[[None, {}], [{}, {}]], column_widths=[0.03, 0.97], row_heights=[0.16, 0.84], horizontal_spacing=0.01, vertical_spacing=0.01
    )
    x, y = _branches(merges, order)
    fig.add_trace(go.Scatter(x=x, y=y, mode="lines", line={"color": INK, "width": 1}, hoverinfo="skip", showlegend=False), row=1, col=2)
    strip = go.Heatmap(
        z=layers.numpy()[order][:, None], text=np.array(names)[:, None], colorscale="Viridis", showscale=False, hovertemplate="%{text}<extra></extra>"
    )
    fig.add_trace(strip, row=2, col=1)
    drawn = pooled(matrix[order][:, order], size)
    bound = min(1.0, limit(array(drawn[~drawn.isnan().fill_diagonal_(True)]), CLIP_PERCENTILE))
    square = go.Heatmap(
        z=np.round(array(drawn), 3),
        x=cells,
        y=cells,
        hovertemplate="%{y} and %{x}: %{z:.3f}<extra></extra>",
        colorscale="RdBu",
        zmid=0,
        zmin=-bound,
        zmax=bound,
        colorbar=colorbar("similarity"),
    )
    fig.add_trace(square, row=2, col=2)
    fig.update_xaxes(showgrid=False, showticklabels=False, ticks="")
    fig.update_yaxes(showgrid=False, showticklabels=False, ticks="")
    fig.update_xaxes(range=[-0.5, n - 0.5], row=1, col=2)
    fig.update_yaxes(autorange="reversed", row=2)
    fig.update_yaxes(title="layer (dark: first, bright: last)", row=2, col=1)

    nearest = matrix.fill_diagonal_(-2).argmax(1)
    own = (layers[nearest] == layers).float().mean().item()
    mates = (layers[:, None] == layers).sum(1) - 1
    chance = (mates / (n - 1)).mean().item()
    finding = f"{percent(own)} of heads are most like a head of their own layer; by chance it would be {percent(chance)}"
    left_out = f" {count(len(known) - n, 'head')} without anything to compare left out." if n < len(known) else ""
    note = f" Each cell is the mean over {size} x {size} neighbours, without each head's likeness to itself." if size > 1 else ""
    caption = f"{settings(sim)}; average linkage on 1 − similarity. Colours stop at ±{bound:.2f}.{left_out}{note}"
    return finish(fig, finding, caption, height=760, max_width=800, min_width=420)


def _branches(merges: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The dendrogram as one line with gaps. (scipy's own drawing recurses, once for every level, which thousands of heads do not survive.)"""
    n = len(order)
    place, height = np.empty(2 * n - 1), np.zeros(2 * n - 1)
    place[order] = np.arange(n)
    x, y = np.full((n - 1, 5), np.nan), np.full((n - 1, 5), np.nan)
    for index, (a, b, distance, _) in enumerate(merges):
        left, right = sorted((int(a), int(b)), key=place.__getitem__)
        x[index, :4] = place[[left, left, right, right]]
        y[index, :4] = height[left], distance, distance, height[right]
        place[n + index], height[n + index] = (place[left] + place[right]) / 2, distance
    return x.ravel(), y.ravel()
