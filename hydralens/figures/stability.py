"""Would another run find the same heads: pairs needed, agreement between conditions, and which effects are not zero."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hydralens.errors import InputError
from hydralens.figures.findings import measurement, quantity, tested
from hydralens.figures.style import BLUE, GREY, ORANGE, count, finish, number, percent
from hydralens.patching.effects import HeadEffects
from hydralens.statistics import LEVEL, smallest_p

ENOUGH = 0.75  # share of the top k that two runs must have in common for the list to be settled
LABELLED = 8  # heads named in the volcano


def pairs_curve(frame: pd.DataFrame) -> go.Figure:
    """How well ``n`` pairs a probe reproduce the head map; a line a measure, a band from the smallest to the largest draw.

    Args:
        frame: what ``statistics.pairs_curve`` returns: columns n_pairs, against, draw, k, top_k_overlap, spearman.

    Raises:
        InputError: no row compares with other pairs.
    """
    others = frame[frame["against"] == "other pairs"]
    if others.empty:
        raise InputError('the pairs frame has no rows with against "other pairs"; every probe needs at least 2 pairs')
    k, sizes = int(frame["k"].iloc[0]), sorted(set(frame["n_pairs"]))
    fig = go.Figure()
    for measure, name, color in (("top_k_overlap", f"share of the top {k} in common", BLUE), ("spearman", "Spearman, all heads", ORANGE)):
        for against, dash in (("other pairs", "solid"), ("all pairs", "dot")):
            draws = frame[frame["against"] == against].groupby("n_pairs")[measure]
            mean, low, high = draws.mean(), draws.min(), draws.max()
            if against == "other pairs":
                fig.add_trace(
                    go.Scatter(
                        x=np.concatenate([low.index, low.index[::-1]]),
                        y=np.concatenate([high, low[::-1]]),
                        fill="toself",
                        fillcolor=color,
                        opacity=0.16,
                        mode="lines",
                        line={"width": 0},
                        hoverinfo="skip",
                        showlegend=False,
                    )
                )
            fig.add_trace(
                go.Scatter(
                    x=mean.index,
                    y=mean,
                    customdata=np.stack([low, high], -1),
                    mode="lines+markers",
                    line={"color": color, "width": 3 if dash == "solid" else 1.5, "dash": dash},
                    marker={"size": 7 if dash == "solid" else 4},
                    name=f"{name}, against {against}",
                    hovertemplate="%{x} pairs: %{y:.2f} [%{customdata[0]:.2f}, %{customdata[1]:.2f}]<extra>" + f"{name}, against {against}</extra>",
                )
            )
    fig.add_hline(ENOUGH, line={"color": GREY, "width": 1, "dash": "dash"})
    fig.update_xaxes(title="pairs per probe", type="log", tickvals=sizes, ticktext=[str(n) for n in sizes], showgrid=False)
    fig.update_yaxes(title="agreement", range=[min(-0.03, float(np.nanmin(frame["spearman"].fillna(0)))), 1.04])
    fig.update_layout(legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0})
    n_draws = int(others["draw"].nunique())
    caption = (
        f"{count(n_draws, 'random draw')}; lines: means, bands: smallest to largest draw. Against other pairs: two sets without a pair in common, "
        f"as a second run would be. Against all pairs is too good: the pairs are among them. Dashed line: {percent(ENOUGH)}, taken for enough."
    )
    return finish(fig, _pairs_finding(others, k), caption, height=400, max_width=860)


def _pairs_finding(others: pd.DataFrame, k: int) -> str:
    shared = others.groupby("n_pairs")["top_k_overlap"].mean()
    enough = shared[shared >= ENOUGH]
    if len(enough):
        n = int(enough.index[0])
        return f"{count(n, 'pair')} a probe {'is' if n == 1 else 'are'} enough: two runs of {n} share {percent(shared[n])} of their top {k} heads"
    n = int(shared.index[-1])
    return f"{count(n, 'pair')} a probe {'is' if n == 1 else 'are'} not enough: two runs of {n} share {percent(shared[n])} of their top {k} heads"


def stability_matrix(frame: pd.DataFrame) -> go.Figure:
    """Condition by condition, the share of the top ``k`` heads in common; on the diagonal two halves of one condition's pairs.

    Args:
        frame: what ``statistics.stability`` returns: columns a, b, k, top_k_overlap, spearman, pearson.
    """
    names = list(dict.fromkeys([*frame["a"], *frame["b"]]))
    place = {name: index for index, name in enumerate(names)}
    k = int(frame["k"].iloc[0])
    cells = np.full((len(names), len(names), 3), np.nan)
    for row in frame.itertuples():
        for a, b in ((row.a, row.b), (row.b, row.a)):
            cells[place[a], place[b]] = row.top_k_overlap, row.spearman, row.pearson
    overlap = cells[:, :, 0]
    fig = go.Figure(
        go.Heatmap(
            z=overlap,
            x=names,
            y=names,
            text=[["" if np.isnan(value) else percent(value) for value in row] for row in overlap],
            texttemplate="%{text}",
            customdata=cells[:, :, 1:],
            hovertemplate="%{y} and %{x}: %{z:.1%} in common<br>Spearman %{customdata[0]:.2f}, Pearson %{customdata[1]:.2f}<extra></extra>",
            colorscale="RdBu",
            zmid=0,
            zmin=-1,
            zmax=1,
            xgap=1,
            ygap=1,
            showscale=False,
        )
    )
    fig.update_xaxes(constrain="domain", showgrid=False, ticks="", type="category")
    fig.update_yaxes(scaleanchor="x", constrain="domain", autorange="reversed", showgrid=False, ticks="", type="category")
    between, within = overlap[~np.eye(len(names), dtype=bool)], overlap.diagonal()[~np.isnan(overlap.diagonal())]
    finding = f"Two of {len(names)} conditions share {percent(between.mean())} of their top {k} heads"
    if len(names) > 2:
        finding += f" ({percent(between.min())} to {percent(between.max())})"
    caption = f"Share of the top {k} heads in common; Spearman and Pearson on hover."
    if len(within):
        finding += f"; halves of one {percent(within.mean())}"
        caption += " Diagonal: random halves of one condition's own pairs, so half as many on each side: what chance alone leaves."
    return finish(fig, finding, caption, height=int(np.clip(90 * len(names), 260, 620)), max_width=760, square=True)


def volcano(effects: HeadEffects) -> go.Figure:
    """Mean effect of every head against how sure it is not zero (sign-flip test, Benjamini-Hochberg over heads); the strongest sure heads are named.

    For all probes of a score together: ``volcano(statistics.pooled(scores))``.
    """
    heads, unit = tested(effects).dropna(subset="q"), quantity(effects)
    heads = heads.assign(sure=heads["q"] < LEVEL, height=-np.log10(heads["q"]), size=heads["value"].abs()).sort_values("size", ascending=False)
    sure = heads[heads["sure"]]
    name = "KV head" if effects.component in ("k", "v") else "head"
    fig = go.Figure()
    for rows, color, legend in ((heads[~heads["sure"]], GREY, f"q ≥ {LEVEL:g}"), (sure, ORANGE, f"q < {LEVEL:g}")):
        fig.add_trace(
            go.Scatter(
                x=rows["value"],
                y=rows["height"],
                customdata=rows[["layer", "head", "ci_low", "ci_high", "p", "q"]],
                mode="markers",
                marker={"color": color, "size": 7, "opacity": 0.75},
                name=f"{count(len(rows), name)} with {legend}",
                hovertemplate="L%{customdata[0]}H%{customdata[1]}<br>" + unit + " %{x:.4f} [%{customdata[2]:.3f}, %{customdata[3]:.3f}]"
                "<br>p %{customdata[4]:.2g}, q %{customdata[5]:.2g}<extra></extra>",
            )
        )
    _name_heads(fig, sure.head(LABELLED))
    fig.add_hline(-np.log10(LEVEL), line={"color": GREY, "width": 1, "dash": "dash"})
    fig.add_vline(0, line={"color": GREY, "width": 1})
    fig.update_xaxes(title=f"mean {unit}")
    top = max(heads["height"].max(), -np.log10(LEVEL))
    fig.update_yaxes(title="−log10 q", range=[-0.04 * top, 1.12 * top])
    fig.update_layout(legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0})
    least = smallest_p(effects.n_pairs)
    caption = (
        f"{effects.probe or 'unnamed probe'}: {measurement(effects)}. Sign-flip test over {count(effects.n_pairs, 'pair')}, whose smallest possible p is "
        f"{least:.2g}; q: false-discovery rate over {count(len(heads), name)} (Benjamini-Hochberg). Dashed line: {LEVEL:g}."
    )
    if len(sure):
        best = sure.iloc[0]
        verb = "has an effect that is" if len(sure) == 1 else "have effects that are"
        finding = f"{len(sure)} of {count(len(heads), name)} {verb} clearly not zero; the strongest is L{best['layer']}H{best['head']}, {number(best['value'])}"
    elif least > LEVEL:
        finding = f"{count(effects.n_pairs, 'pair')} {'is' if effects.n_pairs == 1 else 'are'} too few to tell any effect from zero"
    else:
        finding = f"No effect of {count(len(heads), name)} is clearly not zero with {count(effects.n_pairs, 'pair')}"
    return finish(fig, finding, caption, height=420, max_width=860)


def _name_heads(fig: go.Figure, rows: pd.DataFrame) -> None:
    """Names stand above and below their points by turns, because many heads have the smallest q there is and share a line."""
    for turn, row in enumerate(rows.sort_values("value").itertuples()):
        fig.add_annotation(x=row.value, y=row.height, text=f"L{row.layer}H{row.head}", yshift=12 * (1, -1, 2, -2)[turn % 4], showarrow=False, font={"size": 11})
