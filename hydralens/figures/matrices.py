"""Square similarity matrices: layers, and heads in the order of their layers (HydraHead Fig. 2b and its head-wise counterpart)."""

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from hydralens.figures.style import array, colorbar, finish, limit, number
from hydralens.similarity import Similarity

MOST_CELLS = 768  # cells a side: beyond this, neighbouring heads of a layer are averaged
CLIP_PERCENTILE = 99.5


def layer_similarity(sim: Similarity) -> go.Figure:
    """Layer by layer; similar layers form blocks along the diagonal."""
    matrix, n = sim.matrix.detach().float().cpu(), len(sim.labels)
    near = matrix.diagonal(1).mean().item()
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    far = matrix[distance >= max(1, n // 2)].mean().item()
    finding = f"Neighbouring layers have similarity {number(near)} on average, layers at least half the depth apart {number(far)}"
    return _square(sim, matrix, sim.labels, [(i, label) for i, label in enumerate(sim.labels)], finding, "")


def head_similarity(sim: Similarity) -> go.Figure:
    """Head by head, heads ordered by layer; layers would show as blocks along the diagonal if their heads were alike.

    Above 768 heads, neighbouring heads of a layer are averaged, and the caption says how many.
    """
    within, between = sim.mean_within_layer, sim.mean_between_layers
    n_layers = int(sim.layers.max()) + 1
    n_heads = len(sim.labels) // n_layers
    # Means would hide the diagonal's ones in cells of several heads, but they are what keeps a large model's page small.
    pooled = next(size for size in range(1, n_heads + 1) if n_heads % size == 0 and (len(sim.labels) // size <= MOST_CELLS or size == n_heads))
    matrix, labels = sim.matrix.detach().float().cpu(), sim.labels
    size = replace(sim, matrix=matrix.abs())  # cosines of both signs cancel in a mean
    note = f" Mean magnitude {number(size.mean_within_layer)} within a layer, {number(size.mean_between_layers)} between."
    if pooled > 1:
        n = len(labels) // pooled
        matrix = matrix.reshape(n, pooled, n, pooled).mean((1, 3))
        labels = [f"{labels[i * pooled]}..{(i * pooled + pooled - 1) % n_heads}" for i in range(n)]
        note += f" Each cell is the mean over {pooled} x {pooled} neighbouring heads."
    closer = "no more alike than" if within <= between + 0.01 else "more alike than"
    finding = f"Heads of one layer are {closer} heads of different layers: mean similarity {number(within)} within, {number(between)} between"
    ticks = [(layer * n_heads // pooled, f"L{layer}") for layer in range(n_layers)]
    return _square(sim, matrix, labels, ticks, finding, note)


def _square(sim: Similarity, matrix: Float[Tensor, "item item"], labels: list[str], ticks: list[tuple[int, str]], finding: str, note: str) -> go.Figure:
    off_diagonal = array(matrix[~torch.eye(len(matrix), dtype=torch.bool)])
    bound = min(1.0, limit(off_diagonal, CLIP_PERCENTILE))
    fig = go.Figure(
        go.Heatmap(
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
    )
    every = -(-len(ticks) // 10)
    shown = {"tickvals": [labels[i] for i, _ in ticks[::every]], "ticktext": [text for _, text in ticks[::every]], "showgrid": False, "ticks": ""}
    fig.update_xaxes(constrain="domain", tickangle=0, **shown)
    fig.update_yaxes(scaleanchor="x", constrain="domain", autorange="reversed", **shown)
    clipped = f" Colours stop at ±{bound:.2f} (the {CLIP_PERCENTILE}th percentile off the diagonal)." if bound < 0.995 else ""
    caption = f"{sim.metric[0].upper()}{sim.metric[1:]}, mean over {sim.n_tokens:,} tokens.{clipped}{note}"
    return finish(fig, finding, caption, height=640, max_width=760, square=True)
