"""What each stage of the transfer minimises. ``[token, vocab]`` never exists whole: logits are made, used and made again chunk by chunk."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 1024  # tokens whose logits are held at a time


def alignment_loss(
    student: Float[Tensor, "batch pos d_model"], teacher: Float[Tensor, "batch pos d_model"], real: Bool[Tensor, "batch pos"]
) -> Float[Tensor, ""]:
    """Stage 1 (Eq. 15): squared error of one layer's attention output, relative to the teacher's, over the real tokens; 0 = aligned, 1 = silent.

    Dividing by the teacher's size makes layers comparable: late ones write hundreds of times more than early ones.
    """
    student, teacher = student[real].float(), teacher[real].float()
    return (student - teacher).square().sum() / teacher.square().sum()


def distillation_loss(
    student: Float[Tensor, "token d_model"],
    student_head: Float[Tensor, "vocab d_model"],
    teacher: Float[Tensor, "token d_teacher"],
    teacher_head: Float[Tensor, "vocab d_teacher"],
    weight: Float[Tensor, "token"],
    *,
    labels: Int[Tensor, "token"] | None = None,
    cross_entropy: float = 0.0,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> Float[Tensor, ""]:
    """Stage 2 (Eq. 16): KL(teacher || student) over the vocabulary, and ``cross_entropy`` times the loss on ``labels``; summed over tokens.

    The sum, not the mean, so that ranks and micro-batches of different size add up: divide by the total weight of all.

    Args:
        student, teacher: final hidden states after the last norm; the teacher's get no gradient.
        weight: 0 for padding and for tokens that are not learned, 1 or more for the others.
        labels: the next token of each; with ``cross_entropy`` only.
        temperature: both distributions are softened by it, and the KL is multiplied by its square so that gradients keep their size.
    """

    def part(own: Tensor, head: Tensor, other: Tensor, weights: Tensor, targets: Tensor | None) -> Float[Tensor, ""]:
        logits = _logits(own, head)
        with torch.no_grad():
            wanted = (_logits(other, teacher_head) / temperature).log_softmax(-1)
        kl = (wanted.exp() * (wanted - (logits / temperature).log_softmax(-1))).sum(-1) * temperature**2
        if targets is not None and cross_entropy:
            kl = kl + cross_entropy * F.cross_entropy(logits, targets, reduction="none")
        return (kl * weights).sum()

    return _by_chunk(part, chunk, student, student_head, teacher.detach(), weight, labels)


def next_token_loss(
    hidden: Float[Tensor, "token d_model"],
    head: Float[Tensor, "vocab d_model"],
    labels: Int[Tensor, "token"],
    weight: Float[Tensor, "token"],
    *,
    chunk: int = CHUNK,
) -> Float[Tensor, ""]:
    """Stage 3: cross-entropy of the next token, summed over tokens by weight."""

    def part(own: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Float[Tensor, ""]:
        return (F.cross_entropy(_logits(own, head), targets, reduction="none") * weights).sum()

    return _by_chunk(part, chunk, hidden, head, labels, weight)


def _logits(hidden: Tensor, head: Tensor) -> Float[Tensor, "token vocab"]:
    """Multiplied in the model's dtype, as the model does; everything after it in float32 at least."""
    logits = hidden @ head.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _by_chunk(part: Callable[..., Tensor], chunk: int, first: Tensor, head: Tensor, *others: Tensor | None) -> Float[Tensor, ""]:
    """The sum of ``part`` over chunks of tokens; the backward pass makes each chunk's logits again instead of keeping them."""
    total = first.new_zeros((), dtype=torch.promote_types(first.dtype, torch.float32))
    for start in range(0, len(first), chunk):
        own = [None if other is None else other[start : start + chunk] for other in others]
        total = total + checkpoint(part, first[start : start + chunk], head, *own, use_reentrant=False)
    return total
