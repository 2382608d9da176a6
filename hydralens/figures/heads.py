"""Maps of heads: one map, one map a probe, and one a role."""

from collections import Counter
from itertools import combinations

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from plotly.subplots import make_subplots
from torch import Tensor

from hydralens.errors import InputError
from hydralens.figures.findings import direct, half_share_finding, interval, measurement, quantity, strongest_probe
from hydralens.figures.style import array, colorbar, count, finish, limit
from hydralens.head_mask import HeadMask
from hydralens.patching.effects import HeadEffects
from hydralens.profiles import strength
from hydralens.scores import THRESHOLD, HeadScores, all_probes

CLIP_PERCENTILE = 99.5  # facets share one colour axis, which a single strong probe would otherwise own
TOP = 12


def head_heatmap(scores: HeadScores | HeadEffects | Float[Tensor, "layer head"], mask: HeadMask | Bool[Tensor, "layer head"] | None = None) -> go.Figure:
    """One value a head: the composite score, an intervention's mean IE, or any ``[layer, head]`` tensor.

    Args:
        mask: its heads are marked with a dot.

    Raises:
        InputError: the map or the mask has the wrong shape.
    """
    match scores:
        case HeadScores():
            values, name = scores.composite, "score"
            what = f"{next(iter(scores.receivers))} score" if len(scores.receivers) == 1 else "score"
            n_probes = count(len(all_probes(scores.made_from)), "probe")
            caption = f"{scores.model.id}: {count(values.numel(), 'head')}, scoring method {scores.method}, {n_probes}."
            best = strongest_probe(scores)
            text = np.array(best.labels, dtype=object)[best.index.numpy()]
            extra = [_kv_heads(values.shape, scores.model.group), array(scores.rank + 1), *map(array, (best.value, best.low, best.high))]
            hover = (
                "L%{y}H%{x} · KV head %{customdata[0]:d}<br>score %{z:.4f}, rank %{customdata[1]:d}"
                f"<br>%{{text}}: {quantity(next(iter(all_probes(scores.made_from).values())))} "
                "%{customdata[2]:.3f} [%{customdata[3]:.3f}, %{customdata[4]:.3f}]<extra></extra>"
            )
        case HeadEffects():
            values, name, text = scores.values, quantity(scores), None
            what = f"effect on {scores.probe}" if scores.probe else "effect"
            measured = measurement(scores)
            settings = f"{measured[0].upper()}{measured[1:]}, corruption {scores.corruption or 'unnamed'}"
            caption = f"{settings}; mean of {count(scores.n_pairs, 'pair')}, 95% bootstrap interval on hover."
            group = 1 if scores.component in ("k", "v") else scores.n_heads // scores.n_kv_heads
            extra = [_kv_heads(values.shape, group), *map(array, interval(scores))]
            hover = "L%{y}H%{x} · KV head %{customdata[0]:d}<br>" + name + " %{z:.4f} [%{customdata[1]:.3f}, %{customdata[2]:.3f}]<extra></extra>"
        case _:
            values, name, text, what, caption, extra = scores, "value", None, "positive total", "One value a head.", []
            hover = "L%{y}H%{x}<br>%{z:.4f}<extra></extra>"
    if values.ndim != 2:
        raise InputError(f"a head map must be [layer, head]; this one has shape {tuple(values.shape)}")
    z = array(values)
    bound = limit(z)
    fig = go.Figure(
        go.Heatmap(
            z=z,
            text=text,
            customdata=np.stack(extra, -1).astype(np.float32) if extra else None,
            hovertemplate=hover,
            colorscale="RdBu",
            zmid=0,
            zmin=-bound,
            zmax=bound,
            xgap=1,
            ygap=1,
            colorbar=colorbar(name),
        )
    )
    if mask is not None:
        kept = mask.to_query().array if isinstance(mask, HeadMask) else mask
        if kept.shape != values.shape:
            raise InputError(f"the mask has shape {tuple(kept.shape)} and the head map {tuple(values.shape)}; they must be the same [layer, head]")
        fig.add_trace(_dots(kept))
        caption += f" Dots: {count(int(kept.sum()), 'head')} with full attention."
    n_layers, n_heads = values.shape
    _head_axes(fig, n_layers, n_heads)
    if isinstance(scores, HeadEffects) and scores.component in ("k", "v"):
        fig.update_xaxes(title="KV head")
    return finish(fig, half_share_finding(values, what), caption, height=_map_height(n_layers), max_width=min(1100, 420 + 36 * n_heads))


