"""Which rule turns scores into the better mask? Retrieval left when all other heads see only sinks and a recent window, nothing trained (Tables 6 and 7).

    python analyses/selection_rules.py [MODEL] --out analyses/results/embedded [--scores FOLDER] [--prompts 16] [--ratios 7:1 3:1]

Every rule of ``hydralens.selection`` on the same scores; the random ones with several draws. The prompts were not used for scoring, only those whose needle
lies outside the window are asked, and every one is a haystack of its own. Written to OUT:

    selection_rules.csv    one row per ratio, rule and task: accuracy and margin with intervals, the difference to ``global`` on the same prompts,
                           and what the mask keeps: heads, score, layers, KV cache
    selection_rules.md     the same as tables
    figures/selection_rules.html, .png     accuracy by rule
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from shared import arguments_with_scores, head_scores, held_out, interval, run_script, scored_on, table, write_results

import hydralens as hl
from hydralens.figures.style import BLUE, GREY, ORANGE, finish, percent
from hydralens.head_mask import HeadMask
from hydralens.models.lens import LensModel
from hydralens.probes.base import Probe
from hydralens.scores import HeadScores
from hydralens.selection import RULES, select_heads, selection_report
from hydralens.statistics import clustered_bootstrap, clustered_difference
from hydralens.validation import far_prompts, mask_margins

BASE, ALL, NONE = "global", "all heads", "no head"
REPORTED = ("n_full", "n_with_signal", "score_kept", "score_global", "layers_without_full", "kv_heads_kept", "kv_share")  # of ``selection_report``
PAPER = {("3:1", "global"): "98.70", ("3:1", "fixed"): "85.63", ("3:1", "global-random"): "59.40", ("7:1", "global-constrained"): "88.70"}
DIFFERENCES = (
    "The paper's numbers (Qwen3-1.7B, RULER single-needle tasks within the trained context, in percent; Tables 6 and 7) are those of models after its "
    "three training stages, in which other heads are Gated DeltaNet and learn to take over; here nothing is trained and other heads are cut off from the "
    "needle, so that only the order of rules can be compared. It may differ since the paper scores by direct and indirect effects, and since training "
    "repairs what a mask leaves out. Its layer-wise selection at 3:1 has 89.07."
)


def masks_of(scores: HeadScores, ratios: Sequence[str], n_draws: int, seed: int) -> dict[tuple[str, str], list[HeadMask]]:
    """(ratio, rule) -> masks, several for random rules."""
    return {
        (ratio, rule): [select_heads(scores, ratio, rule=rule, seed=seed + draw) for draw in range(n_draws if "random" in rule else 1)]
        for ratio in ratios
        for rule in RULES
    }


def measure(model: LensModel, scores: HeadScores, masks: Mapping[tuple[str, str], Sequence[HeadMask]], checks: Sequence[Probe]) -> pd.DataFrame:
    """One row per ratio, rule and task; of random rules each prompt counts by its mean over draws."""
    shape = scores.composite.shape
    arrays = {("", ALL): torch.ones(1, *shape, dtype=torch.bool), ("", NONE): torch.zeros(1, *shape, dtype=torch.bool)}
    arrays |= {name: torch.stack([mask.to_query().array for mask in group]) for name, group in masks.items()}
    kept = {name: pd.DataFrame([selection_report(scores, mask) for mask in group])[list(REPORTED)].mean().to_dict() for name, group in masks.items()}
    rows = []
    for probe in checks:
        margins = mask_margins(model, torch.cat(list(arrays.values())), far_prompts(model, probe)).numpy()
        draws = dict(zip(arrays, np.split(margins, np.cumsum([len(group) for group in arrays.values()])[:-1]), strict=True))
        prompt = np.arange(margins.shape[1])
        for (ratio, rule), own in draws.items():
            accuracy, margin = clustered_bootstrap((own > 0).mean(0), prompt), clustered_bootstrap(own.mean(0), prompt)
            row = {"ratio": ratio, "rule": rule, "task": probe.name, "n_prompts": len(prompt), "n_draws": len(own)}
            row |= {"accuracy": accuracy.mean, "accuracy_low": accuracy.low, "accuracy_high": accuracy.high}
            row |= {"accuracy_worst_draw": (own > 0).mean(1).min(), "accuracy_best_draw": (own > 0).mean(1).max()}
            row |= {"margin": margin.mean, "margin_low": margin.low, "margin_high": margin.high}
            if ratio:
                gap = clustered_difference(draws[ratio, BASE].mean(0), own.mean(0), prompt)
                row |= {"global_minus_this_margin": gap.mean, "difference_low": gap.low, "difference_high": gap.high}
            rows.append(row | kept.get((ratio, rule), {}))
    return pd.DataFrame(rows)


def lines(scores: HeadScores, found: pd.DataFrame) -> list[str]:
    by = found.set_index(["ratio", "rule", "task"])
    tasks, ratios = list(dict.fromkeys(found["task"])), [ratio for ratio in dict.fromkeys(found["ratio"]) if ratio]

    def cell(ratio: str, rule: str, task: str) -> str:
        row = by.loc[ratio, rule, task]
        return f"{interval(row['accuracy'], row['accuracy_low'], row['accuracy_high'])}, {row['margin']:+.2f}"

    def gap(ratio: str, rule: str, task: str) -> str:
        row = by.loc[ratio, rule, task]
        return "" if rule == BASE else f"{row['global_minus_this_margin']:+.2f} [{row['difference_low']:+.2f} {row['difference_high']:+.2f}]"

    asked = " and ".join(f"{int(by.loc[('', ALL, task), 'n_prompts'])} of {task}" for task in tasks)
    text = [
        scored_on(scores),
        f"Prompts: {asked}, one haystack each; random rules: means over {int(found['n_draws'].max())} draws. Accuracy [95 % interval] and margin in logits; "
        f"then the margin of {BASE} minus that of the rule on the same prompts, with its interval.",
        *(f"{name.capitalize()} full: {'; '.join(f'{task} ' + cell('', name, task) for task in tasks)}." for name in (ALL, NONE)),
        "",
    ]
    for ratio in ratios:
        order = found[found["ratio"] == ratio].groupby("rule", sort=False)["margin"].mean().sort_values(ascending=False).index
        rows = []
        for rule in order:
            kept = by.loc[ratio, rule, tasks[0]]
            what = [
                f"{kept['n_full']:.0f}",
                f"{kept['score_kept'] / kept['score_global']:.0%}",
                f"{kept['layers_without_full']:.0f}",
                f"{kept['kv_share']:.0%}",
            ]
            beside = [text for task in tasks for text in (cell(ratio, rule, task), gap(ratio, rule, task))]
            rows.append([f"**{rule}**" if rule == BASE else rule, *beside, *what, PAPER.get((ratio, rule), "")])
        header = [
            "rule",
            *(name for task in tasks for name in (task, f"{BASE} - this")),
            "heads",
            "score kept",
            "layers without",
            "KV cache",
            "paper, after training",
        ]
        text += [f"## {ratio}", "", *table(header, rows), ""]
    return [*text, DIFFERENCES]


def figure(found: pd.DataFrame) -> go.Figure:
    """Accuracy over both tasks by rule, a colour a ratio; whole and empty masks as lines, draws of random rules as bars."""
    n = found.drop_duplicates("task")["n_prompts"].sum()
    columns = ["accuracy", "accuracy_worst_draw", "accuracy_best_draw"]
    pooled = found[columns].mul(found["n_prompts"] / n, axis=0).join(found[["ratio", "rule"]]).groupby(["ratio", "rule"], sort=False).sum()
    ratios = [ratio for ratio in dict.fromkeys(found["ratio"]) if ratio]
    order = pooled.loc[ratios[0], "accuracy"].sort_values(ascending=False, kind="stable").index.tolist()
    fig = go.Figure()
    for place, (ratio, color) in enumerate(zip(ratios, (BLUE, ORANGE), strict=True)):
        own = pooled.loc[ratio].loc[order]
        spread = {"array": own["accuracy_best_draw"] - own["accuracy"], "arrayminus": own["accuracy"] - own["accuracy_worst_draw"], "color": color, "width": 0}
        fig.add_trace(
            go.Scatter(
                x=own["accuracy"],
                y=np.arange(len(order)) + 0.2 * (place - 0.5),
                error_x=spread,
                customdata=order,
                mode="markers",
                marker={"color": color, "size": 9},
                name=ratio,
                hovertemplate=f"{ratio}, %{{customdata}}: %{{x:.0%}}<extra></extra>",
            )
        )
    for name in (ALL, NONE):
        fig.add_vline(pooled.loc[("", name), "accuracy"], line={"color": GREY, "width": 1, "dash": "dash"}, annotation_text=name, annotation_position="top")
    fig.update_xaxes(title="accuracy", range=[-0.03, 1.03], tickformat=".0%")
    fig.update_yaxes(tickvals=list(range(len(order))), ticktext=order, range=[len(order) - 0.5, -0.5])
    best = pooled.loc[ratios[0], "accuracy"]
    shares = [f"{rule} {percent(best[rule])}" for rule in dict.fromkeys((order[0], BASE, "global-random"))]
    finding = f"Prompts right at {ratios[0]}: {', '.join(shares)}; with all heads {percent(pooled.loc[('', ALL), 'accuracy'])}"
    caption = (
        f"{n} prompts of {found['task'].nunique()} tasks, nothing trained; heads outside the mask see attention sinks and a recent window. "
        f"Bars: worst and best of {int(found['n_draws'].max())} draws of random rules in each task."
    )
    return finish(fig, finding, caption, height=80 + 30 * len(order), max_width=860, headroom=20)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments_with_scores(__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="prompts per task, those with a near needle included")
    parser.add_argument("--draws", type=int, default=3, help="draws of random rules")
    parser.add_argument("--ratios", nargs=2, default=["7:1", "3:1"], metavar="R:1")
    args = parser.parse_args(argv)
    model = hl.load_model(args.model, dtype=args.dtype)
    scores = head_scores(model, args)
    masks = masks_of(scores, args.ratios, args.draws, args.seed)
    found = measure(model, scores, masks, held_out(model, args.prompts, args.tokens, args.seed))
    write_results(args.out, "selection_rules", model, {"selection_rules": found}, {"selection_rules": figure(found)}, "Selection rules", lines(scores, found))


if __name__ == "__main__":
    run_script("selection_rules", main)
