"""Does the selection mean anything: accuracy as heads are removed, and with only some heads seeing everything."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hydralens.figures.findings import FULL, KNOCKOUT_COLUMNS, NONE, PAPER, RANDOM, SELECTED, knockout_finding, need_columns, preview
from hydralens.figures.style import BLUE, GREY, ORANGE, count, finish
from hydralens.statistics import positive_control


def knockout_curve(frame: pd.DataFrame) -> go.Figure:
    """Accuracy as the top-k scored heads are ablated, beside random heads (HydraHead Fig. 9b).

    Args:
        frame: columns k, order (``"scored"`` or ``"random"``), draw, accuracy, ci_low, ci_high, margin, n_prompts.

    Raises:
        InputError: a column is missing, or scored and random rows share no ``k``.
    """
    need_columns(frame, KNOCKOUT_COLUMNS, "knock-out")
    control = positive_control(frame)
    fig = go.Figure()
    intact = frame[frame["k"] == 0].head(1)
    scored = pd.concat([intact, frame[(frame["order"] == "scored") & (frame["k"] > 0)].sort_values("k")])
    for _, draw in frame[(frame["order"] == "random") & (frame["k"] > 0)].groupby("draw"):
        draw = pd.concat([intact, draw.sort_values("k")])
        fig.add_trace(_curve(draw, f"random, draw {draw['draw'].iloc[-1]}", GREY, width=1, opacity=0.55, legend=False))
    mean = frame[(frame["order"] == "random") & (frame["k"] > 0)].groupby("k", as_index=False)[["accuracy", "margin"]].mean()
    fig.add_trace(_curve(pd.concat([intact, mean]), "random heads (mean; thin lines: draws)", GREY, width=3, dash="dot"))
    band = pd.concat([scored, scored[::-1]])
    edge = np.concatenate([scored["ci_high"], scored["ci_low"][::-1]])
    fig.add_trace(
        go.Scatter(
            x=_place(band["k"]), y=edge, mode="lines", fill="toself", fillcolor="rgba(217,114,46,0.18)", line={"width": 0}, hoverinfo="skip", showlegend=False
        )
    )
    fig.add_trace(_curve(scored, "best-scored heads (band: 95% interval)", ORANGE, width=3))
    ks = sorted(set(frame["k"]))
    fig.update_xaxes(title="heads removed", tickvals=_place(np.array(ks)), ticktext=[str(k) for k in ks], showgrid=False)
    fig.update_yaxes(title="accuracy", range=[-0.04, 1.04], tickformat=".0%")
    fig.update_layout(legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0})
    caption = (
        f"{count(control.n_prompts, 'prompt')}; {count(control.n_draws, 'random draw')} of as many heads; p = {control.p:.2g}, corrected for "
        f"{count(control.n_sizes, 'size')}. The axis is logarithmic in k + 1."
    )
    return finish(fig, knockout_finding(control), caption, height=400, max_width=860)


def mask_preview(frame: pd.DataFrame) -> go.Figure:
    """Accuracy when only the mask's heads see everything and all others sinks and a recent window, by task.

    Args:
        frame: columns mask (``"all heads full"``, ``"selected"``, ``"random"``, ``"no head full"``, and ``"paper's composite"`` where
            another method selected), draw, task, accuracy, ci_low, ci_high, margin, n_prompts.

    Raises:
        InputError: a column is missing, or there are no selected or no random rows.
    """
    result = preview(frame)
    tasks = list(dict.fromkeys(frame["task"]))
    looks = {
        FULL: (GREY, "diamond", -0.3),
        SELECTED: (BLUE, "circle", -0.15),
        PAPER: (BLUE, "circle-open", 0.0),
        RANDOM: (ORANGE, "circle-open", 0.15),
        NONE: (GREY, "x-thin-open", 0.3),
    }
    fig = go.Figure()
    for mask, (color, symbol, offset) in looks.items():
        rows = frame[frame["mask"] == mask]
        if rows.empty:
            continue
        # Draws of the same task stand beside each other, so that equal ones are all seen.
        draws = rows.groupby("task").cumcount() - (rows.groupby("task")["draw"].transform("size") - 1) / 2
        fig.add_trace(
            go.Scatter(
                x=rows["accuracy"],
                y=rows["task"].map(tasks.index) + offset + 0.035 * draws,
                error_x={
                    "array": rows["ci_high"] - rows["accuracy"],
                    "arrayminus": rows["accuracy"] - rows["ci_low"],
                    "color": color,
                    "thickness": 1.4,
                    "width": 0,
                },
                mode="markers",
                marker={"color": color, "symbol": symbol, "size": 7 if mask == RANDOM else 10, "line": {"width": 2, "color": color}},
                name=f"{mask} ({count(int(rows['draw'].nunique()), 'draw')})" if mask == RANDOM else mask,
                customdata=rows[["task", "ci_low", "ci_high", "margin", "n_prompts"]],
                hovertemplate=f"{mask}, %{{customdata[0]}}<br>%{{x:.0%}} [%{{customdata[1]:.0%}}, %{{customdata[2]:.0%}}] of %{{customdata[4]}} prompts"
                "<br>margin %{customdata[3]:.2f}<extra></extra>",
            )
        )
    fig.update_xaxes(title="accuracy", range=[-0.03, 1.03], tickformat=".0%")
    fig.update_yaxes(tickvals=list(range(len(tasks))), ticktext=tasks, range=[len(tasks) - 0.5, -0.5], showgrid=False)
    for border in range(1, len(tasks)):
        fig.add_hline(border - 0.5, line={"color": "rgba(128,128,128,0.3)", "width": 1})
    height = 110 + 96 * len(tasks)
    fig.update_layout(legend={"orientation": "h", "y": -70 / (height - 48), "yanchor": "top", "x": 0})
    caption = (
        f"{count(result.n_prompts, 'prompt')} in all, no training; heads outside the mask see attention sinks and a recent window only. Bars: 95% intervals."
    )
    return finish(fig, result.finding, caption, height=height, max_width=860)


def _place(k: pd.Series | np.ndarray) -> np.ndarray:
    """Logarithmic in k + 1, so that 0 has a place."""
    return np.log2(np.asarray(k, dtype=float) + 1)


def _curve(rows: pd.DataFrame, name: str, color: str, *, width: int, dash: str = "solid", opacity: float = 1, legend: bool = True) -> go.Scatter:
    return go.Scatter(
        x=_place(rows["k"]),
        y=rows["accuracy"],
        customdata=rows[["k", "margin"]],
        mode="lines+markers",
        line={"color": color, "width": width, "dash": dash},
        marker={"size": 4 + width},
        opacity=opacity,
        name=name,
        showlegend=legend,
        hovertemplate="%{customdata[0]:d} removed: %{y:.0%}<br>margin %{customdata[1]:.2f}<extra>" + name + "</extra>",
    )
