"""Rows of attention: what the queries of chosen columns look at, without ever holding a positions x positions map."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hydralens.models.anatomy import Anatomy, Layer
from hydralens.models.attention import SCORES_AT_ONCE
from hydralens.models.forward import trace

# (rows [row, head, pos], v [kv_head, pos, d_head], layer index, which of the columns the rows are) -> [row, head]
ScoreRows = Callable[[Tensor, Tensor, int, slice], Float[Tensor, "row head"]]


def attention_rows(
    layer: Layer, q: Float[Tensor, "head row d_head"], k: Float[Tensor, "kv_head pos d_head"], columns: Int[Tensor, "row"]
) -> Float[Tensor, "row head pos"]:
    """Attention weights of the queries at ``columns`` over all keys of the prompt, with the layer's scale, soft cap and window.

    Scores and softmax are in at least float32; the weights of a row sum to 1, and are 0 after its own column.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(dtype).unflatten(0, (len(k), -1))
    scores = torch.einsum("kgrd,kpd->rkgp", grouped, k.to(dtype)).flatten(1, 2) * layer.scale
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    distance = columns[:, None] - torch.arange(k.shape[1], device=k.device)
    visible = (distance >= 0) & (distance < (layer.window or k.shape[1]))
    return scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)


@torch.no_grad()
def score_rows(
    anatomy: Anatomy, tokens: Int[Tensor, "pos"], columns: Int[Tensor, "row"], score: ScoreRows
) -> tuple[Float[Tensor, "layer row head"], Float[Tensor, "row d_model"]]:
    """Run one unpadded prompt and reduce each layer's attention rows as they are made.

    Nothing of a layer is kept but its scores, and rows are taken in blocks, so memory does not grow with layers or with rows times positions.

    Returns:
        The scores, and the final residual stream at ``columns``.
    """
    block = max(1, SCORES_AT_ONCE // (anatomy.n_heads * len(tokens)))
    scores = []

    def attention(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer = anatomy.layers[index]
        blocks = [slice(start, start + block) for start in range(0, len(columns), block)]
        scores.append(torch.cat([score(attention_rows(layer, q[0, :, columns[which]], k[0], columns[which]), v[0], index, which) for which in blocks]))
        return layer.attend(q, k, v)

    run = trace(anatomy, tokens[None], columns, attention=attention)
    return torch.stack(scores), run.final[0]
