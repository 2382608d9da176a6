"""RazorAttention's two scores, from random tokens said again and again: who looks at the same token before, who at the one after it."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hydralens.detectors.base import whole_effects
from hydralens.detectors.rows import score_rows
from hydralens.errors import InputError
from hydralens.models.lens import LensModel
from hydralens.probes.base import Probe
from hydralens.scores import HeadScores, scores_of

REPEATS = 4  # how often the tokens are said, as in the source
TOKENS = 200  # the source takes 2500


def induction(model: LensModel, probes: Sequence[Probe] = (), *, n_sequences: int = 4, n_tokens: int = TOKENS, seed: int = 0) -> HeadScores:
    """Induction score (RazorAttention, Tang et al. 2024, arXiv 2407.15891): attention to the tokens that followed this one before, 0..1.

    A first token, then ``n_tokens`` distinct random tokens, four times over. For each token from the second time on: the
    head's attention on the successors of all its earlier occurrences, summed; mean over tokens. As in the source's published tool,
    which takes one sequence of 2500 tokens, drawn with replacement; the selection there (the top 14 % by induction, 1 % by echo, in
    KV groups by their best head) is left to ``select_heads``.

    Args:
        probes: not used: the score needs no data. Accepted so that all detectors are called alike.
        n_sequences: independent draws; they stand where other detectors have pairs.

    Raises:
        InputError: the vocabulary has too few tokens for ``n_tokens`` distinct ones, or a number is not positive.
    """
    return _repeated(model, "induction", 1, n_sequences, n_tokens, seed)


def echo(model: LensModel, probes: Sequence[Probe] = (), *, n_sequences: int = 4, n_tokens: int = TOKENS, seed: int = 0) -> HeadScores:
    """Echo score (RazorAttention): attention to this very token's earlier occurrences; otherwise as ``induction``.

    Raises:
        InputError: as ``induction``.
    """
    return _repeated(model, "echo", 0, n_sequences, n_tokens, seed)


def repeated_tokens(model: LensModel, n_sequences: int, n_tokens: int, seed: int) -> Int[Tensor, "sequence pos"]:
    """A first token (the tokenizer's beginning of text, else one more random token), then the random ones ``REPEATS`` times; no special token among them.

    Raises:
        InputError: the vocabulary has too few tokens, or a number is not positive.
    """
    if n_sequences < 1 or n_tokens < 1:
        raise InputError(f"n_sequences is {n_sequences} and n_tokens {n_tokens}; give positive numbers")
    special = [] if model.tokenizer is None else model.tokenizer.all_special_ids
    ordinary = torch.ones(model.anatomy.unembed.weight.shape[0], dtype=torch.bool)
    ordinary[special] = False
    ordinary = ordinary.nonzero()[:, 0]
    if n_tokens >= len(ordinary):
        raise InputError(f"n_tokens is {n_tokens}, but the vocabulary has {len(ordinary)} ordinary tokens; give a smaller number")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([ordinary[torch.randperm(len(ordinary), generator=generator)[: n_tokens + 1]] for _ in range(n_sequences)])
    first = drawn[:, :1]
    if model.tokenizer is not None and model.tokenizer.bos_token_id is not None:
        first = torch.full_like(first, model.tokenizer.bos_token_id)
    return torch.cat((first, drawn[:, 1:].repeat(1, REPEATS)), 1)


def _repeated(model: LensModel, method: str, after: int, n_sequences: int, n_tokens: int, seed: int) -> HeadScores:
    model.warn_of_bypassed_hooks()
    tokens = repeated_tokens(model, n_sequences, n_tokens, seed).to(model.device)
    columns = torch.arange(1 + n_tokens, tokens.shape[1], device=model.device)
    # Earlier occurrences of each column, -1 where it has fewer than others.
    sought = columns[:, None] - n_tokens * torch.arange(1, REPEATS, device=model.device)
    sought = torch.where(sought > 0, sought + after, -1)

    def on_sought(rows: Tensor, v: Tensor, index: int, which: slice) -> Float[Tensor, "row head"]:
        where = sought[which, None].expand(-1, rows.shape[1], -1)
        return rows.gather(-1, where.clamp(min=0)).where(where >= 0, 0).sum(-1)

    per_sequence = torch.stack([score_rows(model.anatomy, row, columns, on_sought)[0].mean(1) for row in tokens])
    effects = whole_effects(model.info, method, per_sequence, "pattern", "repeats", "repeated_tokens", "retrieval")
    entry = {"name": "repeated_tokens/none", "capability": "retrieval", "n_pairs": n_sequences, "n_tokens": tokens.shape[1], "seed": seed}
    return scores_of(model.info, method, [effects], [entry | {"direction": "none", "metric": method}])
