"""Each layer's heads: how unequal they are, and how many are critical or replaceable."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hydralens.figures.findings import direct, quantity
from hydralens.figures.style import BLUE, GRID, ORANGE, array, finish, listed
from hydralens.profiles import head_profile
from hydralens.scores import HeadScores, all_probes

PALE = "#9cc4ec"  # between the blue of critical heads and the grey of replaceable ones, on white and on black


def layer_profile(scores: HeadScores) -> go.Figure:
    """How unequal the heads of each layer are (Gini), and how many are critical, replaceable or in between (HydraHead, Table 16)."""
    name = quantity(next(iter(all_probes(direct(scores)).values())))
    profile = head_profile(scores)
    layers, (n_layers, n_heads) = profile.to_frame(), profile.importance.shape
    fig = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=["Gini of head importance", "heads"])
    hover = "layer %{y}: Gini %{x:.3f}<extra></extra>"
    dots = go.Scatter(x=array(profile.gini), y=layers["layer"], mode="markers", marker={"color": ORANGE, "size": 8}, hovertemplate=hover, showlegend=False)
    fig.add_trace(dots, row=1, col=1)
    kinds = {"critical": ("n_critical", BLUE), "in between": ("n_between", PALE), "replaceable": ("n_replaceable", GRID)}
    for kind, (column, color) in kinds.items():
        hover = f"layer %{{y}}: %{{x}} of {n_heads} heads {kind}<extra></extra>"
        bar = go.Bar(x=layers[column], y=layers["layer"], orientation="h", marker_color=color, name=kind, hovertemplate=hover)
        fig.add_trace(bar, row=1, col=2)
    fig.update_xaxes(range=[0, 1], row=1, col=1)
    fig.update_xaxes(range=[0, n_heads], tickformat="d", row=1, col=2)
    fig.update_yaxes(range=[n_layers - 0.5, -0.5], tick0=0, dtick=max(1, 2 ** int(np.ceil(np.log2(n_layers / 32)))), ticks="")
    fig.update_yaxes(title="layer", col=1)
    fig.update_annotations(font_size=12)
    height = int(np.clip(17 * n_layers, 220, 900)) + 60
    fig.update_layout(barmode="stack", bargap=0.25, legend={"orientation": "h", "y": -50 / height, "yanchor": "top", "x": 0.52, "traceorder": "normal"})
    larger = ", whichever is larger" if len(direct(scores)) > 1 else ""
    caption = (
        f"{scores.model.id}: importance = mean {'direct effect' if name == 'IE' else name} over the probes of {listed(list(direct(scores)))}{larger}; "
        f"critical from {profile.critical_from:g}, replaceable below {profile.replaceable_below:g}; negative values as 0. "
        f"Gini 0: all {n_heads} heads alike; {(n_heads - 1) / n_heads:.2f}: one head has it all."
    )
    return finish(fig, profile.finding, caption, height=height, max_width=860, min_width=340, headroom=20)
