"""Do head detectors agree with each other and with causal effects, and which of them predicts what ablation breaks?

    python analyses/detector_agreement.py [MODEL] --out analyses/results/embedded [--pairs 6] [--tokens 256] [--queries 60]

Every method scores the same probes (``score_heads(method=...)``). Written to OUT:

    scores/METHOD/   the scores, as ``HeadScores.save`` writes them; a second call goes on where the first one stopped
    agreement.csv    each two methods: Spearman over all heads and overlap of the top K (K of 7:1; ties broken at random)
    damage.csv       each method: accuracy on prompts not used for scoring with its top 4, 8 and 16 heads mean-ablated, and Spearman of its
                     score with the exact single-head drop of the answer's log-probability
    agreement.md     both as tables
    figures/detector_agreement.html, .png
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
import torch
from scipy.stats import binomtest, spearmanr

import hydralens as hl
from hydralens.environment import made_with
from hydralens.errors import InputError
from hydralens.files import write_atomically, write_text
from hydralens.models.lens import LensModel
from hydralens.patching.attribution import attribution_patch
from hydralens.scores import HeadScores, scores_of
from hydralens.scoring import METHODS, score_heads
from hydralens.selection import heads_for_ratio
from hydralens.statistics import agreement
from hydralens.validation import ablated_margins

HELD_OUT = 777_000  # added to the seed: no prompt of the checks was used for scoring
REMOVED = (4, 8, 16)


def score_all(model: LensModel, folder: Path, n_pairs: int, n_tokens: int, seed: int) -> dict[str, HeadScores]:
    """Every method's scores of the same probes, and total effects by attribution beside them."""
    probes = hl.probes.retrieval(model, n_pairs, n_tokens, seed) + hl.probes.reasoning(model, n_pairs, seed)
    scores = {}
    for method in METHODS:
        if not (folder / method / "scores.json").exists():
            score_heads(model, probes, method=method, required=("retrieval",), shards=folder / "shards", verbose=True).save(folder / method)
        scores[method] = HeadScores.load(folder / method)
    if not (folder / "total" / "scores.json").exists():
        used = [probe for probe in probes if probe.label in scores["direct"].receivers["retrieval"]]
        effects = [attribution_patch(model, probe.select([0, 1]), "z", verbose=True) for probe in used]
        scores_of(model.info, "total", effects, []).save(folder / "total")
    scores["total"] = HeadScores.load(folder / "total")
    return scores


def agreements(scores: dict[str, HeadScores], k: int) -> pd.DataFrame:
    rows = []
    for a in scores:
        for b in scores:
            found = agreement(scores[a].composite, scores[b].composite, k)
            rows.append({"a": a, "b": b, "k": k, "spearman": found.spearman, "top_k_overlap": found.top_k_overlap})
    return pd.DataFrame(rows)


def damage(model: LensModel, scores: dict[str, HeadScores], n_queries: int, n_tokens: int, n_pairs: int, seed: int) -> pd.DataFrame:
    """What each method's best heads break when they are taken away, on held-out prompts with one and with four needles."""
    shapes = ("niah_single_2", "niah_multikey_1")
    checks = hl.probes.retrieval(model, n_queries // 2, n_tokens, seed + HELD_OUT, shapes=shapes, corruptions=("value",))
    probes = hl.probes.retrieval(model, 2, n_tokens, seed + HELD_OUT + 1, shapes=shapes, corruptions=("value",))
    exact = hl.detectors.ablation_drop(model, probes, how="mean", metric="log-probability", verbose=True).composite.flatten()
    sets = [(method, k) for method in scores for k in (0, *REMOVED)]
    removed = torch.zeros(len(sets), model.info.n_layers, model.info.n_heads, dtype=torch.bool)
    for row, (method, k) in zip(removed, sets, strict=True):
        for cell in scores[method].top(k) if k else ():
            row[cell] = True
    rows = []
    for (method, k), margins in zip(sets, ablated_margins(model, removed, checks, verbose=True).numpy(), strict=True):
        right = int((margins > 0).sum())
        low, high = binomtest(right, len(margins)).proportion_ci(method="wilson")
        known = {"accuracy": right / len(margins), "ci_low": low, "ci_high": high, "margin": float(margins.mean()), "n_prompts": len(margins)}
        single = float(spearmanr(scores[method].composite.flatten(), exact).statistic)
        rows.append({"method": method, "k": k} | known | {"spearman_with_single_head_drop": single})
    return pd.DataFrame(rows)


def as_markdown(model: LensModel, pairs: pd.DataFrame, broken: pd.DataFrame) -> str:
    k = int(pairs["k"].iloc[0])
    methods = list(dict.fromkeys(pairs["a"]))
    lines = [
        f"# Detectors and causal effects: {model.info.id}",
        "",
        made_with(model),
        "",
        f"## Overlap of the top {k} heads (below) and Spearman over all (above)",
        "",
    ]
    lines += ["| | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|"]
    table = pairs.set_index(["a", "b"])
    for row, a in enumerate(methods):
        cells = [f"{table.loc[(a, b), 'spearman' if column > row else 'top_k_overlap']:.2f}" for column, b in enumerate(methods)]
        lines.append(f"| {a} | " + " | ".join(cells) + " |")
    n = int(broken["n_prompts"].iloc[0])
    lines += ["", f"## Accuracy on {n} held-out prompts with the best heads mean-ablated (95 % Wilson interval), most damage by 8 heads first", ""]
    lines += [
        "| method | " + " | ".join(f"{k} heads" for k in REMOVED) + " | margin without 8 | Spearman with the single-head drop |",
        "|---" * (len(REMOVED) + 3) + "|",
    ]
    by = broken.set_index(["method", "k"])
    for method in sorted(methods, key=lambda method: by.loc[(method, 8), "margin"]):
        cells = [f"{by.loc[(method, k), 'accuracy']:.2f} [{by.loc[(method, k), 'ci_low']:.2f} {by.loc[(method, k), 'ci_high']:.2f}]" for k in REMOVED]
        lines.append(
            f"| {method} | " + " | ".join(cells) + f" | {by.loc[(method, 8), 'margin']:+.2f} | {by.loc[(method, 8), 'spearman_with_single_head_drop']:.2f} |"
        )
    whole = by.loc[(methods[0], 0)]
    return "\n".join([*lines, "", f"With all heads: {whole['accuracy']:.2f} [{whole['ci_low']:.2f} {whole['ci_high']:.2f}].", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=6, help="pairs per probe")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per retrieval prompt")
    parser.add_argument("--queries", type=int, default=60, help="held-out prompts for the ablation damage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    model = hl.load_model(args.model, dtype=args.dtype)
    scores = score_all(model, args.out / "scores", args.pairs, args.tokens, args.seed)
    pairs = agreements(scores, heads_for_ratio("7:1", model.info.n_layers * model.info.n_heads))
    broken = damage(model, scores, args.queries, args.tokens, args.pairs, args.seed)
    for name, frame in (("agreement", pairs), ("damage", broken)):
        write_atomically(args.out / f"{name}.csv", lambda path, frame=frame: frame.to_csv(path, index=False, float_format="%.4g"))
    hl.figures.save_figure(hl.figures.detector_agreement(pairs), args.out / "figures" / "detector_agreement")
    text = as_markdown(model, pairs, broken)
    write_text(args.out / "agreement.md", text)
    print(text)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"detector_agreement: {error}", file=sys.stderr)
        sys.exit(2)
