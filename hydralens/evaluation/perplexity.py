"""How surprised a model is by a text, by position: a model that uses its context is less surprised later on."""

from collections.abc import Sequence
from itertools import islice
from random import Random
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from hydralens.errors import InputError
from hydralens.models.forward import trace
from hydralens.models.lens import LensModel
from hydralens.probes.build import encode
from hydralens.probes.text import prose
from hydralens.statistics import clustered_bootstrap

CHUNK = 1024  # tokens whose logits are held at a time


def made_documents(tokenizer: Any, n_documents: int, length: int, seed: int = 0) -> list[Int[Tensor, "pos"]]:
    """Documents of ``length`` tokens in the prose of the haystacks: simple sentences from templates, the same wherever they are made."""
    documents = []
    for index in range(n_documents):
        sentences, text, ids = prose(Random(f"{seed}/perplexity/{index}")), [], []
        while len(ids) < length:
            text += islice(sentences, 1 + length // 8)
            ids = encode(tokenizer, " ".join(text)).ids
        documents.append(torch.tensor(ids[:length]))
    return documents


def perplexity(model: LensModel, documents: Sequence[Int[Tensor, "pos"]], length: int, *, verbose: bool = False) -> pd.DataFrame:
    """Mean negative log-likelihood of the next token, in nats, by position.

    Args:
        documents: token ids; of each, the first ``length`` tokens are read, and shorter ones are left out.

    Returns:
        One row for each doubling of the position, columns position_from, position_to (the last one included), nll, ci_low, ci_high (95 % bootstrap
        over documents), n_documents.

    Raises:
        InputError: no document is long enough.
    """
    enough = [document[:length] for document in documents if len(document) >= length]
    if not enough:
        raise InputError(f"no document has {length} tokens, the longest has {max(map(len, documents), default=0)}; use longer text or shorter lengths")
    losses = torch.stack([token_losses(model, tokens) for tokens in tqdm(enough, desc="perplexity", disable=not verbose, leave=False)])
    rows = []
    for start, stop in _doublings(length):
        own = losses[:, start - 1 : stop - 1]  # the loss of the token at position p stands at p - 1
        found = clustered_bootstrap(own.mean(1).numpy(), range(len(own)))
        rows.append({"position_from": start, "position_to": stop - 1, "nll": found.mean, "ci_low": found.low, "ci_high": found.high, "n_documents": len(own)})
    return pd.DataFrame(rows)


@torch.no_grad()
def token_losses(model: LensModel, tokens: Int[Tensor, "pos"]) -> Float[Tensor, "pos_1"]:
    """Negative log-likelihood of every token but the first; logits exist for a chunk of tokens at a time."""
    tokens = tokens.to(model.device)
    final = trace(model.anatomy, tokens[None], torch.arange(len(tokens) - 1, device=model.device)).final[0]
    pieces = []
    for start in range(0, len(final), CHUNK):
        logits = model.anatomy.logits(final[start : start + CHUNK]).float()
        targets = tokens[start + 1 : start + 1 + len(logits)]
        pieces.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none").cpu())
    return torch.cat(pieces)


def _doublings(length: int) -> list[tuple[int, int]]:
    """1-15, 16-31, 32-63, ... up to ``length``, which is not included."""
    edges = [1]
    while 16 * 2 ** (len(edges) - 1) < length:
        edges.append(16 * 2 ** (len(edges) - 1))
    return list(zip(edges, [*edges[1:], length], strict=True))
