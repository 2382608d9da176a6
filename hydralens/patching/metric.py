"""The metric: how strongly the answer leads over the counterfactual answer."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hydralens.errors import check_word
from hydralens.models.anatomy import Anatomy

DECAY = 0.9  # lambda of HydraHead Eq. 9
READOUTS = ("span", "first")


def logit_difference(
    anatomy: Anatomy,
    residual: Float[Tensor, "row n d_model"],
    answer: Int[Tensor, "n"],
    foil: Int[Tensor, "n"],
    readout: str = "span",
) -> Float[Tensor, "row"]:
    """Discounted logit difference of answer and counterfactual answer, HydraHead Eq. 9: sum_j 0.9^j (z_j[a+] - z_j[a-]) / sum_j 0.9^j.

    Computed in at least float32 from the residual stream at the read positions; only the rows of the unembedding that are
    compared are multiplied. ``readout="first"`` scores the first answer token alone: with the clean answer forced into both
    runs it is the only token that the corrupt run really overturns, so a span understates the corruption.

    Raises:
        InputError: unknown ``readout``.
    """
    check_word("readout", readout, READOUTS)
    if readout == "first":
        residual, answer, foil = residual[:, :1], answer[:1], foil[:1]
    compared = torch.stack((answer, foil), -1)  # [n, 2]
    logits = anatomy.logits_of(residual, compared)  # [row, n, 2]
    weights = DECAY ** torch.arange(len(answer), device=residual.device, dtype=logits.dtype)
    return (logits[..., 0] - logits[..., 1]) @ weights / weights.sum()
