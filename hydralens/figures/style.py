"""What all figures share: colours that read on white and on black, title and caption, and small words."""

import textwrap

import numpy as np
import plotly.graph_objects as go
from torch import Tensor

INK = "#7b7b7b"  # contrast 4.2:1 on white and 4.3:1 on near-black: the best one grey can do on both
GRID = "rgba(128,128,128,0.22)"
CLEAR = "rgba(0,0,0,0)"
BLUE, ORANGE, GREY = "#2f7fd1", "#d9722e", "#8c8c8c"
LINE_HEIGHT = 20
# Where the bar of buttons is shown, as in notebooks, all of them would lie on the title; dragging zooms and a double click goes back.
HIDDEN_BUTTONS = ["zoom", "pan", "select", "lasso", "zoomin", "zoomout", "autoscale", "sendChartToCloud"]
TEXT_WIDTH = 720  # plotly wraps no text, and the output of a notebook is often narrower than the figure could be


def finish(
    fig: go.Figure, finding: str, caption: str, *, height: int, max_width: int, min_width: int = 0, headroom: int = 0, square: bool = False
) -> go.Figure:
    """Give ``fig`` its title (the finding), its caption (the settings) and the house style.

    ``headroom`` is what subplot titles need above the plot. ``layout.meta`` keeps finding and caption as plain text, and in
    pixels how the figure likes to be laid out on a page.
    """
    width = min(max_width, TEXT_WIDTH)
    title, subtitle = textwrap.wrap(finding, width // 9), textwrap.wrap(caption, width // 7)
    # Plotly moves a title of one line down by the height of its capitals, one of several lines not at all.
    above = 14 if len(title) == 1 else 25
    top = 24 + LINE_HEIGHT * (len(title) + len(subtitle)) + headroom
    fig.update_layout(
        title={
            "text": "<br>".join(title),
            "subtitle": {"text": "<br>".join(subtitle), "font": {"size": 12, "color": INK}},
            "x": 0,
            "xref": "container",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": above, "l": 12},
            "font": {"size": 16},
        },
        template="none",
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12, "color": INK},
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        modebar={"remove": HIDDEN_BUTTONS, "bgcolor": CLEAR, "color": INK, "activecolor": BLUE},
        hoverlabel={"bgcolor": "#1f2430", "bordercolor": "#1f2430", "font": {"color": "#f4f4f4", "size": 13}},
        margin={"l": 56, "r": 16, "t": top, "b": 48},
        height=height + top,
        meta={"finding": finding, "caption": caption, "height": height, "max_width": max_width, "min_width": min_width, "headroom": headroom, "square": square},
    )
    fig.update_xaxes(gridcolor=GRID, zeroline=False, automargin=True)
    fig.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True)
    return fig


def colorbar(title: str) -> dict:
    return {"title": {"text": title, "side": "top"}, "thickness": 12, "outlinewidth": 0, "tickformat": ".2~g"}


def array(values: Tensor) -> np.ndarray:
    """Any tensor as float32 numpy; numpy has no bfloat16."""
    return values.detach().float().cpu().numpy()


def limit(values: np.ndarray, percentile: float = 100) -> float:
    """The colour range's half-width: a percentile of the finite magnitudes; 1 where all are zero."""
    finite = np.abs(values[np.isfinite(values)])
    largest = float(np.percentile(finite, percentile)) if finite.size else 0.0
    return largest or (float(finite.max()) if finite.size else 0.0) or 1.0


def count(n: int, word: str) -> str:
    """``1 head``, ``2 heads``."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def listed(words: list) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    words = [str(word) for word in words]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def number(value: float) -> str:
    """Two decimals, and no minus before a zero."""
    return f"{round(value, 2) + 0.0:.2f}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f}%"
