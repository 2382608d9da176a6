"""How many heads does retrieval stand on? Accuracy as the best heads are ablated, beside as many random ones of the same layers (the paper's Fig. 9b).

    python analyses/knockout_curve.py [MODEL] --out analyses/results/embedded [--scores FOLDER] [--prompts 30] [--draws 2]

Heads are removed (mean-ablated) in the order of the paper's composite, and in that of the score that masks are made from. The prompts were not used
for scoring. Written to OUT:

    knockout_curve.csv    one row per ranking, number of heads, order and draw, see ``hydralens.validation.knockout_curve``
    knockout_curve.md     the same as a table
    figures/knockout_paper.html, .png, and one of the method's own ranking
"""

from collections.abc import Mapping, Sequence

import pandas as pd
from shared import arguments_with_scores, by_paper, head_scores, held_out, interval, run_script, scored_on, table, write_results

import hydralens as hl
from hydralens import figures
from hydralens.scores import HeadScores
from hydralens.statistics import positive_control
from hydralens.validation import knockout_curve

SHARES = (0.01, 0.03, 0.125)  # of all heads; the paper's curve falls after the first, and the last is the size of a 7:1 mask
PAPER = (
    "The paper (Qwen3-1.7B, 4K tokens, Fig. 9b): retrieval collapses once the top 1 % of the heads (4 or 5 of 448) are removed, and random removal leaves "
    "it near perfect. What may differ: how heads are ablated (here the mean over the same prompts; the paper's way is not known), shorter prompts, and a "
    "smaller model, whose retrieval may be spread over other heads."
)


def counts_of(total: int) -> list[int]:
    return sorted({0, 1, *(max(1, round(share * total)) for share in SHARES)})


def lines(found: pd.DataFrame, rankings: Mapping[str, HeadScores]) -> list[str]:
    rows = []
    for (ranking, k), own in found.groupby(["ranking", "k"], sort=False):
        scored, random = own[own["order"] == "scored"].iloc[0], own[own["order"] == "random"]
        total = rankings[ranking].composite.numel()
        spread = f"{random['accuracy'].mean():.2f} ({', '.join(f'{value:.2f}' for value in random['accuracy'])})" if len(random) else ""
        cells = [ranking, f"{k} ({k / total:.1%})", interval(scored["accuracy"], scored["ci_low"], scored["ci_high"]), f"{scored['margin']:+.2f}", spread]
        rows.append([*cells, f"{random['margin'].mean():+.2f}" if len(random) else ""])
    n, draws = int(found["n_prompts"].iloc[0]), int(found["draw"].max()) + 1
    first = [
        f"{name}: {', '.join(f'L{layer}H{head}' for layer, head in scores.top(8))}; {scores.n_with_signal} heads with signal"
        for name, scores in rankings.items()
    ]
    return [
        "\n".join(f"By {name}. {positive_control(found[found['ranking'] == name]).sentence}" for name in rankings),
        "",
        scored_on(next(iter(rankings.values()))),
        f"{n} prompts, equally many with one needle and with four; random heads: mean of {draws} draws, each in brackets. 95 % Wilson intervals.",
        "",
        *table(["ranking", "heads removed", "accuracy", "margin", "accuracy, random heads", "margin, random heads"], rows),
        "",
        f"Best heads by {'. By '.join(first)}.",
        "",
        PAPER,
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments_with_scores(__doc__)
    parser.add_argument("--prompts", type=int, default=30, help="prompts per task")
    parser.add_argument("--draws", type=int, default=2, help="random sets of heads")
    args = parser.parse_args(argv)
    model = hl.load_model(args.model, dtype=args.dtype)
    scores = head_scores(model, args)
    rankings = {scores.method: scores, "paper": by_paper(scores)}
    checks, counts = held_out(model, args.prompts, args.tokens, args.seed), counts_of(scores.composite.numel())
    curves = {name: knockout_curve(model, ranked.top(counts[-1]), checks, counts, args.draws, args.seed, verbose=True) for name, ranked in rankings.items()}
    found = pd.concat([curve.assign(ranking=name) for name, curve in curves.items()])
    drawn = {f"knockout_{name}": figures.knockout_curve(curve) for name, curve in curves.items()}
    write_results(args.out, "knockout_curve", model, {"knockout_curve": found}, drawn, "Knock-out", lines(found, rankings))


if __name__ == "__main__":
    run_script("knockout_curve", main)
