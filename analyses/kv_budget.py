"""How much KV cache does a share of full-attention heads cost? Query heads that are kept one by one keep their whole group's keys and values alive.

    python analyses/kv_budget.py [MODEL] --out analyses/results/embedded [--scores FOLDER] [--context 4096]

Masks at several ratios by the K best heads, by whole KV groups (``kv-group``: as many KV heads as the ratio leaves) and by random heads; nothing is run
but the scoring, where scores are missing. Written to OUT:

    kv_budget.csv    one row per ratio and rule: heads and KV heads kept, KV bytes, the share of all positive score that is kept,
                     and the share that whole groups would keep in the same cache
    kv_budget.md     the same as a table
    figures/kv_budget.html, .png     KV cache against heads
"""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
from shared import arguments_with_scores, head_scores, run_script, scored_on, table, write_results

import hydralens as hl
from hydralens.figures.style import BLUE, GREY, ORANGE, finish, percent
from hydralens.scores import HeadScores
from hydralens.selection import select_heads

RATIOS = ("1:1", "3:1", "7:1", "15:1", "31:1")
RULES = {"global": BLUE, "kv-group": ORANGE, "global-random": GREY}
PAPER = (
    "What the paper does with the KV heads of full-attention heads is not known. By the same count its model (Qwen3-1.7B, 2 query heads a KV head) would "
    "keep, with heads spread at random, 45 % of the cache at 3:1 and 24 % at 7:1; a model with larger groups keeps more, since a group lives as soon as "
    "one of its heads does."
)


def budgets(scores: HeadScores, ratios: Sequence[str], n_draws: int, n_tokens: int, seed: int) -> pd.DataFrame:
    """One row per ratio and rule, draws averaged."""
    positive = scores.composite.nan_to_num().clamp(min=0)
    rows = []
    for ratio in ratios:
        for rule in RULES:
            for draw in range(n_draws if rule == "global-random" else 1):
                mask = select_heads(scores, ratio, rule=rule, seed=seed + draw)
                n_kv = int(mask.kept_kv_heads.sum())
                groups = select_heads(scores, k=n_kv * scores.model.group, rule="kv-group")
                row = {"ratio": ratio, "rule": rule, "n_full": mask.n_full, "head_share": mask.n_full / positive.numel(), "kv_heads_kept": n_kv}
                row |= {"kv_share": mask.kv_share, "kv_bytes": mask.kv_bytes(n_tokens), "n_tokens": n_tokens, "n_draws": 1}
                rows.append(row | {f"score_share{name}": float(positive[m.array].sum() / positive.sum()) for name, m in (("", mask), ("_of_groups", groups))})
    by = pd.DataFrame(rows).groupby(["ratio", "rule"], sort=False)
    return by.mean().assign(n_draws=by.size()).round({"kv_bytes": 0}).astype({"kv_bytes": int, "n_tokens": int}).reset_index()


def lines(scores: HeadScores, found: pd.DataFrame, n_tokens: int) -> list[str]:
    info = scores.model
    whole = 2 * info.n_layers * info.n_kv_heads * info.head_dim * n_tokens * 2
    rows = [
        [
            row.ratio,
            row.rule,
            f"{row.n_full:.0f} ({row.head_share:.1%})",
            f"{row.kv_heads_kept:.1f}".removesuffix(".0") + f" ({row.kv_share:.1%})",
            f"{row.kv_bytes / 2**20:.1f}",
            f"{row.kv_share / row.head_share:.1f}",
            f"{row.score_share:.1%}",
            f"{row.score_share_of_groups:.1%}",
        ]
        for row in found.itertuples()
    ]
    header = [
        "ratio",
        "rule",
        "query heads kept",
        "KV heads kept",
        f"MiB at {n_tokens:,} tokens",
        "KV share / head share",
        "score kept",
        "by whole groups in that cache",
    ]
    return [
        f"{info.n_layers} layers of {info.n_heads} query and {info.n_kv_heads} KV heads; the whole cache of {n_tokens:,} tokens is {whole / 2**20:.1f} MiB "
        f"in 16 bits. Random heads: means of {int(found['n_draws'].max())} draws. States of linear heads are not counted.",
        scored_on(scores),
        "",
        *table(header, rows),
        "",
        "A rule by groups keeps fewer bytes with as many query heads, and less score, since the weak heads of a group ride along. In the same cache (last "
        "column: its share of the score) it keeps at least as much, with more query heads: whole groups are the better choice by score where bytes are the "
        "budget, single heads where the number of full heads is.",
        "",
        PAPER,
    ]


def figure(scores: HeadScores, found: pd.DataFrame) -> go.Figure:
    fig = go.Figure()
    fig.add_trace(go.Scatter(x=[0, 0.5], y=[0, 0.5], mode="lines", line={"color": GREY, "width": 1, "dash": "dash"}, name="as much cache as heads"))
    for rule, color in RULES.items():
        own = found[found["rule"] == rule]
        hover = f"{rule}, %{{customdata}}: %{{x:.1%}} of heads, %{{y:.1%}} of the cache<extra></extra>"
        fig.add_trace(
            go.Scatter(
                x=own["head_share"], y=own["kv_share"], customdata=own["ratio"], mode="lines+markers", line={"color": color}, name=rule, hovertemplate=hover
            )
        )
    fig.update_xaxes(title="query heads kept", tickformat=".0%")
    fig.update_yaxes(title="KV cache kept", tickformat=".0%")
    ratios = list(dict.fromkeys(found["ratio"]))
    middle = ratios[len(ratios) // 2]
    at = found[found["ratio"] == middle].set_index("rule")["kv_share"]
    finding = f"At {middle} the best heads keep {percent(at['global'])} of the KV cache alive, about as many in whole KV groups {percent(at['kv-group'])}"
    caption = f"{scores.model.id}: {scores.model.group} query heads a KV head; ratios {', '.join(ratios)}."
    return finish(fig, finding, caption, height=400, max_width=760)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments_with_scores(__doc__)
    parser.add_argument("--context", type=int, default=4096, help="tokens of the cache whose bytes are given")
    parser.add_argument("--draws", type=int, default=20, help="draws of random heads")
    parser.add_argument("--ratios", nargs="+", default=list(RATIOS), metavar="R:1")
    args = parser.parse_args(argv)
    model = hl.load_model(args.model, dtype=args.dtype)
    scores = head_scores(model, args)
    found = budgets(scores, args.ratios, args.draws, args.context, args.seed)
    drawn = {"kv_budget": figure(scores, found)}
    write_results(args.out, "kv_budget", model, {"kv_budget": found}, drawn, "Heads against KV cache", lines(scores, found, args.context))


if __name__ == "__main__":
    run_script("kv_budget", main)