def probe_facets(scores: HeadScores) -> go.Figure:
    """One map of direct effects a probe, on one colour axis that is clipped at a stated percentile.

    Of a detector that was called by itself, which measures no direct effects, its own values are shown.
    """
    probes = all_probes(direct(scores))
    name = quantity(next(iter(probes.values())))
    n_layers, n_heads = scores.composite.shape
    columns = min(len(probes), 5 if n_heads <= 16 else 3)
    rows = -(-len(probes) // columns)
    row_height = max(190, 6 * n_layers)
    fig = make_subplots(
        rows,
        columns,
        subplot_titles=[label.replace("/", "<br>") for label in probes],
        shared_yaxes=True,
        horizontal_spacing=0.08 / columns,
        vertical_spacing=min(1 / rows, 62 / (rows * (row_height + 62))),
    )
    kv_heads = _kv_heads((n_layers, n_heads), scores.model.group)
    for cell, (label, effects) in enumerate(probes.items()):
        low, high = interval(effects)
        fig.add_trace(
            go.Heatmap(
                z=array(effects.values),
                customdata=np.stack([kv_heads, array(low), array(high)], -1).astype(np.float32),
                hovertemplate=f"{label} ({count(effects.n_pairs, 'pair')})<br>L%{{y}}H%{{x}} · KV head %{{customdata[0]:d}}"
                f"<br>{name} %{{z:.4f}} [%{{customdata[1]:.3f}}, %{{customdata[2]:.3f}}]<extra></extra>",
                coloraxis="coloraxis",
            ),
            row=cell // columns + 1,
            col=cell % columns + 1,
        )
    stacked = torch.stack([effects.values for effects in probes.values()])
    bound = limit(array(stacked), CLIP_PERCENTILE)
    clipped = int((stacked.abs() > bound).sum())
    fig.update_layout(coloraxis={"colorscale": "RdBu", "cmid": 0, "cmin": -bound, "cmax": bound, "colorbar": colorbar(name)})
    fig.update_annotations(font_size=11)
    _head_axes(fig, n_layers, n_heads)
    fig.update_xaxes(title=None, showticklabels=False)
    fig.update_yaxes(title=None)
    fig.update_yaxes(title="layer", dtick=5 * _step(n_layers), col=1)
    caption = (
        f"{scores.model.id}: mean {'direct effect (IE)' if name == 'IE' else name} of every head, one map a probe, heads from left to right, "
        "95% bootstrap interval on hover. "
        f"Colours stop at ±{bound:.2g} (the {CLIP_PERCENTILE}th percentile of |{name}|); {count(clipped, 'value')} beyond."
    )
    return finish(fig, _facets_finding(probes), caption, height=rows * (row_height + 62), max_width=1100, min_width=150 * columns, headroom=34)


def _facets_finding(probes: dict[str, HeadEffects]) -> str:
    ranked = {label: effects.values.nan_to_num(-torch.inf).flatten().argsort(descending=True, stable=True)[:TOP].tolist() for label, effects in probes.items()}
    n_heads = next(iter(probes.values())).values.shape[1]
    (cell, wins), *_ = Counter(top[0] for top in ranked.values()).most_common(1)
    layer, head = divmod(cell, n_heads)
    if len(ranked) == 1:
        return f"L{layer}H{head} matters most for {next(iter(ranked))}"
    shared = float(np.mean([len(set(a) & set(b)) for a, b in combinations(ranked.values(), 2)]))
    first = (
        f"L{layer}H{head} is the strongest head in {wins} of {len(ranked)} probes"
        if wins > 1
        else f"No two of {len(ranked)} probes have the same strongest head"
    )
    return f"{first}; two probes share {shared:.1f} of their top {len(next(iter(ranked.values())))} heads on average"


def role_maps(scores: HeadScores) -> go.Figure:
    """What a head does itself beside what it does through others: direct effects, and effects through the q of the heads with a direct effect (Eq. 11).

    Raises:
        InputError: senders were not measured.
    """
    if not scores.senders:
        raise InputError("role_maps needs the effects of senders, which were not measured; score with score_heads(..., senders=True)")
    receivers, senders = strength(scores.receivers), strength(scores.senders)
    n_layers, n_heads = receivers.shape
    kv_heads = _kv_heads((n_layers, n_heads), scores.model.group)
    fig = make_subplots(1, 2, subplot_titles=["receivers: direct effect", "senders: effect through receivers"], shared_yaxes=True, horizontal_spacing=0.04)
    for column, (role, values) in enumerate({"receiver": receivers, "sender": senders}.items(), 1):
        hover = f"L%{{y}}H%{{x}} · KV head %{{customdata:d}}<br>{role}, IE %{{z:.4f}}<extra></extra>"
        fig.add_trace(go.Heatmap(z=array(values), customdata=kv_heads, hovertemplate=hover, coloraxis="coloraxis", xgap=1, ygap=1), row=1, col=column)
        fig.add_trace(_dots(values >= THRESHOLD), row=1, col=column)
    bound = limit(array(torch.stack((receivers, senders))), CLIP_PERCENTILE)
    fig.update_layout(coloraxis={"colorscale": "RdBu", "cmid": 0, "cmin": -bound, "cmax": bound, "colorbar": colorbar("IE")})
    fig.update_annotations(font_size=12)
    _head_axes(fig, n_layers, n_heads)
    fig.update_yaxes(title=None, col=2)
    larger = ", the larger capability" if len(scores.receivers) > 1 else ""
    caption = (
        f"{scores.model.id}: mean IE over probes{larger}. Right: what a head does to the answer through the queries of the heads dotted left, at the answer; "
        f"empty where none of them lies behind it. Dots: IE ≥ {THRESHOLD:g}. Colours stop at ±{bound:.2g}."
    )
    finding = _roles_finding(receivers >= THRESHOLD, senders >= THRESHOLD)
    return finish(fig, finding, caption, height=_map_height(n_layers), max_width=min(1100, 480 + 40 * n_heads), min_width=420, headroom=20)


def _roles_finding(receivers: Bool[Tensor, "layer head"], senders: Bool[Tensor, "layer head"]) -> str:
    n, n_senders, both = (int(heads.sum()) for heads in (receivers, senders, receivers & senders))
    first = f"{count(n, 'head')} {'acts' if n == 1 else 'act'} on the answer directly"
    through = f"through {'its' if n == 1 else 'their'} queries"
    if n_senders == 0:
        return f"{first}; none acts {through}"
    return f"{first} and {n_senders} {through}; {both or 'none'} {'does' if both <= 1 else 'do'} both"


# --- shared shapes -------------------------------------------------------------------------------------------------


def _kv_heads(shape: tuple[int, int], group: int) -> np.ndarray:
    return np.broadcast_to(np.arange(shape[1]) // group, shape)


def _step(n: int) -> int:
    """Ticks every 1, 2, 4, .. so that at most about 32 stand beside each other."""
    return max(1, 2 ** int(np.ceil(np.log2(n / 32))))


def _map_height(n_layers: int) -> int:
    return int(np.clip(17 * n_layers, 220, 900)) + 60


def _head_axes(fig: go.Figure, n_layers: int, n_heads: int) -> None:
    """Head on x, layer on y, layer 0 at the top."""
    fig.update_xaxes(title="head", range=[-0.5, n_heads - 0.5], tick0=0, dtick=_step(n_heads), showgrid=False, ticks="")
    fig.update_yaxes(title="layer", range=[n_layers - 0.5, -0.5], tick0=0, dtick=_step(n_layers), showgrid=False, ticks="")


def _dots(mask: Bool[Tensor, "layer head"]) -> go.Scatter:
    """White with a dark rim, so that they show on every colour of the map."""
    layers, heads = mask.nonzero().T.tolist()
    marker = {"color": "#ffffff", "size": 7 if mask.shape[1] <= 32 else 4, "line": {"color": "#111111", "width": 1.5}}
    return go.Scatter(x=heads, y=layers, mode="markers", marker=marker, hoverinfo="skip", showlegend=False, name="full attention")
