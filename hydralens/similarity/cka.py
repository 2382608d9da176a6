"""Debiased linear CKA in minibatches (Kornblith et al. 2019, arXiv 1905.00414; minibatches: Nguyen et al. 2020, arXiv 2010.15327, Eq. 1-3).

CKA asks whether two items tell the same tokens apart, in whatever basis: turning, mirroring or scaling an item's space changes nothing. The
plain estimate of it goes to 1 when vectors are wider than tokens are many. HSIC_1 (Song et al. 2012) has no such bias at any number of tokens
above 3, so that its mean over batches tends to what all tokens together would give, and no matrix grows with the number of tokens.
"""

from math import isqrt

import torch
from jaxtyping import Float
from torch import Tensor

from hydralens.errors import InputError

BATCH = 256  # tokens compared with one another; more tell no more of the mean, and the products grow with their square
DEALT = 4  # batches that tokens are dealt to by turns: neighbouring tokens are alike, and would all be in one batch
VALUES_AT_ONCE = 2**26  # entries of a batch's Gram matrices, and of the tokens waiting (256 MiB in float32 each)
FEWEST = 4  # tokens that HSIC_1 needs


def hsic(vectors: Float[Tensor, "token item width"]) -> Float[Tensor, "item item"]:
    """HSIC_1 with linear kernels of every two items: <A, B> / (n (n - 3)), with A and B their U-centred Gram matrices.

    That is the estimator of Song et al. 2012 (Nguyen et al. Eq. 3), written as a product (Székely and Rizzo 2014, Eq. 3.2), float64.
    """
    n = len(vectors)
    x = vectors.float().transpose(0, 1)
    x = x - x.mean(1, keepdim=True)  # changes nothing but rounding: U-centring takes it out
    gram = x @ x.mT
    gram.diagonal(dim1=1, dim2=2).zero_()
    rows = gram.sum(2, keepdim=True)
    gram += rows.sum(1, keepdim=True) / ((n - 1) * (n - 2)) - rows / (n - 2) - rows.mT / (n - 2)
    gram.diagonal(dim1=1, dim2=2).zero_()
    flat = gram.flatten(1)
    return (flat @ flat.T).double().cpu() / (n * (n - 3))


def batch_size(n_items: int, width: int) -> int:
    """Tokens a batch: as many as are worth it, and as fit, both their Gram matrices and the tokens that wait to be dealt."""
    return max(FEWEST, min(BATCH, isqrt(VALUES_AT_ONCE // n_items), VALUES_AT_ONCE // (DEALT * n_items * width)))


class MinibatchCKA:
    """CKA of every two items over a stream of tokens; holds a few batches of vectors and one matrix, however many tokens come."""

    def __init__(self, n_items: int, width: int) -> None:
        self.size = batch_size(n_items, width)
        self.waiting: list[Float[Tensor, "token item width"]] = []
        self.total, self.n_tokens = torch.zeros(n_items, n_items, dtype=torch.float64), 0

    def add(self, vectors: Float[Tensor, "token item width"]) -> None:
        self.waiting.append(vectors.float())
        if sum(map(len, self.waiting)) >= self.size * DEALT:
            self._deal()

    def _deal(self) -> None:
        tokens = torch.cat(self.waiting)
        self.waiting = []
        n_batches = max(1, round(len(tokens) / self.size))
        for turn in range(n_batches):
            batch = tokens[turn::n_batches]
            if len(batch) >= FEWEST:
                self.total += len(batch) * hsic(batch)
                self.n_tokens += len(batch)

    def matrix(self) -> Float[Tensor, "item item"]:
        """Float32; 0 for independent items, 1 for items that are alike up to rotation and scale; NaN for an item that is the same at every token.

        Raises:
            InputError: fewer than 4 tokens came.
        """
        if self.waiting:
            self._deal()
        if self.n_tokens == 0:
            raise InputError(f"CKA needs at least {FEWEST} tokens; pass longer or more prompts")
        return _normalised(self.total)


def debiased_cka(vectors: Float[Tensor, "token item width"]) -> Float[Tensor, "item item"]:
    """Debiased linear CKA of every two items from all their tokens at once, float32; see ``MinibatchCKA`` for many tokens.

    Raises:
        InputError: fewer than 4 tokens.
    """
    if len(vectors) < FEWEST:
        raise InputError(f"CKA needs at least {FEWEST} tokens; there are {len(vectors)}")
    return _normalised(hsic(vectors))


def _normalised(total: Float[Tensor, "item item"]) -> Float[Tensor, "item item"]:
    own = total.diagonal().clamp(min=0).sqrt()
    return (total / (own[:, None] * own)).float()
