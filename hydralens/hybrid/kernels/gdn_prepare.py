"""What Gated DeltaNet's recurrence takes, from what the projections give, in one pass: QK-norm, RoPE and length 1 of q and k; log decay and beta of the gates.

    q, k [batch pos head d_head] -> x / rms(x) * weight -> RoPE -> x / |x|
    a, b [batch pos head]        -> -exp(A_log) softplus(a + dt_bias), sigmoid(b)

Bytes moved, of N = batch * pos * heads * d_head elements of each of q and k: forward 4 N (read and write both), backward 6 N (read both and their gradients,
write both); gates and RoPE's tables are a few percent beside them. Nothing but the inputs is kept for the backward, which computes the rest again from rows
that it reads anyway.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

# RoPE turns channel i and channel i + d_head / 2 by one angle. A row is therefore held as two halves, [row half] each, and no channel ever changes place.
ROWS_TIMES_D = 2048  # elements of a tile: with 4 warps, one load of 16 bytes per thread, half and tensor in bfloat16, and 8 programs on a multiprocessor
WARPS = 4
# The tables of a position serve all heads, but a program of one head would read as much from them as from q: two heads a program halve that.
HEADS = 2
# The backward adds up the gradients of weights, A_log and dt_bias. It has so many programs at most, each with every so-many-th tile of one head: several waves
# on 132 multiprocessors, and partial sums (2 MiB at d_head 128) that are little beside the rows. The number does not follow the device, so that neither does
# the order of the sum.
BACKWARD_PROGRAMS = 2048
BACKWARD_REGISTERS = 168  # a thread, at which three programs fit on a multiprocessor and nothing spills; left alone, d_head 128 takes 200


@triton.jit
def load_halves(pointer, mask, D: tl.constexpr):
    """Both halves of rows; ``pointer`` is where their first halves are."""
    first = tl.load(pointer, mask, other=0.0).to(tl.float32)
    second = tl.load(pointer + D // 2, mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_halves(pointer, first, second, mask, D: tl.constexpr):
    tl.store(pointer, first, mask)
    tl.store(pointer + D // 2, second, mask)


@triton.jit
def dot(x1, x2, y1, y2):
    return tl.sum(x1 * y1 + x2 * y2, -1, keep_dims=True)


@triton.jit
def norm_and_turn(x1, x2, w1, w2, cos, sin, eps, D: tl.constexpr):
    """QK-norm where there are weights, RoPE where there are tables."""
    if w1 is not None:
        rms = tl.rsqrt(dot(x1, x2, x1, x2) / D + eps)
        x1, x2 = x1 * rms * w1, x2 * rms * w2
    if cos is not None:
        x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return x1, x2


@triton.jit
def to_unit(x1, x2, w1, w2, cos, sin, eps, D: tl.constexpr):
    """``norm_and_turn``, and length 1."""
    x1, x2 = norm_and_turn(x1, x2, w1, w2, cos, sin, eps, D)
    scale = tl.rsqrt(dot(x1, x2, x1, x2) + 1e-6)
    return x1 * scale, x2 * scale


@triton.jit
def softplus(x):
    # log(1 + t) as written would round away a small t, which is the decay of the heads that remember longest (Kahan).
    t = tl.exp(-tl.abs(x))
    u = 1 + t
    return tl.maximum(x, 0.0) + tl.where(u == 1, t, tl.log(u) * (t / tl.where(u == 1, 1.0, u - 1)))


@triton.jit
def gates(a, b, A_log, dt_bias, BETA: tl.constexpr):
    """Log decay, and beta in 0..BETA."""
    return -tl.exp(A_log) * softplus(a + dt_bias), BETA * tl.sigmoid(b)


@triton.jit
def at(source, batch, pos):
    """The first head of every position; ``source`` is a tensor and its strides over batch and position."""
    return source[0] + batch.to(tl.int64) * source[1] + pos.to(tl.int64) * source[2]


@triton.jit
def rows_of(source, batch, pos, head, channel):
    """Channels of a head at every position; ``source`` is a tensor and its strides over batch, position and head."""
    return at(source, batch, pos)[:, None] + head.to(tl.int64) * source[3] + channel


@triton.jit
def load_rope(cos, sin, batch, pos, channel, mask):
    c = tl.load(at(cos, batch, pos)[:, None] + channel, mask, other=0.0).to(tl.float32)
    s = tl.load(at(sin, batch, pos)[:, None] + channel, mask, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def forward_kernel(
    q,
    k,
    cos,
    sin,
    a,
    b,
    A_log,
    dt_bias,
    q_weight,
    k_weight,
    real,
    q_out,
    k_out,
    log_decay,
    beta,
    n_pos,
    n_heads,
    eps,
    D: tl.constexpr,
    BETA: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
):
    # Heads run fastest over the programs: those that run side by side read and write memory that lies side by side.
    groups = tl.cdiv(n_heads, HEADS)
    first = tl.program_id(0) % groups * HEADS
    pos = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    batch = tl.program_id(1)
    channel = tl.arange(0, triton.next_power_of_2(D // 2))[None, :]
    inside = pos < n_pos
    mask = inside[:, None] & (channel < D // 2)
    c, s = None, None
    if cos is not None:
        c, s = load_rope(cos, sin, batch, pos, channel, mask)
    for offset in range(min(HEADS, n_heads - first)):
        head = first + offset
        q1, q2 = load_halves(rows_of(q, batch, pos, head, channel), mask, D)
        k1, k2 = load_halves(rows_of(k, batch, pos, head, channel), mask, D)
        w1, w2 = None, None
        if q_weight is not None:
            w1, w2 = load_halves(q_weight + channel, channel < D // 2, D)
        q1, q2 = to_unit(q1, q2, w1, w2, c, s, eps, D)
        store_halves(rows_of(q_out, batch, pos, head, channel), q1, q2, mask, D)
        w1, w2 = None, None
        if k_weight is not None:
            w1, w2 = load_halves(k_weight + channel, channel < D // 2, D)
        k1, k2 = to_unit(k1, k2, w1, w2, c, s, eps, D)
        store_halves(rows_of(k_out, batch, pos, head, channel), k1, k2, mask, D)

        own_a = tl.load(at(a, batch, pos) + head, inside, other=0.0).to(tl.float32)
        own_b = tl.load(at(b, batch, pos) + head, inside, other=0.0).to(tl.float32)
        g, beta_ = gates(own_a, own_b, tl.load(A_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32), BETA)
        if real is not None:
            token = tl.load(at(real, batch, pos), inside, other=0) != 0
            g, beta_ = tl.where(token, g, 0.0), tl.where(token, beta_, 0.0)
        tl.store(at(log_decay, batch, pos) + head, g, inside)
        tl.store(at(beta, batch, pos) + head, beta_, inside)


@triton.jit
def differentiate_unit(x1, x2, g1, g2, w1, w2, cos, sin, eps, D: tl.constexpr):
    """The gradient of ``to_unit``'s rows, from ``g`` of its result, and what each row adds to that of the weights, where there are weights."""
    y1, y2 = x1, x2
    if w1 is not None:
        rms = tl.rsqrt(dot(x1, x2, x1, x2) / D + eps)
        x1, x2 = x1 * rms, x2 * rms
        y1, y2 = x1 * w1, x2 * w2
    if cos is not None:
        y1, y2 = y1 * cos - y2 * sin, y2 * cos + y1 * sin
    scale = tl.rsqrt(dot(y1, y2, y1, y2) + 1e-6)
    y1, y2 = y1 * scale, y2 * scale
    along = dot(y1, y2, g1, g2)
    g1, g2 = scale * (g1 - along * y1), scale * (g2 - along * y2)
    if cos is not None:
        g1, g2 = g1 * cos + g2 * sin, g2 * cos - g1 * sin
    d_w1, d_w2 = g1 * x1, g2 * x2
    if w1 is not None:
        g1, g2 = g1 * w1, g2 * w2
        along = dot(x1, x2, g1, g2) / D
        g1, g2 = rms * (g1 - along * x1), rms * (g2 - along * x2)
    return g1, g2, d_w1, d_w2


