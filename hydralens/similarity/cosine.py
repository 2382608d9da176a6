"""Cosine at the same token, averaged over tokens."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


class MeanCosine:
    """The mean over tokens of the cosine of every two items; holds one matrix, however many tokens come."""

    def __init__(self, n_items: int) -> None:
        self.total, self.n_tokens = torch.zeros(n_items, n_items, dtype=torch.float64), 0

    def add(self, vectors: Float[Tensor, "token item width"]) -> None:
        unit = F.normalize(vectors.float(), dim=-1).transpose(0, 1).flatten(1)  # [item, token * width]: one product sums over tokens
        self.total += (unit @ unit.T).cpu()
        self.n_tokens += len(vectors)

    def matrix(self) -> Float[Tensor, "item item"]:
        """Float32; NaN for an item that is zero at every token."""
        some = self.total.diagonal() > 0
        return torch.where(some[:, None] & some, self.total / self.n_tokens, torch.nan).float()
