"""Attention of one new token to a cache of fixed size, keys split over programs (flash decoding).

    keys 0 .. length-1 in stretches -> each program: its stretch's weighted values and log-sum-exp -> one program a head adds the stretches up

Keys and values are read once, for all query heads of a KV head together. Lengths are read on the GPU and the grid follows the cache's size, so that a
CUDA graph can be replayed while the cache fills; a program whose stretch lies behind the length ends at once.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 64  # keys of a tile: at d_head 128 in bfloat16, 16 KiB each of keys and values on their way
QUERIES = 16  # rows of a tensor-core product: query heads of one KV head, filled up with zeros
STRETCHES = 1056  # programs that a grid should have, eight on each of 132 multiprocessors: enough bytes on their way to fill the memory's bandwidth
SHORTEST = 256  # keys of a stretch, below which adding up costs more than it spreads


@triton.jit
def stretch_kernel(
    q, k, v, queries, lengths, partial, lse, scale, stretch, n_heads, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr
):
    batch, kv_head, place = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    length = tl.load(lengths + batch)
    first = place * stretch
    last = tl.minimum(first + stretch, length)
    if first >= last:
        return
    row = tl.arange(0, QUERIES)
    channel = tl.arange(0, triton.next_power_of_2(D))
    head = tl.load(queries + kv_head * GROUP + row, row < GROUP, other=-1)
    mask = (head >= 0)[:, None] & (channel < D)[None, :]
    own = tl.load(q[0] + batch * q[1] + head[:, None] * q[2] + channel[None, :], mask, other=0.0)
    keys = k[0] + batch * k[1] + kv_head.to(tl.int64) * k[2]
    values = v[0] + batch * v[1] + kv_head.to(tl.int64) * v[2]
    most = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, triton.next_power_of_2(D)], tl.float32)
    for start in range(first, last, BLOCK):
        key = start + tl.arange(0, BLOCK)
        seen = (key < last)[:, None] & (channel < D)[None, :]
        own_k = tl.load(keys + key.to(tl.int64)[:, None] * k[3] + channel[None, :], seen, other=0.0)
        score = tl.dot(own, tl.trans(own_k), input_precision="ieee") * scale  # in powers of 2
        score = tl.where((key < last)[None, :], score, -float("inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(most - higher)
        own_v = tl.load(values + key.to(tl.int64)[:, None] * v[3] + channel[None, :], seen, other=0.0)
        out = out * shrink[:, None] + tl.dot(weight.to(own_v.dtype), own_v, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        most = higher
    n_stretches = tl.num_programs(0)
    index = (batch * n_heads + head) * n_stretches + place
    tl.store(partial + index[:, None] * D + channel[None, :], out / total[:, None], mask)
    tl.store(lse + index, most + tl.log2(total), head >= 0)


@triton.jit
def sum_kernel(partial, lse, lengths, out, stretch, n_stretches, D: tl.constexpr, ROWS: tl.constexpr):
    batch, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    n = tl.cdiv(tl.load(lengths + batch), stretch)
    index = batch * tl.num_programs(0) + head
    channel = tl.arange(0, triton.next_power_of_2(D))
    most = -float("inf")
    total = 0.0
    acc = tl.zeros([triton.next_power_of_2(D)], tl.float32)
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        own = tl.load(lse + index * n_stretches + row, row < n, other=-float("inf"))
        values = tl.load(partial + (index * n_stretches + row)[:, None] * D + channel[None, :], (row < n)[:, None] & (channel < D)[None, :], other=0.0)
        higher = tl.maximum(most, tl.max(own, 0))
        weight = tl.exp2(own - higher)
        shrink = tl.exp2(most - higher)
        acc = acc * shrink + tl.sum(values * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        most = higher
    tl.store(out + index * D + channel, acc / total, channel < D)


def decode_attention(
    q: Float[Tensor, "batch head d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_head"],
    queries: Int[Tensor, "kv_head group"],
    lengths: Int[Tensor, "batch"],
    *,
    scale: float,
) -> Float[Tensor, "batch head d_head"]:
    """``softmax(scale * q k^T) v`` of one new token a sequence over the first ``lengths`` keys of each.

    Reads nothing back to the host: fit for a CUDA graph. Has no backward.

    Args:
        q: any strides but that of channels, which is 1; so too ``k`` and ``v``, in the same type.
        queries: int32; the query heads of each KV head, filled up with -1.
        lengths: int32, from 1 to the size of the cache.
        scale: of the scores, as ``d_head ** -0.5``.

    Returns:
        Contiguous, in the type of ``v``.

    Raises:
        ValueError: shapes, types or strides that do not fit; the message names them.
    """
    batch, n_heads, d_head = q.shape
    n_kv = k.shape[1]
    if k.shape != v.shape or k.shape[::3] != (batch, d_head) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {list(q.shape)} {q.dtype}, k {list(k.shape)} {k.dtype}, v {list(v.shape)} {v.dtype}; they may differ in heads and keys alone")
    if queries.shape[:1] != (n_kv,) or not 1 <= queries.shape[1] <= QUERIES or lengths.shape != (batch,):
        raise ValueError(f"queries is {list(queries.shape)}, expected [{n_kv}, up to {QUERIES}]; lengths is {list(lengths.shape)}, expected [{batch}]")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name} has strides {x.stride()}; the last must be 1")
    return torch.ops.hydralens.decode_attention.default(q, k, v, queries, lengths, scale)


def launch(q, k, v, queries, lengths, scale: float) -> Float[Tensor, "batch head d_head"]:
    batch, n_heads, d_head = q.shape
    n_kv, n_keys = k.shape[1:3]
    n_stretches = max(1, min(STRETCHES // (batch * n_kv), triton.cdiv(n_keys, SHORTEST)))
    stretch = triton.cdiv(triton.cdiv(n_keys, n_stretches), BLOCK) * BLOCK
    n_stretches = triton.cdiv(n_keys, stretch)
    out = v.new_empty(q.shape)
    partial = q.new_empty(batch, n_heads, n_stretches, d_head, dtype=torch.float32)
    lse = q.new_empty(batch, n_heads, n_stretches, dtype=torch.float32)
    rows = ((x, *x.stride()[:3]) for x in (k, v))
    with torch.cuda.device_of(q):
        stretch_kernel[(n_stretches, n_kv, batch)](
            (q, *q.stride()[:2]),
            *rows,
            queries,
            lengths,
            partial,
            lse,
            scale * 1.4426950408889634,  # log2(e)
            stretch,
            n_heads,
            GROUP=queries.shape[1],
            D=d_head,
            BLOCK=BLOCK,
            QUERIES=QUERIES,
            num_warps=4,
            num_stages=3,
        )
        sum_kernel[(n_heads, batch)](partial, lse, lengths, out, stretch, n_stretches, D=d_head, ROWS=32, num_warps=4)
    return out


def fake(q, k, v, queries, lengths, scale):
    return v.new_empty(q.shape)


LIBRARY = torch.library.Library("hydralens", "FRAGMENT")
LIBRARY.define("decode_attention(Tensor q, Tensor k, Tensor v, Tensor queries, Tensor lengths, float scale) -> Tensor")
LIBRARY.impl("decode_attention", launch, "CompositeExplicitAutograd")
torch.library.register_fake("hydralens::decode_attention", fake, lib=LIBRARY)