@triton.jit
def backward_kernel(
    q,
    k,
    cos,
    sin,
    a,
    b,
    A_log,
    dt_bias,
    q_weight,
    k_weight,
    real,
    grad_q,
    grad_k,
    grad_log_decay,
    grad_beta,
    d_q,
    d_k,
    d_a,
    d_b,
    d_gates,
    d_weights,
    n_batch,
    n_pos,
    n_heads,
    eps,
    D: tl.constexpr,
    BETA: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``d_gates [program/head gate head]`` and ``d_weights [program weight d_head]`` take what the tiles of a program add to A_log, dt_bias and weights."""
    head = tl.program_id(0) % n_heads
    first = tl.program_id(0) // n_heads
    step = tl.num_programs(0) // n_heads
    HALF: tl.constexpr = triton.next_power_of_2(D // 2)
    channel = tl.arange(0, HALF)[None, :]
    tiles = tl.cdiv(n_pos, ROWS)
    own_A, own_bias = tl.load(A_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    # Added over rows at the end only: that goes through shared memory.
    d_A, d_bias = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    d_q_w1, d_q_w2 = tl.zeros([ROWS, HALF], tl.float32), tl.zeros([ROWS, HALF], tl.float32)
    d_k_w1, d_k_w2 = tl.zeros([ROWS, HALF], tl.float32), tl.zeros([ROWS, HALF], tl.float32)
    for tile in range(first, n_batch * tiles, step):
        batch = tile // tiles
        pos = tile % tiles * ROWS + tl.arange(0, ROWS)
        inside = pos < n_pos
        mask = inside[:, None] & (channel < D // 2)
        c, s = None, None
        if cos is not None:
            c, s = load_rope(cos, sin, batch, pos, channel, mask)

        x1, x2 = load_halves(rows_of(q, batch, pos, head, channel), mask, D)
        g1, g2 = load_halves(rows_of(grad_q, batch, pos, head, channel), mask, D)
        w1, w2 = None, None
        if q_weight is not None:
            w1, w2 = load_halves(q_weight + channel, channel < D // 2, D)
        g1, g2, d_w1, d_w2 = differentiate_unit(x1, x2, g1, g2, w1, w2, c, s, eps, D)
        store_halves(rows_of(d_q, batch, pos, head, channel), g1, g2, mask, D)
        if q_weight is not None:
            d_q_w1 += d_w1
            d_q_w2 += d_w2

        x1, x2 = load_halves(rows_of(k, batch, pos, head, channel), mask, D)
        g1, g2 = load_halves(rows_of(grad_k, batch, pos, head, channel), mask, D)
        w1, w2 = None, None
        if k_weight is not None:
            w1, w2 = load_halves(k_weight + channel, channel < D // 2, D)
        g1, g2, d_w1, d_w2 = differentiate_unit(x1, x2, g1, g2, w1, w2, c, s, eps, D)
        store_halves(rows_of(d_k, batch, pos, head, channel), g1, g2, mask, D)
        if k_weight is not None:
            d_k_w1 += d_w1
            d_k_w2 += d_w2

        own_a = tl.load(at(a, batch, pos) + head, inside, other=0.0).to(tl.float32)
        own_b = tl.load(at(b, batch, pos) + head, inside, other=0.0).to(tl.float32)
        d_log_decay = tl.load(at(grad_log_decay, batch, pos) + head, inside, other=0.0)
        d_beta = tl.load(at(grad_beta, batch, pos) + head, inside, other=0.0)
        if real is not None:
            token = tl.load(at(real, batch, pos), inside, other=0) != 0
            d_log_decay, d_beta = tl.where(token, d_log_decay, 0.0), tl.where(token, d_beta, 0.0)
        log_decay, beta = gates(own_a, own_b, own_A, own_bias, BETA)
        d_own_a = -d_log_decay * tl.exp(own_A) * tl.sigmoid(own_a + own_bias)
        tl.store(at(d_a, batch, pos) + head, d_own_a, inside)
        tl.store(at(d_b, batch, pos) + head, d_beta * beta * (1 - beta / BETA), inside)
        d_A += d_log_decay * log_decay
        d_bias += d_own_a

    tl.store(d_gates + (2 * first) * n_heads + head, tl.sum(d_A))
    tl.store(d_gates + (2 * first + 1) * n_heads + head, tl.sum(d_bias))
    d_weights += tl.program_id(0) * 2 * D + channel
    if q_weight is not None:
        store_halves(d_weights, tl.sum(d_q_w1, 0, keep_dims=True), tl.sum(d_q_w2, 0, keep_dims=True), channel < D // 2, D)
    if k_weight is not None:
        store_halves(d_weights + D, tl.sum(d_k_w1, 0, keep_dims=True), tl.sum(d_k_w2, 0, keep_dims=True), channel < D // 2, D)


def prepare(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos head d_head"],
    cos: Float[Tensor, "batch_or_1 pos d_head"] | None,
    sin: Float[Tensor, "batch_or_1 pos d_head"] | None,
    a: Float[Tensor, "batch pos head"],
    b: Float[Tensor, "batch pos head"],
    A_log: Float[Tensor, "head"],
    dt_bias: Float[Tensor, "head"],
    q_weight: Float[Tensor, "d_head"] | None = None,
    k_weight: Float[Tensor, "d_head"] | None = None,
    real: Bool[Tensor, "batch pos"] | None = None,
    *,
    eps: float,
    negative_eigenvalues: bool = False,
) -> tuple[Float[Tensor, "batch pos head d_head"], Float[Tensor, "batch pos head d_head"], Float[Tensor, "batch pos head"], Float[Tensor, "batch pos head"]]:
    """q and k of length 1, log decay and beta of Gated DeltaNet (Yang et al., arXiv 2412.06464; HydraHead keeps RoPE and QK-norm before it).

    Differentiable in everything but ``cos``, ``sin`` and ``real``. Computed in float32 and rounded once. Sums have a fixed order: the same inputs give the
    same bits.

    Args:
        q, k: what the projections give, of one type, with any strides but that of channels, which is 1.
        cos, sin: RoPE's tables as transformers makes them, their two halves equal, so that only the first is read; None: no RoPE.
        a, b: what the projections of decay and beta give; channels' stride is 1 here too.
        q_weight, k_weight: weights of an RMSNorm before RoPE; None: no norm.
        real: False for padding, which gets log decay 0 and beta 0: it neither decays the state nor is written to it.
        eps: added to the mean square of that norm. The squared length gets 1e-6, as in fla's kernels.
        negative_eigenvalues: beta in 0..2 instead of 0..1.

    Returns:
        q and k, contiguous, in their own type; log decay (at most 0) and beta in float32.

    Raises:
        ValueError: shapes, types or strides that do not fit; the message names them.
    """
    check(q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight, real)
    return torch.ops.hydralens.gdn_prepare.default(q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight, real, eps, negative_eigenvalues)


def check(q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight, real=None) -> None:
    """Of a sequence, or of one token without the axis of positions."""
    *rows, n_heads, d_head = q.shape
    tables = [1, *rows[1:], d_head] if cos is not None and cos.shape[0] == 1 else [*rows, d_head]
    expected = {
        "k": (k, [*rows, n_heads, d_head]),
        "cos": (cos, tables),
        "sin": (sin, tables),
        "a": (a, [*rows, n_heads]),
        "b": (b, [*rows, n_heads]),
        "A_log": (A_log, [n_heads]),
        "dt_bias": (dt_bias, [n_heads]),
        "q_weight": (q_weight, [d_head]),
        "k_weight": (k_weight, [d_head]),
        "real": (real, rows),
    }
    for name, (x, shape) in expected.items():
        if x is not None and list(x.shape) != shape:
            raise ValueError(f"{name} is {list(x.shape)}, expected {shape} with q {list(q.shape)}")
        if name != "real" and x is not None and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name} has strides {x.stride()}; the last must be 1")
    if q.stride(-1) != 1 or d_head % 2 or k.dtype != q.dtype:
        raise ValueError(f"q is {list(q.shape)} {q.dtype} with strides {q.stride()}, k {k.dtype}; d_head must be even, its stride 1, and the types equal")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin come together or not at all")


def strided(x: Tensor | None, axes: int) -> tuple | None:
    """A tensor and its strides over the first axes, 0 where an axis of one serves all."""
    return None if x is None else (x, *(0 if size == 1 else stride for size, stride in zip(x.shape[:axes], x.stride(), strict=False)))


def arguments(q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight, real) -> tuple:
    rows, tables = (strided(x, 3) for x in (q, k)), (strided(x, 2) for x in (cos, sin, a, b))
    return *rows, *tables, A_log, dt_bias, q_weight, k_weight, strided(real, 2)


def constants(q: Tensor, negative_eigenvalues: bool) -> dict[str, int]:
    d_head = q.shape[-1]
    return {
        "D": d_head,
        "BETA": 2 if negative_eigenvalues else 1,
        "ROWS": max(1, ROWS_TIMES_D // triton.next_power_of_2(d_head)),
        "num_warps": WARPS,
    }


def forward(q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight, real, eps: float, negative_eigenvalues: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, n_pos, n_heads, _ = q.shape
    out = q_out, k_out, log_decay, beta = forward_fake(q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight, real, eps, negative_eigenvalues)
    constant = constants(q, negative_eigenvalues)
    grid = (triton.cdiv(n_pos, constant["ROWS"]) * triton.cdiv(n_heads, HEADS), batch)
    with torch.cuda.device_of(q):
        forward_kernel[grid](
            *arguments(q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight, real),
            strided(q_out, 3),
            strided(k_out, 3),
            strided(log_decay, 2),
            strided(beta, 2),
            n_pos,
            n_heads,
            eps,
            HEADS=HEADS,
            **constant,
        )
    return out


def backward(
    grad_q, grad_k, grad_log_decay, grad_beta, q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight, real, eps: float, negative_eigenvalues: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, a, b, A_log, dt_bias and the weights; empty for weights that there are not."""
    batch, n_pos, n_heads, d_head = q.shape
    constant = constants(q, negative_eigenvalues)
    programs = min(batch * triton.cdiv(n_pos, constant["ROWS"]), max(1, BACKWARD_PROGRAMS // n_heads))
    d_q, d_k, d_a, d_b = (torch.empty_like(x) for x in (q, k, a, b))
    d_gates = A_log.new_empty(programs, 2, n_heads, dtype=torch.float32)
    d_weights = A_log.new_empty(programs * n_heads, 2, d_head, dtype=torch.float32)
    with torch.cuda.device_of(q):
        backward_kernel[(programs * n_heads,)](
            *arguments(q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight, real),
            *(strided(x, 3) for x in (grad_q, grad_k)),
            *(strided(x, 2) for x in (grad_log_decay, grad_beta)),
            *(strided(x, 3) for x in (d_q, d_k)),
            *(strided(x, 2) for x in (d_a, d_b)),
            d_gates,
            d_weights,
            batch,
            n_pos,
            n_heads,
            eps,
            maxnreg=BACKWARD_REGISTERS,
            **constant,
        )
    d_A_log, d_dt_bias = (d_gates[:, index].sum(0) for index in range(2))  # results of an operator must not share memory
    weights = (q.new_empty(0) if weight is None else d_weights[:, index].sum(0).to(weight.dtype) for index, weight in enumerate((q_weight, k_weight)))
    return d_q, d_k, d_a, d_b, d_A_log.to(A_log.dtype), d_dt_bias.to(dt_bias.dtype), *weights


def forward_fake(q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight, real, eps, negative_eigenvalues):
    log_decay, beta = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return q.new_empty(q.shape), k.new_empty(k.shape), log_decay, beta


def backward_fake(grad_q, grad_k, grad_log_decay, grad_beta, q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight, real, eps, negative_eigenvalues):
    weights = (q.new_empty(0) if weight is None else torch.empty_like(weight) for weight in (q_weight, k_weight))
    return *(torch.empty_like(x) for x in (q, k, a, b, A_log, dt_bias)), *weights


def save(ctx, inputs, output) -> None:
    *tensors, ctx.eps, ctx.negative_eigenvalues = inputs
    ctx.save_for_backward(*tensors)


def differentiate(ctx, *grads):
    grads = (grad.contiguous() for grad in grads)
    d_q, d_k, d_a, d_b, d_A_log, d_dt_bias, d_q_weight, d_k_weight = torch.ops.hydralens.gdn_prepare_backward.default(
        *grads, *ctx.saved_tensors, ctx.eps, ctx.negative_eigenvalues
    )
    q_weight, k_weight = ctx.saved_tensors[8:10]
    d_q_weight, d_k_weight = None if q_weight is None else d_q_weight, None if k_weight is None else d_k_weight
    return d_q, d_k, None, None, d_a, d_b, d_A_log, d_dt_bias, d_q_weight, d_k_weight, None, None, None


# Defined on the dispatcher itself, a call costs a third of what torch.library.custom_op's wrappers take.
LIBRARY = torch.library.Library("hydralens", "FRAGMENT")
ARGUMENTS = (
    "Tensor q, Tensor k, Tensor? cos, Tensor? sin, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, "
    "Tensor? q_weight, Tensor? k_weight, Tensor? real, float eps, bool negative_eigenvalues"
)
GRADIENTS = "Tensor grad_q, Tensor grad_k, Tensor grad_log_decay, Tensor grad_beta"
LIBRARY.define(f"gdn_prepare({ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)")
LIBRARY.define(f"gdn_prepare_backward({GRADIENTS}, {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
LIBRARY.impl("gdn_prepare", forward, "CompositeExplicitAutograd")
LIBRARY.impl("gdn_prepare_backward", backward, "CompositeExplicitAutograd")
torch.library.register_fake("hydralens::gdn_prepare", forward_fake, lib=LIBRARY)
torch.library.register_fake("hydralens::gdn_prepare_backward", backward_fake, lib=LIBRARY)
torch.library.register_autograd("hydralens::gdn_prepare", differentiate, setup_context=save, lib=LIBRARY)
