"""One decoded token of Gated DeltaNet: everything of ``gdn_prepare`` for this token, and the recurrence, in one pass over the state, which stays in place.

    S <- alpha S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

Both products are of the state that was read: with the S before, S^T k is alpha S^T k, and o = alpha S^T q + (k . q) u. So the state is read once, held in
registers, and written once: 8 d_k d_v bytes a head and sequence, beside which q, k and v are nothing.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from hydralens.hybrid.kernels.gdn_prepare import check, dot, gates, load_halves, strided, to_unit

# A program has so many columns of one state: rows of full 128-byte lines, which every thread asks for before it needs the first. Columns do not depend on each
# other, so splitting them gives a batch of one four times as many programs as heads, and a batch of 64 over 3500, which leave no long tail; that each prepares
# q and k again happens while its columns are on the way. A norm over all of d_v would need the whole state in one program, or a second launch; the fusion,
# which runs once for the heads of both kinds anyway, does it.
COLUMNS = 32
# At d_k 128 two warps, six programs and 96 KiB on their way on a multiprocessor. With more warps a vector of d_k / 2 channels is smaller than the program,
# which then loads and adds it up once for each of them.
PER_THREAD = 64  # elements of the state


@triton.jit
def load_row(x, weight, cos, sin, batch, head, eps, D: tl.constexpr):
    """q or k of one head, prepared, in halves ``[d_k / 2]``."""
    channel = tl.arange(0, triton.next_power_of_2(D // 2))
    mask = channel < D // 2
    x1, x2 = load_halves(x[0] + batch.to(tl.int64) * x[1] + head.to(tl.int64) * x[2] + channel, mask, D)
    w1, w2, c, s = None, None, None, None
    if weight is not None:
        w1, w2 = load_halves(weight + channel, mask, D)
    if cos is not None:
        c = tl.load(cos[0] + batch.to(tl.int64) * cos[1] + channel, mask, other=0.0).to(tl.float32)
        s = tl.load(sin[0] + batch.to(tl.int64) * sin[1] + channel, mask, other=0.0).to(tl.float32)
    return to_unit(x1, x2, w1, w2, c, s, eps, D)


@triton.jit
def step_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    cos,
    sin,
    state,
    q_weight,
    k_weight,
    out,
    eps,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BETA: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    n_heads = tl.num_programs(1)
    inside = column < D_V
    index = batch.to(tl.int64) * n_heads + head

    channel = tl.arange(0, triton.next_power_of_2(D_K // 2))[:, None]
    mask = (channel < D_K // 2) & inside[None, :]
    first = state + index * D_K * D_V + channel * D_V + column[None, :]
    second = first + D_K // 2 * D_V
    s1, s2 = tl.load(first, mask, other=0.0), tl.load(second, mask, other=0.0)

    q1, q2 = load_row(q, q_weight, cos, sin, batch, head, eps, D_K)
    k1, k2 = load_row(k, k_weight, cos, sin, batch, head, eps, D_K)
    kq = dot(k1, k2, q1, q2)
    own_a = tl.load(a[0] + batch.to(tl.int64) * a[1] + head).to(tl.float32)
    own_b = tl.load(b[0] + batch.to(tl.int64) * b[1] + head).to(tl.float32)
    log_decay, beta = gates(own_a, own_b, tl.load(A_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32), BETA)
    alpha = tl.exp(log_decay)
    own_v = tl.load(v[0] + batch.to(tl.int64) * v[1] + head.to(tl.int64) * v[2] + column, inside, other=0.0).to(tl.float32)

    q1, q2, k1, k2 = q1[:, None], q2[:, None], k1[:, None], k2[:, None]
    recalled = alpha * tl.sum(s1 * k1 + s2 * k2, 0)
    update = beta * (own_v - recalled)
    tl.store(first, alpha * s1 + k1 * update[None, :], mask)
    tl.store(second, alpha * s2 + k2 * update[None, :], mask)
    tl.store(out + index * D_V + column, alpha * tl.sum(s1 * q1 + s2 * q2, 0) + kq * update, inside)


def step(
    q: Float[Tensor, "batch head d_k"],
    k: Float[Tensor, "batch head d_k"],
    v: Float[Tensor, "batch head d_v"],
    a: Float[Tensor, "batch head"],
    b: Float[Tensor, "batch head"],
    A_log: Float[Tensor, "head"],
    dt_bias: Float[Tensor, "head"],
    cos: Float[Tensor, "batch_or_1 d_k"] | None,
    sin: Float[Tensor, "batch_or_1 d_k"] | None,
    state: Float[Tensor, "batch head d_k d_v"],
    q_weight: Float[Tensor, "d_k"] | None = None,
    k_weight: Float[Tensor, "d_k"] | None = None,
    *,
    eps: float,
    negative_eigenvalues: bool = False,
) -> Float[Tensor, "batch head d_v"]:
    """The heads' outputs for one more token, whose trace is left in ``state`` (Yang et al., arXiv 2412.06464).

    Reads nothing back to the host: fit for a CUDA graph. Has no backward.

    Args:
        state: float32, contiguous; changed in place.
        q, k, v, a, b, A_log, dt_bias, cos, sin, q_weight, k_weight, eps, negative_eigenvalues: as ``gdn_prepare.prepare`` takes them, of one position.

    Returns:
        Contiguous, in the type of ``v``, before the fusion's norm.

    Raises:
        ValueError: shapes, types or strides that do not fit, or a gradient that is asked for; the message names them.
    """
    check(q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight)
    expected = [*k.shape, v.shape[-1]]
    if list(state.shape) != expected or state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(f"state is {list(state.shape)} {state.dtype} with strides {state.stride()}, expected {expected}, float32 and contiguous")
    if v.shape[:2] != q.shape[:2] or (v.shape[-1] > 1 and v.stride(-1) != 1):
        raise ValueError(f"v is {list(v.shape)} with strides {v.stride()}, expected {list(q.shape[:2])} and its channels, of stride 1")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, a, b, A_log, dt_bias, state, q_weight, k_weight)):
        raise ValueError("a decoded token has no backward; call under torch.no_grad()")
    return torch.ops.hydralens.gdn_step.default(q, k, v, a, b, A_log, dt_bias, cos, sin, state, q_weight, k_weight, eps, negative_eigenvalues)


def launch(q, k, v, a, b, A_log, dt_bias, cos, sin, state, q_weight, k_weight, eps: float, negative_eigenvalues: bool) -> Float[Tensor, "batch head d_v"]:
    batch, n_heads, d_k = q.shape
    d_v = v.shape[-1]
    out = v.new_empty(v.shape)
    with torch.cuda.device_of(q):
        step_kernel[(triton.cdiv(d_v, COLUMNS), n_heads, batch)](
            *(strided(x, 2) for x in (q, k, v)),
            *(strided(x, 1) for x in (a, b)),
            A_log,
            dt_bias,
            *(strided(x, 1) for x in (cos, sin)),
            state,
            q_weight,
            k_weight,
            out,
            eps,
            D_K=d_k,
            D_V=d_v,
            BETA=2 if negative_eigenvalues else 1,
            COLUMNS=COLUMNS,
            num_warps=max(1, triton.next_power_of_2(d_k) * COLUMNS // (32 * PER_THREAD)),
        )
    return out


def fake(q, k, v, a, b, A_log, dt_bias, cos, sin, state, q_weight, k_weight, eps, negative_eigenvalues):
    return v.new_empty(v.shape)


LIBRARY = torch.library.Library("hydralens", "FRAGMENT")
LIBRARY.define(
    "gdn_step(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor? cos, Tensor? sin, Tensor(a!) state, "
    "Tensor? q_weight, Tensor? k_weight, float eps, bool negative_eigenvalues) -> Tensor"
)
LIBRARY.impl("gdn_step", launch, "CompositeExplicitAutograd")
torch.library.register_fake("hydralens::gdn_step", fake, lib=LIBRARY)
