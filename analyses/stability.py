"""Would another run find the same heads? Pairs that are needed, split halves, other seeds and longer prompts (the paper's Fig. 8).

    python analyses/stability.py [MODEL] --out analyses/results/embedded [--scores FOLDER] [--condition-pairs 3] [--tokens 256]

Two maps are compared with themselves: the paper's composite of direct effects, and the score that masks are made from; both over the retrieval probes alone, of
which at least three quarters of the pairs count. Pairs needed and split halves are of the saved scores; seeds and lengths are measured here. Written to OUT:

    stability_pairs.csv         one row per map, top k, number of pairs, draw and what it is compared with, see ``hydralens.statistics.pairs_curve``
    stability_conditions.csv    one row per map, top k and two conditions, see ``hydralens.statistics.stability``
    stability.md                both as tables
    figures/stability_*.html, .png
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd
from shared import TASKS, arguments_with_scores, by_paper, head_scores, run_script, scored_on, table, write_results

import hydralens as hl
from hydralens import figures
from hydralens.errors import InputError
from hydralens.scores import Effects, HeadScores
from hydralens.statistics import fewest_pairs, pairs_curve, split_half, stability, vary

TOPS = (0.03, 0.125)  # shares of all heads: those with clear effects, and the size of a 7:1 mask
PAPER = (
    "The paper (Qwen3-1.7B, 448 heads, Fig. 8): Spearman about 0.921 with 6 samples and flat by 12, probably against the map of all samples; the top "
    "heads at 4K tokens and at longer contexts have a Jaccard index of 0.78 or more and a Spearman of 0.85 or more. An independent rebuild on another "
    "model found a split-half Spearman of 0.46 and 19 of the top 20 in common: most heads do nothing, and their order is noise or ties. Here lengths "
    "differ by a factor of two only, and a condition has few pairs, so that its agreement with another one is to be read beside that of halves of its own "
    "pairs."
)


def of_retrieval(scores: HeadScores) -> HeadScores:
    """Only the retrieval probes of which at least three quarters of the pairs count: the fewest pairs of a probe bound the curve.

    Raises:
        InputError: there are none.
    """

    def steady(effects: Effects) -> Effects:
        return {"retrieval": {label: effect for label, effect in effects["retrieval"].items() if effect.n_pairs >= 0.75 * len(effect.kept)}} if effects else {}

    found = replace(scores, receivers=steady(scores.receivers), measured=steady(scores.measured))
    if not (found.receivers["retrieval"] and found.made_from["retrieval"]):
        raise InputError("in no retrieval probe three quarters of the pairs count; score shorter prompts or another model")
    return found.select(lambda effect: effect)


def maps_of(scores: HeadScores) -> dict[str, HeadScores]:
    return {scores.method: scores, "paper": by_paper(scores)}


def tops(total: int) -> list[int]:
    return sorted({max(1, round(share * total)) for share in TOPS})


def curves(maps: Mapping[str, HeadScores], n_draws: int) -> pd.DataFrame:
    frames = [
        pairs_curve(scores, k, range(1, fewest_pairs(scores) + 1), n_draws).assign(map=name)
        for name, scores in maps.items()
        for k in tops(scores.composite.numel())
    ]
    return pd.concat(frames, ignore_index=True)


def conditions(by_condition: Mapping[str, HeadScores]) -> pd.DataFrame:
    of_map = {name: {condition: maps_of(scores)[name] for condition, scores in by_condition.items()} for name in maps_of(next(iter(by_condition.values())))}
    total = next(iter(by_condition.values())).composite.numel()
    return pd.concat([stability(scores, k).assign(map=name) for name, scores in of_map.items() for k in tops(total)], ignore_index=True)


def lines(maps: Mapping[str, HeadScores], curve: pd.DataFrame, between: pd.DataFrame, settings: str) -> list[str]:
    measures = ["top_k_overlap", "jaccard", "spearman"]
    means = curve.groupby(["map", "against", "k", "n_pairs"], sort=False)[measures].mean()
    ks, names = sorted(set(curve["k"])), list(maps)
    rows = []
    for against in ("other pairs", "all pairs"):
        for n in sorted(set(curve.loc[curve["against"] == against, "n_pairs"])):
            cells = [f"{means.loc[(name, against, k, n), 'top_k_overlap']:.2f}" if (name, against, k, n) in means.index else "" for name in names for k in ks]
            spearman = [f"{means.loc[(name, against, ks[0], n), 'spearman']:.2f}" if (name, against, ks[0], n) in means.index else "" for name in names]
            rows.append([against, str(n), *cells, *spearman])
    header = ["against", "pairs a probe", *(f"{name}: top {k}" for name in names for k in ks), *(f"{name}: Spearman" for name in names)]
    halves = [
        f"{name}, top {k}: {found['top_k_overlap']:.2f} ({found['top_k_overlap_low']:.2f} to {found['top_k_overlap_high']:.2f}), Spearman "
        f"{found['spearman']:.2f}"
        for name, scores in maps.items()
        for k in ks
        for found in [split_half(scores, k)]
    ]
    seen = [
        [row.map, f"{row.a} / {row.b}" if row.a != row.b else f"{row.a}, halves", str(row.k), *(f"{getattr(row, measure):.2f}" for measure in measures)]
        for row in between.itertuples()
    ]
    total = next(iter(maps.values())).composite.numel()
    chance = ", ".join(f"{k / total:.2f} of the top {k}" for k in ks)
    used = {name: ", ".join(f"{label} ({effect.n_pairs})" for label, effect in scores.made_from["retrieval"].items()) for name, scores in maps.items()}
    return [
        scored_on(maps[names[0]]),
        *(f"Retrieval probes behind the map {name} (pairs): {probes}." for name, probes in used.items()),
        f"Heads with a score other than 0: {', '.join(f'{scores.n_with_signal} of {total} ({name})' for name, scores in maps.items())}.",
        "",
        "## Pairs needed",
        "",
        f"Share of the top k heads in common (unrelated maps share {chance}) and Spearman over all heads, means of {curve['draw'].nunique()} draws.",
        "",
        *table(header, rows),
        "",
        f"Random halves of all pairs: {'; '.join(halves)}.",
        "",
        "## Seeds and lengths",
        "",
        settings,
        "",
        *table(["map", "conditions", "k", "top k in common", "Jaccard", "Spearman"], seen),
        "",
        PAPER,
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments_with_scores(__doc__)
    parser.add_argument("--condition-pairs", type=int, default=3, help="pairs per probe of every condition")
    parser.add_argument("--draws", type=int, default=20, help="random draws of pairs")
    args = parser.parse_args(argv)
    model = hl.load_model(args.model, dtype=args.dtype)
    scores = of_retrieval(head_scores(model, args))
    maps = maps_of(scores)
    curve = curves(maps, args.draws)
    varied = {
        f"seed {args.seed}": {},
        f"seed {args.seed + 1}": {"seed": args.seed + 1},
        f"{2 * args.tokens} tokens": {"n_tokens": 2 * args.tokens},
    }
    shared = {"n_pairs": args.condition_pairs, "n_tokens": args.tokens, "seed": args.seed, "shapes": TASKS, "corruptions": ("value", "swap")}
    between = conditions(vary(model, varied, method=scores.method, pairs_at_most=args.condition_pairs, verbose=True, **shared))
    settings = (
        f"{' and '.join(TASKS)}, value and swap corruptions, {args.condition_pairs} pairs a probe, {args.tokens} tokens where not said otherwise; "
        f"the longer prompts have the needles of seed {args.seed}. Halves: of one condition's own pairs, half as many on each side."
    )
    drawn = {}
    for name in maps:
        k = tops(model.info.n_layers * model.info.n_heads)[-1]
        of_map = {"curve": curve[(curve["map"] == name) & (curve["k"] == k)], "between": between[(between["map"] == name) & (between["k"] == k)]}
        drawn |= {f"stability_pairs_{name}": figures.pairs_curve(of_map["curve"]), f"stability_conditions_{name}": figures.stability_matrix(of_map["between"])}
    frames = {"stability_pairs": curve, "stability_conditions": between}
    write_results(args.out, "stability", model, frames, drawn, "Stability of the head map", lines(maps, curve, between, settings))


if __name__ == "__main__":
    run_script("stability", main)
