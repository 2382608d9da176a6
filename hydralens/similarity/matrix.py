"""The result type: a square similarity matrix that knows its rows."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hydralens.files import write_atomically


@dataclass(frozen=True, eq=False)
class Similarity:
    """A square similarity matrix with its labels.

    Attributes:
        matrix: float32 ``[item, item]``, symmetric, at most 1; NaN where an item has nothing to compare.
        labels: ``L0``, ``L1``.. for layers, ``L0H0``, ``L0H1``.. for heads, in the matrix's order.
        kind: ``"layer"`` or ``"head"``.
        metric: what was compared and how, for a person.
        n_tokens: tokens that were compared; 0 where effects were.
    """

    matrix: Float[Tensor, "item item"]
    labels: list[str]
    kind: str
    metric: str
    n_tokens: int

    @property
    def layers(self) -> Int[Tensor, "item"]:
        """The layer of each row."""
        return torch.tensor([int(label[1:].split("H")[0]) for label in self.labels])

    @property
    def within_layer(self) -> Float[Tensor, "pair"]:
        """The similarity of every two different heads of one layer, each pair once; empty for a matrix of layers."""
        return self._pairs(self.layers[:, None] == self.layers)

    @property
    def between_layers(self) -> Float[Tensor, "pair"]:
        """The similarity of every two items of different layers, each pair once."""
        return self._pairs(self.layers[:, None] != self.layers)

    @property
    def mean_within_layer(self) -> float:
        """Mean over pairs of different heads of the same layer; NaN for a matrix of layers, which has no such pairs."""
        return float(self.within_layer.mean(dtype=torch.float64))

    @property
    def mean_between_layers(self) -> float:
        """Mean over pairs from different layers."""
        return float(self.between_layers.mean(dtype=torch.float64))

    def _pairs(self, wanted: Bool[Tensor, "item item"]) -> Float[Tensor, "pair"]:
        matrix = self.matrix.detach().float().cpu()
        return matrix[wanted.triu(1) & matrix.isfinite()]

    def to_frame(self) -> pd.DataFrame:
        """The matrix with its labels as index and columns."""
        return pd.DataFrame(self.matrix.numpy(), index=self.labels, columns=self.labels)

    def save_csv(self, path: str | Path) -> Path:
        """Write ``to_frame`` with six significant digits, whole or not at all."""
        return write_atomically(path, lambda temporary: self.to_frame().to_csv(temporary, float_format="%.6g"))
