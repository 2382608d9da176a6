"""Which method's heads make the best mask? Retrieval that is left when all other heads see only sinks and a recent window, nothing trained.

    python analyses/best_mask.py analyses/results/embedded/scores [MODEL] --out analyses/results/embedded [--queries 150]

Reads the scores that ``detector_agreement.py`` wrote. The prompts are new: other seeds than for scoring, with one needle and with five, each in
the needle's wording used for scoring and in another one; only prompts whose needle lies outside the window are asked. Every prompt is a
haystack of its own, and intervals are bootstrapped over haystacks. Written to OUT:

    masks.csv        ratio, method, needles, accuracy and margin with intervals, and the difference to the default method on the same prompts
    masks.md         the same as a table
    figures/best_mask.html, .png     accuracy by ratio
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import hydralens as hl
from hydralens.environment import made_with
from hydralens.errors import InputError
from hydralens.files import write_atomically, write_text
from hydralens.models.lens import LensModel
from hydralens.probes.needles import SHAPES, Shape
from hydralens.scores import HeadScores
from hydralens.selection import heads_for_ratio
from hydralens.statistics import clustered_bootstrap, clustered_difference
from hydralens.validation import far_prompts, mask_margins, random_masks

DEFAULT, RATIOS, HELD_OUT = "restriction", ("7:1", "15:1"), 888_000
OTHER = {
    "needle": "{key} keeps a secret {kind}, and it is {value}.",
    "question": "\n\nWe were told that {key} keeps a secret {kind}, and it is",
}
# needles in the prompt -> the shapes asked, one in the wording of the scoring probes and one in another
TASKS = {
    1: (Shape("prose", ("number", "word")), Shape("prose", ("number", "word"), **OTHER)),
    5: (Shape("prose", ("number", "word"), others=4), Shape("prose", ("number", "word"), others=4, **OTHER)),
}


def masks_of(scores: dict[str, HeadScores], n_layers: int, n_heads: int) -> dict[tuple[str, str], torch.Tensor]:
    """(method, ratio) -> bool ``[layer, head]``; three random masks a ratio, and all and no heads under the ratio ``""``."""
    masks = {("all heads", ""): torch.ones(n_layers, n_heads, dtype=torch.bool), ("no head", ""): torch.zeros(n_layers, n_heads, dtype=torch.bool)}
    for ratio in RATIOS:
        k = heads_for_ratio(ratio, n_layers * n_heads)
        for method, found in scores.items():
            mask = torch.zeros(n_layers, n_heads, dtype=torch.bool)
            mask[tuple(torch.tensor(found.top(k)).T)] = True
            masks[method, ratio] = mask
        for draw, mask in enumerate(random_masks((n_layers, n_heads), k, 3)):
            masks[f"random {draw}", ratio] = mask
    return masks


def prompts(model: LensModel, shape: Shape, name: str, n: int, n_tokens: int, seed: int) -> list:
    SHAPES[name] = shape
    return far_prompts(model, hl.probes.niah(model, name, "value", n, n_tokens, seed + HELD_OUT))


def measure(model: LensModel, masks: dict[tuple[str, str], torch.Tensor], n_queries: int, n_tokens: int, seed: int) -> pd.DataFrame:
    rows = []
    stacked = torch.stack(list(masks.values()))
    for needles, shapes in TASKS.items():
        asked = [pair for index, shape in enumerate(shapes) for pair in prompts(model, shape, f"{needles} needles, wording {index}", n_queries, n_tokens, seed)]
        margins = mask_margins(model, stacked, asked).numpy()
        haystack = np.arange(len(asked))
        own = dict(zip(masks, margins, strict=True))
        for (method, ratio), values in own.items():
            right, base = (values > 0).astype(float), own.get((DEFAULT, ratio))
            accuracy, margin = clustered_bootstrap(right, haystack), clustered_bootstrap(values, haystack)
            row = {"ratio": ratio, "method": method, "needles": needles, "n_queries": len(asked)}
            row |= {"accuracy": accuracy.mean, "accuracy_low": accuracy.low, "accuracy_high": accuracy.high}
            row |= {"margin": margin.mean, "margin_low": margin.low, "margin_high": margin.high}
            if base is not None:
                gap = clustered_difference((base > 0).astype(float), right, haystack)
                row |= {"default_minus_this": gap.mean, "difference_low": gap.low, "difference_high": gap.high}
            rows.append(row)
    return pd.DataFrame(rows)


def as_markdown(model: LensModel, found: pd.DataFrame) -> str:
    note = "Accuracy [95 % interval]; behind it, in brackets, the default's accuracy minus this one's on the same prompts."
    lines = [f"# Masks: {model.info.id}", "", made_with(model), "", note, ""]
    by = found.set_index(["ratio", "method", "needles"])

    def cell(ratio: str, method: str, needles: int) -> str:
        row = by.loc[(ratio, method, needles)]
        accuracy = f"{row['accuracy']:.2f} [{row['accuracy_low']:.2f} {row['accuracy_high']:.2f}]"
        if not ratio or method == DEFAULT:
            return accuracy
        return f"{accuracy} ({row['default_minus_this']:+.2f} [{row['difference_low']:+.2f} {row['difference_high']:+.2f}])"

    columns = [f"{needles} needle{'s' if needles > 1 else ''} ({int(by.loc[('', 'all heads', needles), 'n_queries'])} queries)" for needles in TASKS]
    for ratio in RATIOS:
        methods = list(dict.fromkeys(found.loc[found["ratio"] == ratio, "method"]))
        methods.sort(key=lambda method, ratio=ratio: -sum(by.loc[(ratio, method, needles), "accuracy"] for needles in TASKS))
        lines += [f"## {ratio}", "", "| method | " + " | ".join(columns) + " |", "|---|---|---|"]
        for name, at in [("all heads", ""), *((method, ratio) for method in methods), ("no head", "")]:
            lines.append(f"| {'**' + name + '**' if name == DEFAULT else name} | " + " | ".join(cell(at, name, needles) for needles in TASKS) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scores", type=Path, help="the folder scores/ of detector_agreement.py")
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--queries", type=int, default=150, help="prompts a task and wording, those with a near needle included")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    scores = {folder.name: HeadScores.load(folder) for folder in sorted(args.scores.iterdir()) if (folder / "scores.json").exists()}
    if DEFAULT not in scores:
        raise InputError(f"{args.scores} holds no scores of {DEFAULT}; make them with analyses/detector_agreement.py")
    model = hl.load_model(args.model, dtype=args.dtype)
    found = measure(model, masks_of(scores, model.info.n_layers, model.info.n_heads), args.queries, args.tokens, args.seed)
    write_atomically(args.out / "masks.csv", lambda path: found.to_csv(path, index=False, float_format="%.4g"))
    named = found.assign(task=found["needles"].map(lambda needles: f"{needles} needle{'s' if needles > 1 else ''}"))
    hl.figures.save_figure(hl.figures.ratio_sweep(named, DEFAULT), args.out / "figures" / "best_mask")
    text = as_markdown(model, found)
    write_text(args.out / "masks.md", text)
    print(text)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"best_mask: {error}", file=sys.stderr)
        sys.exit(2)
