"""A new token of the full heads, made ready for attention: QK-norm, RoPE where heads have it, the query's scale; its key and value go into the cache in place.

q -> / rms * weight -> RoPE -> * log(position + s) / log(s) -> out
k -> / rms * weight -> RoPE -> cache, at the position
v -> cache, at the position
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from hydralens.hybrid.kernels.gdn_prepare import load_halves, norm_and_turn, store_halves, strided


@triton.jit
def append_kernel(q, k, v, cos, sin, lengths, k_cache, v_cache, q_weight, k_weight, out, log_scale, n_heads, n_kv, eps, D: tl.constexpr):
    """A program a row: the query heads, then the keys', then the values'."""
    row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, triton.next_power_of_2(D // 2))
    mask = channel < D // 2
    length = tl.load(lengths + batch).to(tl.int64)
    if row >= n_heads + n_kv:
        head = (row - n_heads - n_kv).to(tl.int64)
        x1, x2 = load_halves(v[0] + batch * v[1] + head * v[2] + channel, mask, D)
        store_halves(v_cache[0] + batch * v_cache[1] + head * v_cache[2] + length * v_cache[3] + channel, x1, x2, mask, D)
        return
    c, s = None, None
    if cos is not None:
        c = tl.load(cos[0] + batch * cos[1] + channel, mask, other=0.0).to(tl.float32)
        s = tl.load(sin[0] + batch * sin[1] + channel, mask, other=0.0).to(tl.float32)
    w1, w2 = None, None
    if row >= n_heads:
        head = (row - n_heads).to(tl.int64)
        x1, x2 = load_halves(k[0] + batch * k[1] + head * k[2] + channel, mask, D)
        if k_weight is not None:
            w1, w2 = load_halves(k_weight + channel, mask, D)
        x1, x2 = norm_and_turn(x1, x2, w1, w2, c, s, eps, D)
        store_halves(k_cache[0] + batch * k_cache[1] + head * k_cache[2] + length * k_cache[3] + channel, x1, x2, mask, D)
        return
    x1, x2 = load_halves(q[0] + batch * q[1] + row.to(tl.int64) * q[2] + channel, mask, D)
    if q_weight is not None:
        w1, w2 = load_halves(q_weight + channel, mask, D)
    x1, x2 = norm_and_turn(x1, x2, w1, w2, c, s, eps, D)
    if log_scale is not None:
        scale = tl.log(length.to(tl.float32) + log_scale) / tl.log(tl.zeros([], tl.float32) + log_scale)
        x1, x2 = x1 * scale, x2 * scale
    store_halves(out + (batch * n_heads + row) * D + channel, x1, x2, mask, D)


def append(
    q: Float[Tensor, "batch head d_head"],
    k: Float[Tensor, "batch kv_head d_head"],
    v: Float[Tensor, "batch kv_head d_head"],
    cos: Float[Tensor, "batch_or_1 d_head"] | None,
    sin: Float[Tensor, "batch_or_1 d_head"] | None,
    lengths: Int[Tensor, "batch"],
    k_cache: Float[Tensor, "batch kv_head key d_head"],
    v_cache: Float[Tensor, "batch kv_head key d_head"],
    q_weight: Float[Tensor, "d_head"] | None = None,
    k_weight: Float[Tensor, "d_head"] | None = None,
    *,
    log_scale: float | None,
    eps: float,
) -> Float[Tensor, "batch head d_head"]:
    """The query that attends to the cache, into which the token's key and value are written behind the first ``lengths`` ones.

    Reads nothing back to the host: fit for a CUDA graph. Has no backward.

    Args:
        q, k, v: of one token a sequence, any strides but that of channels, which is 1.
        cos, sin: RoPE's tables at the token's position; None: no RoPE.
        lengths: int32; tokens in the cache, which is also the new one's position. There must be room for it: that is not checked.
        k_cache, v_cache: changed in place.
        q_weight, k_weight: of QK-norm; None: none.
        log_scale: ``s`` of the query's scale ``log(position + s) / log(s)``; None: no scale.
        eps: of QK-norm.

    Returns:
        Contiguous, in the type of ``k_cache``.

    Raises:
        ValueError: shapes or strides that do not fit; the message names them.
    """
    batch, n_kv, d_head = k.shape
    if k.shape != v.shape or q.shape[::2] != (batch, d_head) or k_cache.shape != v_cache.shape or k_cache.shape[:2] + k_cache.shape[3:] != k.shape:
        raise ValueError(f"q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, caches {list(k_cache.shape)} and {list(v_cache.shape)}")
    if d_head % 2 or lengths.shape != (batch,):
        raise ValueError(f"d_head is {d_head}, which must be even; lengths is {list(lengths.shape)}, expected [{batch}]")
    for name, x in (("q", q), ("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name} has strides {x.stride()}; the last must be 1")
    return torch.ops.hydralens.decode_append.default(q, k, v, cos, sin, lengths, k_cache, v_cache, q_weight, k_weight, log_scale, eps)


def launch(q, k, v, cos, sin, lengths, k_cache, v_cache, q_weight, k_weight, log_scale: float | None, eps: float) -> Float[Tensor, "batch head d_head"]:
    batch, n_heads, d_head = q.shape
    n_kv = k.shape[1]
    out = k_cache.new_empty(q.shape)
    with torch.cuda.device_of(q):
        append_kernel[(n_heads + 2 * n_kv, batch)](
            *(strided(x, 2) for x in (q, k, v)),
            *(strided(x, 1) for x in (cos, sin)),
            lengths,
            *(strided(x, 3) for x in (k_cache, v_cache)),
            q_weight,
            k_weight,
            out,
            log_scale,
            n_heads,
            n_kv,
            eps,
            D=d_head,
            num_warps=1,
        )
    return out


def fake(q, k, v, cos, sin, lengths, k_cache, v_cache, q_weight, k_weight, log_scale, eps):
    return k_cache.new_empty(q.shape)


LIBRARY = torch.library.Library("hydralens", "FRAGMENT")
LIBRARY.define(
    "decode_append(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor lengths, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor? q_weight, Tensor? k_weight, float? log_scale, float eps) -> Tensor"
)
LIBRARY.impl("decode_append", launch, "CompositeExplicitAutograd")
torch.library.register_fake("hydralens::decode_append", fake, lib=LIBRARY)
