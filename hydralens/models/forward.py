"""The engine's own forward: the model's modules in the model's order, with every site in reach.

One function computes a full run (``trace``); ``attend`` computes attention for a block of new positions behind a prefix that
all rows share, so that a patched run is recomputed from its first changed position only. Nothing of size positions x positions
is ever held: queries are taken in blocks.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from hydralens.models.anatomy import Anatomy, Rope

SCORES_AT_ONCE = 2**25  # attention scores held at a time (128 MiB in float32)


def attend(
    q: Float[Tensor, "row head pos d_head"],
    k: Float[Tensor, "row kv_head pos d_head"],
    v: Float[Tensor, "row kv_head pos d_head"],
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    prefix: tuple[Float[Tensor, "1 kv_head prefix d_head"], Float[Tensor, "1 kv_head prefix d_head"]] | None = None,
) -> Float[Tensor, "row pos head d_head"]:
    """Causal attention of new positions over a shared prefix and themselves; query head ``h`` reads KV head ``h // group``.

    With ``window`` a query sees itself, the ``window - 1`` positions before it and the first ``sinks`` positions.
    """
    n_prefix, n_new = (0 if prefix is None else prefix[0].shape[2]), q.shape[2]
    if window is not None and n_prefix + n_new <= window:
        window = None
    if n_prefix == 0 and softcap is None and window is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)
    keys_seen = n_prefix + n_new if window is None else min(n_prefix + n_new, window + sinks + n_new)
    queries = max(1, min(n_new, 512, SCORES_AT_ONCE // (q.shape[1] * keys_seen)))
    rows = max(1, SCORES_AT_ONCE // (q.shape[1] * keys_seen * queries))
    blocks = []
    for row in range(0, q.shape[0], rows):
        own = [x[row : row + rows] for x in (q, k, v)]
        blocks.append(torch.cat([_attend_block(*own, start, min(start + queries, n_new), scale, softcap, window, sinks, prefix) for start in range(0, n_new, queries)], 1))
    return torch.cat(blocks)


def _attend_block(q, k, v, start, stop, scale, softcap, window, sinks, prefix) -> Tensor:
    """Attention of queries ``start:stop`` of the new positions; explicit softmax over prefix and new keys together."""
    n_rows, n_heads, _, head_dim = q.shape
    n_kv = k.shape[1]
    n_prefix = 0 if prefix is None else prefix[0].shape[2]
    device = q.device
    query_positions = torch.arange(n_prefix + start, n_prefix + stop, device=device)
    first = 0 if window is None else max(0, n_prefix + start - window + 1)
    sink_keys = torch.arange(min(sinks, first), device=device)
    prefix_keys = torch.cat((sink_keys[sink_keys < n_prefix], torch.arange(min(first, n_prefix), n_prefix, device=device)))
    new_keys = torch.cat((sink_keys[sink_keys >= n_prefix], torch.arange(max(first, n_prefix), n_prefix + stop, device=device)))

    grouped = q[:, :, start:stop].reshape(n_rows, n_kv, -1, head_dim)  # [row, kv_head, group * query, d_head]
    parts, values = [], []
    if len(prefix_keys):
        whole = len(prefix_keys) == n_prefix
        prefix_k, prefix_v = prefix if whole else (x[:, :, prefix_keys] for x in prefix)
        # All rows read the same prefix, so rows join the query axis of one product per KV head.
        folded = grouped.transpose(0, 1).reshape(1, n_kv, -1, head_dim)
        scores = (folded @ prefix_k.transpose(-1, -2)).reshape(n_kv, n_rows, grouped.shape[2], -1).transpose(0, 1)
        parts.append(scores)
    new = new_keys - n_prefix
    contiguous = len(new) == stop
    new_k, new_v = (k[:, :, :stop], v[:, :, :stop]) if contiguous else (k[:, :, new], v[:, :, new])
    parts.append(grouped @ new_k.transpose(-1, -2))

    key_positions = torch.cat((prefix_keys, new_keys))
    hidden = key_positions > query_positions[:, None]
    if window is not None:
        hidden |= (key_positions <= query_positions[:, None] - window) & (key_positions >= sinks)
    scores = torch.cat(parts, -1).float() if q.dtype in (torch.float16, torch.bfloat16) else torch.cat(parts, -1)
    scores = scores * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    pattern = scores.masked_fill(hidden.repeat(n_heads // n_kv, 1), float("-inf")).softmax(-1).to(q.dtype)
    out = pattern[..., len(prefix_keys) :] @ new_v
    if len(prefix_keys):
        folded = pattern[..., : len(prefix_keys)].transpose(0, 1).reshape(1, n_kv, -1, len(prefix_keys))
        out = out + (folded @ prefix_v).reshape(n_kv, n_rows, -1, head_dim).transpose(0, 1)
    return out.reshape(n_rows, n_heads, stop - start, head_dim).transpose(1, 2)


@dataclass(eq=False)
class Trace:
    """What a run leaves behind. Lists have one entry per layer; ``columns`` are the positions at which residual, z, q and writes are kept."""

    tokens: Int[Tensor, "batch pos"]
    columns: Int[Tensor, "column"]
    ropes: dict[str | None, Rope | None]
    residual: list[Float[Tensor, "batch column d_model"]] = field(default_factory=list)  # entering each layer
    z: list[Float[Tensor, "batch column head d_head"]] = field(default_factory=list)
    written: list[Float[Tensor, "batch column d_model"]] = field(default_factory=list)  # attention's addition to the residual stream
    q: list[Float[Tensor, "batch head column d_head"]] = field(default_factory=list)
    k: list[Float[Tensor, "batch kv_head pos d_head"]] = field(default_factory=list)  # all positions
    v: list[Float[Tensor, "batch kv_head pos d_head"]] = field(default_factory=list)
    final: Float[Tensor, "batch column d_model"] | None = None  # residual stream after the last layer

    def rope(self, kind: str | None) -> Rope | None:
        """The rotary table of the kept columns."""
        table = self.ropes[kind]
        return None if table is None else tuple(x[:, self.columns] for x in table)


Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def trace(
    anatomy: Anatomy,
    tokens: Int[Tensor, "batch pos"],
    columns: Int[Tensor, "column"],
    keep: Collection[str] = (),
    attention: Attention | None = None,
) -> Trace:
    """Run unpadded prompts of equal length and keep the named sites at ``columns``.

    Args:
        keep: any of ``residual``, ``z``, ``written``, ``q``, ``k``, ``v`` (k and v are kept at all positions).
        attention: replaces the attention of layer ``l``: ``attention(l, q, k, v) -> z [batch, pos, head, d_head]``.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    residual = anatomy.embed(tokens, positions)
    run = Trace(tokens, columns, anatomy.rope(residual, positions))
    for index, layer in enumerate(anatomy.layers):
        q, k, v = layer.project(residual, run.ropes[layer.rope_kind])
        if attention is None:
            z = attend(q, k, v, scale=layer.scale, softcap=layer.softcap, window=layer.window)
        else:
            z = attention(index, q, k, v)
        written = layer.write(z)
        kept = {"residual": residual, "z": z, "written": written}
        for site in keep:
            if site in kept:
                getattr(run, site).append(kept[site][:, columns])
            elif site == "q":
                run.q.append(q[:, :, columns])
            else:
                getattr(run, site).append({"k": k, "v": v}[site])
        residual = layer.feed(residual + written)
    run.final = residual[:, columns]
    return run
