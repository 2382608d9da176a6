"""Are layers alike in blocks, and are the heads of a layer? The paper's Fig. 2, with a test and an effect size for either statement.

    python analyses/block_vs_head_similarity.py [MODEL] --out analyses/results/embedded [--prompts 2] [--tokens 256]

Clean prompts of every retrieval and reasoning probe are compared. Written to OUT:

    block_vs_head_similarity.csv    one row a test, see ``hydralens.similarity.Blocks``
    block_vs_head_similarity.md     the tests as a table, and how similarity falls with distance
    figures/block_vs_head_similarity.html, .png     layers beside heads
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from shared import arguments, run_script, table, write_results
from torch import Tensor

import hydralens as hl
from hydralens.comparison import Comparison, compare

PAPER = (
    "The paper (Qwen3-1.7B, 28 layers of 16 heads, Fig. 2) shows cosines of layer outputs that change block by block or smoothly over depth, with no "
    "clear boundary between layers that need full attention and layers that do not, and few bright heads in a layer. Its figure has no test and no number "
    "to compare with. What may differ: the model, the prompts (the paper's are longer), and that its head map shows heads' contributions to the answer's "
    "logit, where this one compares what heads write."
)


def by_distance(matrix: Float[Tensor, "item item"]) -> tuple[float, float]:
    """Mean similarity of neighbours, and of items at least half the depth apart."""
    n = len(matrix)
    apart = (torch.arange(n)[:, None] - torch.arange(n)).abs() >= max(1, n // 2)
    return float(matrix.diagonal(1).nanmean()), float(matrix[apart].nanmean())


def lines(found: Comparison, n_prompts: int) -> list[str]:
    tokens = found.layers["output"].n_tokens
    rows = [
        [
            row.kind,
            row.metric.replace("|write|", "write, magnitude"),
            row.against,
            f"{row.within:.3f}",
            f"{row.between:.3f}",
            f"{row.gain:+.3f}",
            f"{row.explained:.1%}",
            f"{row.null_explained:.1%}",
            f"{row.p:.2g}",
            row.starts if row.kind == "layer" else "",
        ]
        for row in found.blocks.itertuples()
    ]
    header = ["kind", "metric", "against", "within blocks", "between", "gain", "explained", "by chance", "p", "blocks begin at"]
    apart = [[metric, *(f"{value:.2f}" for value in by_distance(sim.matrix))] for metric, sim in found.layers.items()]
    return [
        f"{found.structure.finding}. {n_prompts} prompts, {tokens:,} tokens; {int(found.blocks['n_draws'].iloc[0])} draws from each null hypothesis.",
        "",
        verdicts(found),
        "",
        PAPER,
        "",
        "## Tests",
        "",
        "Explained: share of the variance of all similarities that the blocks explain (against layers that drift evenly: beyond what distance explains). "
        "Heads: each layer is a block, nothing is searched; by magnitude too, since heads may write along one line in opposite directions.",
        "",
        *table(header, rows),
        "",
        "## Layers by distance",
        "",
        *table(["metric", "neighbours", "half the depth apart or more"], apart),
    ]


def verdicts(found: Comparison) -> str:
    """By each measure of layers: blocks beyond even drift or not."""
    beyond = found.blocks[(found.blocks["kind"] == "layer") & (found.blocks["against"] == "layers that drift evenly")]
    names = {"output": "cosine of outputs", "update": "cosine of updates", "cka": "debiased CKA of outputs whose tokens have unit length"}
    said = [f"{names[row.metric]}: {'blocks' if row.is_real else 'none'} (p = {row.p:.2g}, {row.explained:.1%})" for row in beyond.itertuples()]
    return f"Blocks of layers beyond even drift, by measure: {'; '.join(said)}."


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=2, help="prompts per probe")
    args = parser.parse_args(argv)
    model = hl.load_model(args.model, dtype=args.dtype)
    probes = hl.probes.retrieval(model, args.prompts, args.tokens, args.seed, corruptions=("value",)) + hl.probes.reasoning(model, args.prompts, args.seed)
    found = compare(model, probes, seed=args.seed, verbose=True)
    figures = {"block_vs_head_similarity": found.figures()["block_similarity"]}
    n_prompts = sum(probe.n_pairs for probe in probes)
    write_results(
        args.out,
        "block_vs_head_similarity",
        model,
        {"block_vs_head_similarity": found.blocks},
        figures,
        "Layers and heads, alike in blocks or not",
        lines(found, n_prompts),
    )


if __name__ == "__main__":
    run_script("block_vs_head_similarity", main)
