"""Which heads feed which: a circuit as a graph, layer by layer."""

import numpy as np
import plotly.graph_objects as go

from hydralens.figures.style import BLUE, GREY, INK, ORANGE, count, finish, listed
from hydralens.patching.circuit import LOGITS, Circuit

COLOURS = {"z": GREY, "q": BLUE, "k": ORANGE, "v": "#3a9d5d"}
NAMES = {"z": "writes the answer", "q": "through q", "k": "through k", "v": "through v"}


def circuit(found: Circuit) -> go.Figure:
    """A traced circuit: heads at their layer, the logits above them, and every path that passes the threshold, wider where its effect is larger."""
    places = _places(found)
    strongest = float(found.edges["effect"].max())
    fig = go.Figure()
    for name in [name for name in COLOURS if (found.edges["input"] == name).any()]:
        for position, (_, edge) in enumerate(found.edges[found.edges["input"] == name].iterrows()):
            x, y = zip(places[edge["sender"]], places[edge["receiver"]], strict=True)
            line = {"color": COLOURS[name], "width": 0.75 + 5.25 * edge["effect"] / strongest}
            fig.add_trace(
                go.Scatter(x=x, y=y, mode="lines", line=line, opacity=0.7, hoverinfo="skip", name=NAMES[name], legendgroup=name, showlegend=position == 0)
            )
            # Plotly has no hover on a line between points: an unseen marker in its middle carries it.
            middle = go.Scatter(
                x=[float(np.mean(x))],
                y=[float(np.mean(y))],
                mode="markers",
                marker={"color": COLOURS[name], "opacity": 0, "size": 14},
                hovertemplate=f"{edge['sender']} → {edge['receiver']} ({edge['input']})<br>IE {edge['effect']:.3f}<extra></extra>",
                showlegend=False,
            )
            fig.add_trace(middle)
    heads = found.heads
    names = [f"L{layer}H{head}" for layer, head in heads]
    number = {head: index for index, heads_of_round in enumerate(found.rounds) for head in heads_of_round}
    fig.add_trace(
        go.Scatter(
            x=[places[name][0] for name in names] + [places[LOGITS][0]],
            y=[places[name][1] for name in names] + [places[LOGITS][1]],
            mode="markers+text",
            text=[*names, LOGITS],
            textposition="top center",
            textfont={"size": 11, "color": INK},
            marker={"size": 11, "color": [BLUE if number[head] == 0 else ORANGE for head in heads] + [INK], "line": {"color": "#ffffff", "width": 1}},
            customdata=[f"IE {found.effects[head]:.3f}, found in round {number[head]}" for head in heads] + ["the answer"],
            hovertemplate="%{text}<br>%{customdata}<extra></extra>",
            showlegend=False,
        )
    )
    fig.update_xaxes(visible=False, range=[-0.08, 1.08])
    layers = sorted({layer for layer, _ in heads})
    fig.update_yaxes(title="layer", tickvals=layers, ticktext=[str(layer) for layer in layers], range=[min(layers) - 0.8, places[LOGITS][1] + 0.9])
    fig.update_layout(legend={"orientation": "h", "y": -0.02, "yanchor": "top", "x": 0})
    inputs = [name for name in ("q", "k", "v") if (found.edges["input"] == name).any()]
    caption = (
        f"{found.probe}, {count(found.n_pairs, 'pair')}: paths with a mean IE of {found.threshold:g} or more. "
        + (f"Receivers: {listed(inputs)}. " if inputs else "")
        + ("The last round found nothing new." if found.exhausted else f"Stopped after {count(len(found.rounds) - 1, 'round')} of path patching.")
    )
    height = int(np.clip(26 * (places[LOGITS][1] - min(layers) + 1), 300, 900))
    return finish(fig, _finding(found), caption, height=height, max_width=960, min_width=480)


def _places(found: Circuit) -> dict[str, tuple[float, float]]:
    """Node name -> (x, layer): the heads of a layer side by side in the order of their numbers, each layer shifted a little against the next."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(found.heads):
        by_layer.setdefault(layer, []).append(head)
    places = {LOGITS: (0.5, float(max(by_layer) + 1.5))}
    for order, (layer, heads) in enumerate(sorted(by_layer.items())):
        shift = 0.03 if order % 2 else -0.03
        for index, head in enumerate(heads):
            places[f"L{layer}H{head}"] = ((index + 1) / (len(heads) + 1) + shift, float(layer))
    return places


def _finding(found: Circuit) -> str:
    writers, *senders = [len(heads) for heads in found.rounds]
    verb = "writes" if writers == 1 else "write"
    if not senders:
        return f"{count(writers, 'head')} {verb} the answer, and no head acts on it through them"
    feeding = sum(senders)
    feed = f"{count(feeding, 'more head')} {'feeds' if feeding == 1 else 'feed'} {'it' if writers == 1 else 'them'}"
    return f"{count(writers, 'head')} {verb} the answer and {feed} over {count(len(senders), 'step')} back"
