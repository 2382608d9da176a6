"""Models beside each other: retrieval by depth and length, and surprise by position."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hydralens.figures.findings import need_columns
from hydralens.figures.style import BLUE, GREY, ORANGE, colorbar, count, finish, percent

RETRIEVAL_COLUMNS = ("model", "task", "length", "depth", "n", "accuracy", "ci_low", "ci_high")
PERPLEXITY_COLUMNS = ("model", "position_from", "position_to", "nll", "ci_low", "ci_high", "n_documents")


def depth_heatmap(frame: pd.DataFrame) -> go.Figure:
    """Accuracy by depth (down) and length (across), a column a task and a row a model.

    Args:
        frame: columns model, task, length, depth, n, accuracy, ci_low, ci_high; rows without a depth are left out.

    Raises:
        InputError: a column is missing.
    """
    need_columns(frame, RETRIEVAL_COLUMNS, "retrieval")
    frame = frame[frame["depth"].notna()]
    models, tasks = (list(dict.fromkeys(frame[name])) for name in ("model", "task"))
    lengths, depths = (sorted(set(frame[name])) for name in ("length", "depth"))
    titles = [task.removeprefix("niah_") for task in tasks] + [""] * (len(models) - 1) * len(tasks)
    fig = make_subplots(len(models), len(tasks), subplot_titles=titles, shared_xaxes=True, shared_yaxes=True, horizontal_spacing=0.02, vertical_spacing=0.06)
    for (row, model), (column, task) in ((r, c) for r in enumerate(models, 1) for c in enumerate(tasks, 1)):
        own = frame[(frame["model"] == model) & (frame["task"] == task)].set_index(["depth", "length"])
        cells = (
            own[["accuracy", "ci_low", "ci_high", "n"]].reindex(pd.MultiIndex.from_product([depths, lengths])).to_numpy().reshape(len(depths), len(lengths), 4)
        )
        fig.add_trace(
            go.Heatmap(
                z=cells[:, :, 0],
                x=[str(length) for length in lengths],
                y=[percent(depth) for depth in depths],
                customdata=cells[:, :, 1:],
                hovertemplate=f"{model}, {task}<br>%{{x}} tokens, needle at %{{y}}: %{{z:.0%}} "
                "[%{customdata[0]:.0%}, %{customdata[1]:.0%}] of %{customdata[2]:d}<extra></extra>",
                texttemplate="%{z:.0%}",
                textfont={"color": "#1f2430"},
                coloraxis="coloraxis",
                xgap=1,
                ygap=1,
            ),
            row=row,
            col=column,
        )
    fig.update_layout(coloraxis={"colorscale": [[0, "#f1ede8"], [1, BLUE]], "cmin": 0, "cmax": 1, "colorbar": colorbar("accuracy")})
    fig.update_xaxes(type="category", showgrid=False, ticks="")
    fig.update_xaxes(title="tokens", row=len(models))
    fig.update_yaxes(type="category", autorange="reversed", showgrid=False, ticks="")
    for row, model in enumerate(models, 1):
        fig.update_yaxes(title=f"{model}<br>depth", row=row, col=1)
    fig.update_annotations(font_size=12)
    pooled = frame.assign(right=frame["accuracy"] * frame["n"]).groupby("model", sort=False)[["right", "n"]].sum()
    said = [f"{model} answers {percent(row.right / row.n)}" for model, row in zip(pooled.index, pooled.itertuples(), strict=True)]
    caption = f"{count(int(pooled['n'].iloc[0]), 'prompt')} a model; a prompt is right when every token of the answer is. Intervals on hover."
    height = len(models) * (34 * len(depths) + 40)
    return finish(fig, ", ".join(said), caption, height=max(260, height), max_width=1100, min_width=130 * len(tasks), headroom=26)


def perplexity_curve(frame: pd.DataFrame) -> go.Figure:
    """Negative log-likelihood of the next token by position, a line a model, with its 95 % interval over documents.

    Args:
        frame: columns model, position_from, position_to, nll, ci_low, ci_high, n_documents.

    Raises:
        InputError: a column is missing.
    """
    need_columns(frame, PERPLEXITY_COLUMNS, "perplexity")
    fig = go.Figure()
    models = list(dict.fromkeys(frame["model"]))
    for model, color in zip(models, (GREY, ORANGE, BLUE, *["#5a9e6f"] * len(models)), strict=False):
        own = frame[frame["model"] == model]
        at = np.sqrt(own["position_from"] * own["position_to"])
        names = [f"{a} to {b}" for a, b in zip(own["position_from"], own["position_to"], strict=True)]
        fig.add_trace(
            go.Scatter(
                x=at,
                y=own["nll"],
                error_y={"array": own["ci_high"] - own["nll"], "arrayminus": own["nll"] - own["ci_low"], "thickness": 1},
                customdata=names,
                mode="lines+markers",
                line={"color": color, "width": 2},
                name=model,
                hovertemplate=f"{model}, positions %{{customdata}}: %{{y:.3f}} nats<extra></extra>",
            )
        )
    fig.update_xaxes(type="log", title="positions", showgrid=False, tickvals=at, ticktext=names)
    fig.update_yaxes(title="nats a token")
    fig.update_layout(legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0})
    last = frame.groupby("model", sort=False).last()
    said = [f"{model} {row.nll:.2f}" for model, row in zip(last.index, last.itertuples(), strict=True)]
    finding = f"Nats a token at positions {int(last['position_from'].iloc[0])} to {int(last['position_to'].iloc[0])}: {', '.join(said)}"
    return finish(fig, finding, f"{count(int(frame['n_documents'].iloc[0]), 'document')}; 95% intervals over documents.", height=360, max_width=860)
