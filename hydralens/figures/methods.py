"""Ways to choose heads, side by side: how far their scores agree, and what their masks keep at every ratio."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hydralens.errors import InputError
from hydralens.figures.findings import need_columns
from hydralens.figures.style import BLUE, GREY, ORANGE, count, finish, percent

AGREEMENT_COLUMNS = ("a", "b", "k", "spearman", "top_k_overlap")
SWEEP_COLUMNS = ("ratio", "method", "task", "accuracy", "accuracy_low", "accuracy_high")


def detector_agreement(frame: pd.DataFrame, reference: str = "restriction") -> go.Figure:
    """Method by method: below the diagonal the share of the top ``k`` heads in common, above it Spearman's correlation over all heads.

    Args:
        frame: columns a, b, k, spearman, top_k_overlap, one row for each two methods.
        reference: the method that the finding compares the others with, and by whose overlap they are ordered.

    Raises:
        InputError: a column is missing, or there is no row of the reference.
    """
    need_columns(frame, AGREEMENT_COLUMNS, "agreement")
    table = frame.set_index(["a", "b"])
    if reference not in set(frame["a"]):
        raise InputError(f"the agreement has no method {reference!r}; it has {', '.join(dict.fromkeys(frame['a']))}")
    own = frame[(frame["a"] == reference) & (frame["b"] != reference)].sort_values("top_k_overlap", ascending=False)
    names, k = [reference, *own["b"]], int(frame["k"].iloc[0])
    cells = np.full((len(names), len(names)), np.nan)
    for row, a in enumerate(names):
        for column, b in enumerate(names):
            if row != column:
                cells[row, column] = table.loc[(a, b), "spearman" if column > row else "top_k_overlap"]
    fig = go.Figure(
        go.Heatmap(
            z=cells,
            x=names,
            y=names,
            text=[["" if np.isnan(value) else f"{value:.2f}" for value in row] for row in cells],
            texttemplate="%{text}",
            hovertemplate="%{y} and %{x}: %{z:.2f}<extra></extra>",
            colorscale="RdBu",
            zmid=0,
            zmin=-1,
            zmax=1,
            xgap=1,
            ygap=1,
            showscale=False,
        )
    )
    fig.update_xaxes(constrain="domain", showgrid=False, ticks="", type="category", tickangle=-45)
    fig.update_yaxes(scaleanchor="x", constrain="domain", autorange="reversed", showgrid=False, ticks="", type="category")
    best, least = own.iloc[0], own.iloc[-1]
    finding = (
        f"{best['b']} shares most of its top {k} heads with {reference} ({percent(best['top_k_overlap'])}), "
        f"{least['b']} least ({percent(least['top_k_overlap'])})"
    )
    caption = f"Below the diagonal: share of the top {k} heads in common. Above: Spearman's correlation over all heads."
    return finish(fig, finding, caption, height=int(np.clip(52 * len(names), 300, 760)), max_width=860, square=True)


def ratio_sweep(frame: pd.DataFrame, reference: str = "restriction") -> go.Figure:
    """Accuracy of each method's mask as fewer heads stay full, a panel a task; the reference in orange, ``random`` in grey.

    Args:
        frame: columns ratio (``"7:1"``; ``""`` for what has none: all heads, no head), method, task, accuracy, accuracy_low, accuracy_high.
        reference: the method that the finding is about.

    Raises:
        InputError: a column is missing, or the reference has no row.
    """
    need_columns(frame, SWEEP_COLUMNS, "sweep")
    if reference not in set(frame["method"]):
        raise InputError(f"the sweep has no method {reference!r}; it has {', '.join(dict.fromkeys(frame['method']))}")
    tasks, swept = list(dict.fromkeys(frame["task"])), frame[frame["ratio"] != ""]
    ratios = sorted(set(swept["ratio"]), key=lambda ratio: float(ratio.split(":")[0]))
    means = swept.groupby(["method", "ratio"])["accuracy"].mean()
    methods = sorted(set(swept["method"]), key=lambda method: (method == reference, means[method].mean()))  # the reference is drawn last, on top
    fig = make_subplots(1, len(tasks), subplot_titles=tasks, shared_yaxes=True, horizontal_spacing=0.04)
    for column, task in enumerate(tasks, 1):
        for method in methods:
            own = swept[(swept["task"] == task) & (swept["method"] == method)].set_index("ratio").loc[ratios]
            color = ORANGE if method == reference else GREY if method.startswith("random") else BLUE
            fig.add_trace(
                go.Scatter(
                    x=ratios,
                    y=own["accuracy"],
                    error_y={"array": own["accuracy_high"] - own["accuracy"], "arrayminus": own["accuracy"] - own["accuracy_low"], "thickness": 1},
                    mode="lines+markers",
                    line={"color": color, "width": 3 if method == reference else 1.5, "dash": "dot" if method.startswith("random") else "solid"},
                    opacity=1 if method == reference else 0.6,
                    name=method,
                    showlegend=False,
                    hovertemplate=f"{method}, %{{x}}: %{{y:.0%}}<extra></extra>",
                ),
                row=1,
                col=column,
            )
    fig.update_xaxes(title="linear heads : full heads", type="category", showgrid=False)
    fig.update_yaxes(range=[-0.04, 1.04], tickformat=".0%")
    fig.update_yaxes(title="accuracy", col=1)
    fig.update_annotations(font_size=12)
    last = means.xs(ratios[-1], level="ratio")
    others = last.drop(reference).sort_values()
    finding = f"At {ratios[-1]} {reference} keeps {percent(last[reference])} of the answers, the best other ({others.index[-1]}) {percent(others.iloc[-1])}"
    caption = f"{count(len(methods), 'method')}; orange: {reference}, blue: others, grey: random heads; 95% intervals. The title is about the mean over tasks."
    return finish(fig, finding, caption, height=380, max_width=1000, min_width=240 * len(tasks), headroom=24)
