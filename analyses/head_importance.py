"""How unequal are the heads of a layer, how many are critical and how many replaceable? The paper's statistics on another model (Table 16).

    python analyses/head_importance.py [MODEL] --out analyses/results/embedded [--scores FOLDER] [--pairs 8] [--tokens 256]

Importance is a head's mean effect over a capability's probes, of the capability where that is larger; once by direct effects, as in the paper, and once
by the score that masks are made from. Written to OUT:

    head_importance.csv    one row per measure of importance and layer: gini, n_critical, n_between, n_replaceable, mixed (holds both kinds)
    head_importance.md     the statistics beside the paper's, and the counts at several thresholds
    figures/head_importance.html, .png     the layers' profile
"""

from collections.abc import Mapping, Sequence

import pandas as pd
from shared import arguments_with_scores, head_scores, run_script, scored_on, table, write_results

import hydralens as hl
from hydralens.figures import layer_profile
from hydralens.profiles import HeadProfile, strength
from hydralens.scores import THRESHOLD, HeadScores, all_probes

THRESHOLDS = (THRESHOLD, THRESHOLD / 2, THRESHOLD / 5, THRESHOLD / 10)
PAPER_REPLACEABLE = 407 / 448
PAPER = ["0.399 - 0.915", "0.622", "29 of 448 (6.5 %)", "407 of 448 (90.8 %; threshold not known)", "10 of 28"]
DIFFERENCES = (
    "What may explain a difference: a smaller model with fewer heads a layer (the Gini of n heads is at most (n - 1) / n), shorter prompts (the paper's have "
    "4K tokens), sub-probes and a general capability that the paper does not name, effects through receivers (path patching), which are left out here, and "
    "its threshold for replaceable heads."
)


def profiles(scores: HeadScores) -> dict[str, HeadProfile]:
    """By what importance is measured -> profile."""
    measures = {"direct effect": scores.receivers, f"{scores.method} score": scores.measured}
    return {name: HeadProfile(strength(effects)) for name, effects in measures.items() if effects}


def counted(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.1%})"


def summary(profile: HeadProfile) -> list[str]:
    gini, n = profile.gini[profile.gini.isfinite()], profile.importance.numel()
    return [
        f"{gini.min():.3f} - {gini.max():.3f}",
        f"{gini.mean():.3f}",
        counted(int(profile.critical.sum()), n),
        f"{counted(int(profile.replaceable.sum()), n)}, below {profile.replaceable_below:g}",
        f"{len(profile.mixed_layers)} of {len(profile.importance)}",
    ]


def lines(scores: HeadScores, found: Mapping[str, HeadProfile]) -> list[str]:
    rows = ["Gini of a layer's importances", "mean over layers", f"critical, from {THRESHOLD:g}", "replaceable", "layers that hold both"]
    beside = list(zip(rows, *(summary(profile) for profile in found.values()), PAPER, strict=True))
    at = []
    for threshold in THRESHOLDS:
        cells = []
        for profile in found.values():
            lower = HeadProfile(profile.importance, replaceable_below=threshold)
            cells += [counted(int(lower.replaceable.sum()), lower.importance.numel()), f"{len(lower.mixed_layers)}"]
        at.append([f"{threshold:g}", *cells])
    cuts = [f"{profile.importance.nanquantile(PAPER_REPLACEABLE):.2g} ({name})" for name, profile in found.items()]
    probes = ", ".join(f"{label} ({effect.n_pairs})" for label, effect in all_probes(scores.receivers).items())
    return [
        "\n".join(f"By {name}: {profile.finding}." for name, profile in found.items()),
        "",
        scored_on(scores),
        f"Direct effects: probes (pairs): {probes}.",
        "",
        "## Beside the paper",
        "",
        *table(["", *(f"by {name}" for name in found), "paper: Qwen3-1.7B"], beside),
        "",
        DIFFERENCES,
        "",
        "## Replaceable heads by threshold",
        "",
        f"The paper's share of replaceable heads, {PAPER_REPLACEABLE:.1%}, would be reached with a threshold of {' and '.join(cuts)}.",
        "",
        *table(["replaceable below", *(f"by {name}{what}" for name in found for what in ("", ": layers with both"))], at),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments_with_scores(__doc__).parse_args(argv)
    model = hl.load_model(args.model, dtype=args.dtype)
    scores = head_scores(model, args)
    found = profiles(scores)
    frame = pd.concat([profile.to_frame().assign(importance=name) for name, profile in found.items()])
    write_results(
        args.out, "head_importance", model, {"head_importance": frame}, {"head_importance": layer_profile(scores)}, "Importance of heads", lines(scores, found)
    )


if __name__ == "__main__":
    run_script("head_importance", main)
