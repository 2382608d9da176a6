"""Cosine and CKA written out slowly, in float64."""

import torch
from jaxtyping import Float
from torch import Tensor


def naive_cosine(vectors: list[Float[Tensor, "item width"]]) -> Float[Tensor, "item item"]:
    """Mean over tokens of the cosine of every pair, float64; ``vectors`` has one ``[item, width]`` per token."""
    total = torch.zeros(len(vectors[0]), len(vectors[0]), dtype=torch.float64)
    for items in vectors:
        for i, a in enumerate(items.double()):
            for j, b in enumerate(items.double()):
                total[i, j] += (a @ b) / (a.norm() * b.norm())
    return total / len(vectors)


def naive_hsic(a: Float[Tensor, "n n"], b: Float[Tensor, "n n"]) -> float:
    """Nguyen et al. 2020, Eq. 3, term by term, with the diagonals of both set to 0."""
    n, every = len(a), range(len(a))
    a, b = ([[0.0 if i == j else row[j] for j in every] for i, row in enumerate(gram.tolist())] for gram in (a, b))
    trace = sum(a[i][j] * b[j][i] for i in every for j in every)
    product = sum(map(sum, a)) * sum(map(sum, b))
    through = sum(a[i][j] * b[j][k] for i in every for j in every for k in every)
    return (trace + product / ((n - 1) * (n - 2)) - 2 * through / (n - 2)) / (n * (n - 3))


def naive_cka(vectors: Float[Tensor, "token item width"], biased: bool = False) -> Float[Tensor, "item item"]:
    """Kornblith et al. 2019 with HSIC_1, or as they have it with HSIC_0."""
    n = len(vectors)
    grams = [x @ x.T for x in vectors.double().transpose(0, 1)]
    if biased:
        centre = torch.eye(n, dtype=torch.float64) - 1 / n
        grams = [centre @ gram @ centre for gram in grams]
    hsic = torch.tensor([[float((a * b).sum()) if biased else naive_hsic(a, b) for b in grams] for a in grams], dtype=torch.float64)
    return hsic / torch.outer(hsic.diagonal(), hsic.diagonal()).sqrt()
