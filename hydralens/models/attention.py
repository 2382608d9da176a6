"""Causal attention for a block of new positions behind a prefix that all rows share. Nothing of size positions x positions is ever held."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

MANY_QUERIES = 16  # from here on a row's own copy of the keys and fused attention beat one product over the shared prefix
SCORES_AT_ONCE = 2**25  # attention scores held at a time (128 MiB in float32)

KeysValues = tuple[Float[Tensor, "1 kv_head pos d_head"], Float[Tensor, "1 kv_head pos d_head"]]


def attend(
    q: Float[Tensor, "row head pos d_head"],
    k: Float[Tensor, "row kv_head pos d_head"],
    v: Float[Tensor, "row kv_head pos d_head"],
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    prefix: KeysValues | None = None,
) -> Float[Tensor, "row pos head d_head"]:
    """Causal attention of new positions over a shared prefix and themselves; query head ``h`` reads KV head ``h // group``.

    With ``window`` a query sees itself, the ``window - 1`` positions before it and the first ``sinks`` positions.
    """
    n_new, n_prefix = q.shape[2], 0 if prefix is None else prefix[0].shape[2]
    if window is not None and n_prefix + n_new <= window:
        window = None
    if n_prefix == 0 and softcap is None and window is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)
    if q.is_cuda and softcap is None and window is None and n_new >= MANY_QUERIES:
        return _attend_causal(q, k, v, prefix, scale)
    n_keys = n_prefix + n_new if window is None else min(n_prefix + n_new, window + sinks + n_new)
    # A few queries a row: all rows' queries meet the one prefix in one product. Many: fused attention on keys copied to each row.
    block = _attend_folded if softcap is not None or n_new < MANY_QUERIES else _attend_fused
    queries = max(1, min(n_new, 512, SCORES_AT_ONCE // (q.shape[1] * n_keys)))
    rows = max(1, SCORES_AT_ONCE // (q.shape[1] * n_keys * queries))
    out = torch.empty(q.shape[0], n_new, q.shape[1], q.shape[3], dtype=q.dtype, device=q.device)
    for row in range(0, q.shape[0], rows):
        own_q, own_k, own_v = (x[row : row + rows] for x in (q, k, v))
        for start in range(0, n_new, queries):
            stop = min(start + queries, n_new)
            # Keys from ``first`` on, and before them the sinks; some of them in the prefix.
            first = 0 if window is None else max(0, n_prefix + start - window + 1)
            apart = min(sinks, first)
            visible = _visible(n_prefix + start, n_prefix + stop, first, apart, window, sinks, q.device)
            new_k, new_v = (_take(x, max(0, apart - n_prefix), max(0, first - n_prefix), stop) for x in (own_k, own_v))
            old_k, old_v = (None, None) if prefix is None else (_take(x, min(apart, n_prefix), min(first, n_prefix), n_prefix) for x in prefix)
            out[row : row + rows, start:stop] = block(own_q[:, :, start:stop], new_k, new_v, old_k, old_v, visible, scale, softcap)
    return out


def _visible(start: int, stop: int, first: int, apart: int, window: int | None, sinks: int, device: torch.device) -> Bool[Tensor, "query key"]:
    """Which of the keys ``0..apart`` and ``first..stop`` each of the queries ``start..stop`` sees."""
    queries = torch.arange(start, stop, device=device)[:, None]
    keys = torch.cat((torch.arange(apart, device=device), torch.arange(first, stop, device=device)))
    visible = keys <= queries
    return visible if window is None else visible & ((keys > queries - window) | (keys < sinks))


def _take(x: Float[Tensor, "row kv_head pos d_head"], apart: int, first: int, stop: int) -> Float[Tensor, "row kv_head key d_head"]:
    """Positions ``0..apart`` and ``first..stop``; a view where they are in one piece."""
    return x[:, :, first:stop] if apart == 0 else torch.cat((x[:, :, :apart], x[:, :, first:stop]), 2)


def _attend_causal(q, k, v, prefix, scale) -> Tensor:
    """All new positions over everything before them, by the GPU's fused kernels, which align causality to the last key."""
    n_keys, group = prefix[0].shape[2] + k.shape[2], q.shape[1] // k.shape[1]
    rows = max(1, 2**29 // (n_keys * q.shape[1] * q.shape[3]))
    out = []
    for own in zip(*(x.split(rows) for x in (q, k, v)), strict=True):
        keys, values = (torch.cat((old.expand(len(own[0]), -1, -1, -1), new), 2).repeat_interleave(group, 1) for old, new in zip(prefix, own[1:], strict=True))
        out.append(F.scaled_dot_product_attention(own[0], keys, values, attn_mask=causal_lower_right(own[0].shape[2], n_keys), scale=scale))
    return torch.cat(out).transpose(1, 2)


def _attend_fused(q, k, v, old_k, old_v, visible, scale, softcap) -> Tensor:
    if old_k is not None:
        k, v = (torch.cat((old.expand(len(q), -1, -1, -1), new), 2) for old, new in ((old_k, k), (old_v, v)))
    if q.is_cuda and q.shape[1] != k.shape[1]:  # with a mask and grouped keys, CUDA would fall back to the unfused kernel
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _attend_folded(q, k, v, old_k, old_v, visible, scale, softcap) -> Tensor:
    n_rows, n_heads, n_queries, d_head = q.shape
    n_kv, n_old = k.shape[1], 0 if old_k is None else old_k.shape[2]
    grouped = q.reshape(n_rows, n_kv, -1, d_head)  # [row, kv_head, group * query, d_head]
    scores = grouped @ k.transpose(-1, -2)
    if n_old:
        folded = grouped.transpose(0, 1).reshape(n_kv, -1, d_head) @ old_k[0].transpose(-1, -2)
        scores = torch.cat((folded.reshape(n_kv, n_rows, -1, n_old).transpose(0, 1), scores), -1)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    pattern = scores.masked_fill(~visible.repeat(n_heads // n_kv, 1), float("-inf")).softmax(-1).to(q.dtype)
    out = pattern[..., n_old:] @ v
    if n_old:
        folded = pattern[..., :n_old].transpose(0, 1).reshape(n_kv, -1, n_old) @ old_v[0]
        out = out + folded.reshape(n_kv, n_rows, -1, d_head).transpose(0, 1)
    return out.reshape(n_rows, n_heads, n_queries, d_head).transpose(1, 2)
