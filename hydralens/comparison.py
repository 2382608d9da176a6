"""The similarity job in one call: how alike layers and heads are by every measure, whether that comes in blocks, and the figures of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from hydralens.figures.clusters import head_clusters
from hydralens.figures.matrices import block_similarity, head_similarity, layer_similarity
from hydralens.figures.saving import save_figures
from hydralens.files import write_atomically
from hydralens.models.lens import LensModel
from hydralens.probes.base import Probe
from hydralens.similarity import Blocks, BlockStructure, Similarity, head_blocks, layer_blocks, similarities

LAYERS, HEADS = ("output", "update", "cka"), ("write", "cka")  # z says what its CKA says better


@dataclass(frozen=True, eq=False)
class Comparison:
    """What ``compare`` found.

    Attributes:
        layers, heads: metric -> similarity; of layers ``output``, ``update`` and ``cka``, of heads ``write`` and ``cka``.
        structure: blocks of the paper's pair, layers' outputs and heads' contributions.
        blocks: one row a test: kind (layer, head or kv group), metric, against, then the fields of ``similarity.Blocks``.
    """

    layers: dict[str, Similarity]
    heads: dict[str, Similarity]
    structure: BlockStructure
    blocks: pd.DataFrame

    def figures(self) -> dict[str, go.Figure]:
        """File name -> figure."""
        drawn = {"block_similarity": block_similarity(self.layers["output"], self.heads["write"], self.structure)}
        drawn |= {_name("layer", metric): layer_similarity(sim) for metric, sim in self.layers.items()}
        drawn |= {_name("head", metric): head_similarity(sim) for metric, sim in self.heads.items()}
        return drawn | {"head_clusters": head_clusters(self.heads["write"])}

    def save(self, out: str | Path) -> list[Path]:
        """Write ``layer_similarity.csv`` and ``head_similarity.csv`` (and, by name, those of the other metrics), ``blocks.csv`` and ``figures/``.

        Returns:
            The figures' files.

        Raises:
            InputError: ``out`` cannot be written.
        """
        out = Path(out)
        for kind, found in (("layer", self.layers), ("head", self.heads)):
            for metric, sim in found.items():
                sim.save_csv(out / f"{_name(kind, metric)}.csv")
        write_atomically(out / "blocks.csv", lambda path: self.blocks.to_csv(path, index=False, float_format="%.6g"))
        return save_figures(self.figures(), out / "figures")


def compare(model: LensModel, prompts: Sequence[Probe] | Sequence[str], *, seed: int = 0, verbose: bool = False) -> Comparison:
    """Compare layers and heads on the prompts, and test for blocks.

    Args:
        seed: of the draws that the tests compare with.

    Raises:
        InputError: as ``layer_similarity``.
    """
    layers, heads = similarities(model, prompts, LAYERS, HEADS, verbose=verbose)
    # Heads that write along one line in opposite directions cancel in a mean of cosines.
    sizes = heads | {"|write|": replace(heads["write"], matrix=heads["write"].matrix.abs())}
    of_layers = {metric: layer_blocks(sim, seed=seed) for metric, sim in layers.items()}
    of_heads = {metric: head_blocks(sim, seed=seed) for metric, sim in sizes.items()}
    of_groups = {metric: head_blocks(sim, model.info.group, seed=seed) for metric, sim in sizes.items()}
    rows = [_row("layer", metric, blocks) for metric, pair in of_layers.items() for blocks in pair]
    rows += [_row(kind, metric, blocks) for kind, found in (("head", of_heads), ("kv group", of_groups)) for metric, blocks in found.items()]
    structure = BlockStructure(*of_layers["output"], of_heads["write"], of_heads["|write|"])
    return Comparison(layers, heads, structure, pd.DataFrame(rows))


def _row(kind: str, metric: str, blocks: Blocks) -> dict:
    about = asdict(blocks)
    return {"kind": kind, "metric": metric, "against": about.pop("against"), **about, "starts": " ".join(map(str, blocks.starts)), "is_real": blocks.is_real}


def _name(kind: str, metric: str) -> str:
    """The contract's names for the paper's pair, with the metric behind them for the others."""
    return f"{kind}_similarity" if metric in (LAYERS[0], HEADS[0]) else f"{kind}_similarity_{metric}"
