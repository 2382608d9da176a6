"""The fusion of the two kinds of heads in one pass: gather in the base model's head order, RMSNorm per head, gamma, gate (HydraHead, Eq. 13 and 14).

    full [batch pos head d_head]   \\
                                     place -> x / rms(x) * gamma * 2 sigmoid(gate) -> [batch pos head d_head], what o_proj reads
    linear [batch pos head d_head] /

Bytes moved, of N = batch * pos * heads * d_head elements in all: forward 2 N (read the source, write the output), backward 3 N (read the source and the
gradient, write the source's gradient), and a gate per channel adds 1 N and 2 N. Nothing but the inputs is kept for the backward: a row's RMS is computed
again from the row, which is read anyway.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

# A program has the rows of one head only. Which source they come from, its strides and gamma are then scalars and registers of the whole program, for any
# number of heads; a row of 64 or 128 channels fills whole 128-byte lines, 16 bytes a thread; and as heads run fastest over the programs, those that run
# side by side read and write memory that lies side by side.
TILE = 4096  # elements of one tile: with 4 warps, four loads of 16 bytes per thread and tensor in bfloat16
WARPS = 4
# The forward has a program per tile. The backward, which adds up gamma's gradient, has so many programs at most, each with every so-many-th tile of its head:
# enough waves on 132 multiprocessors to leave no long tail, few enough that the partial sums (1 MiB at d_head 128) are nothing beside the rows. It does not
# follow the device, so that neither does the order of the sum.
BACKWARD_PROGRAMS = 2048


@triton.jit
def rows_of(source, batch, pos, head):
    """Where the rows of a head start, ``[pos 1]``; ``source`` is a tensor and its strides over batch, pos and head."""
    pointer, batch_stride, pos_stride, head_stride = source
    return pointer + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride + pos.to(tl.int64)[:, None] * pos_stride


@triton.jit
def load_gamma(gamma, head, D: tl.constexpr, GAMMA: tl.constexpr):
    channel = tl.arange(0, triton.next_power_of_2(D))[None, :]
    if GAMMA == 1:
        return tl.load(gamma + head).to(tl.float32)
    else:
        return tl.load(gamma + head * D + channel, channel < D, other=0.0).to(tl.float32)


@triton.jit
def forward_tile(source, gate, out, gamma, batch, pos, head, out_head, n_pos, eps, D: tl.constexpr, GAMMA: tl.constexpr, GATE: tl.constexpr):
    channel = tl.arange(0, triton.next_power_of_2(D))[None, :]
    row_mask = (pos < n_pos)[:, None]
    mask = row_mask & (channel < D)
    x = tl.load(rows_of(source, batch, pos, head) + channel, mask, other=0.0).to(tl.float32)
    scale = load_gamma(gamma, out_head, D, GAMMA)  # asked for once x is on its way
    y = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps) * scale
    if GATE == 1:
        y *= 2 * tl.sigmoid(tl.load(rows_of(gate, batch, pos, head), row_mask, other=0.0).to(tl.float32))
    elif GATE > 1:
        y *= 2 * tl.sigmoid(tl.load(rows_of(gate, batch, pos, head) + channel, mask, other=0.0).to(tl.float32))
    tl.store(rows_of(out, batch, pos, out_head) + channel, y, mask)


@triton.jit
def forward_kernel(
    full,
    linear,
    full_gate,
    linear_gate,
    out,
    place,
    gamma,
    n_pos,
    n_full,
    eps,
    D: tl.constexpr,
    GAMMA: tl.constexpr,
    FULL_GATE: tl.constexpr,
    LINEAR_GATE: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(0)
    pos = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    batch = tl.program_id(2)
    index = tl.load(place + head)
    if index < n_full:
        forward_tile(full, full_gate, out, gamma, batch, pos, index, head, n_pos, eps, D, GAMMA, FULL_GATE)
    else:
        forward_tile(linear, linear_gate, out, gamma, batch, pos, index - n_full, head, n_pos, eps, D, GAMMA, LINEAR_GATE)


@triton.jit
def backward_tiles(
    source,
    gate,
    grad,
    d_source,
    d_gate,
    gamma,
    d_gamma,
    first,
    step,
    head,
    out_head,
    n_batch,
    n_pos,
    eps,
    D: tl.constexpr,
    GAMMA: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Every ``step``-th tile of a head, and at ``d_gamma`` what all of them add to gamma's gradient."""
    channel = tl.arange(0, triton.next_power_of_2(D))[None, :]
    tiles = tl.cdiv(n_pos, ROWS)
    total = tl.zeros([ROWS, triton.next_power_of_2(D)], tl.float32)  # added over rows at the end only: that goes through shared memory
    for tile in range(first, n_batch * tiles, step):
        batch = tile // tiles
        pos = tile % tiles * ROWS + tl.arange(0, ROWS)
        row_mask = (pos < n_pos)[:, None]
        mask = row_mask & (channel < D)
        x = tl.load(rows_of(source, batch, pos, head) + channel, mask, other=0.0).to(tl.float32)
        dy = tl.load(rows_of(grad, batch, pos, out_head) + channel, mask, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
        x *= r
        if GATE == 1:
            g = 2 * tl.sigmoid(tl.load(rows_of(gate, batch, pos, head), row_mask, other=0.0).to(tl.float32))
            d_logit = tl.sum(dy * x * gamma, 1, keep_dims=True) * g * (1 - g / 2)
            tl.store(rows_of(d_gate, batch, pos, head), d_logit, row_mask)
            dy *= g
        elif GATE > 1:
            g = 2 * tl.sigmoid(tl.load(rows_of(gate, batch, pos, head) + channel, mask, other=0.0).to(tl.float32))
            tl.store(rows_of(d_gate, batch, pos, head) + channel, dy * x * gamma * g * (1 - g / 2), mask)
            dy *= g
        total += dy * x
        dy *= gamma
        dx = r * (dy - x * (tl.sum(dy * x, 1, keep_dims=True) / D))
        tl.store(rows_of(d_source, batch, pos, head) + channel, dx, mask)
    if GAMMA == 1:
        tl.store(d_gamma, tl.sum(total))
    else:
        tl.store(d_gamma + channel, tl.sum(total, 0, keep_dims=True), channel < D)


@triton.jit
def backward_kernel(
    full,
    linear,
    full_gate,
    linear_gate,
    grad,
    d_full,
    d_linear,
    d_full_gate,
    d_linear_gate,
    place,
    gamma,
    d_gamma,
    n_batch,
    n_pos,
    n_heads,
    n_full,
    eps,
    D: tl.constexpr,
    GAMMA: tl.constexpr,
    FULL_GATE: tl.constexpr,
    LINEAR_GATE: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(0) % n_heads
    first = tl.program_id(0) // n_heads
    step = tl.num_programs(0) // n_heads
    scale = load_gamma(gamma, head, D, GAMMA)
    d_gamma += tl.program_id(0) * GAMMA
    index = tl.load(place + head)
    if index < n_full:
        backward_tiles(full, full_gate, grad, d_full, d_full_gate, scale, d_gamma, first, step, index, head, n_batch, n_pos, eps, D, GAMMA, FULL_GATE, ROWS)
    else:
        index -= n_full
        backward_tiles(
            linear, linear_gate, grad, d_linear, d_linear_gate, scale, d_gamma, first, step, index, head, n_batch, n_pos, eps, D, GAMMA, LINEAR_GATE, ROWS
        )


def fuse(
    full: Float[Tensor, "batch pos full_head d_head"],
    linear: Float[Tensor, "batch pos linear_head d_head"],
    place: Int[Tensor, "head"],
    gamma: Float[Tensor, "head d_or_1"],
    full_gate: Float[Tensor, "batch pos full_head d_or_1"] | None = None,
    linear_gate: Float[Tensor, "batch pos linear_head d_or_1"] | None = None,
    *,
    eps: float,
) -> Float[Tensor, "batch pos head d_head"]:
    """``x / rms(x) * gamma * 2 sigmoid(gate)`` of every head's output ``x``, in the base model's order (HydraHead, Eq. 13 and 14).

    Differentiable in everything but ``place``. Statistics, gate and sums are float32, and the result is rounded once. Sums have a fixed order: the
    same inputs give the same bits.

    Args:
        full: outputs of the softmax heads, with any strides but that of channels, which is 1; there may be no such heads.
        linear: outputs of the linear heads, likewise and of the same type.
        place: where each head of the result stands among ``full``'s heads followed by ``linear``'s; contiguous.
        gamma: scale of each head of the result, per channel or one; contiguous.
        full_gate, linear_gate: logits of the gate after the norm, per channel or one a row; None: no gate.
        eps: added to the mean square.

    Returns:
        Contiguous, in the type of ``full``: ``.flatten(2)`` is what the output projection reads.

    Raises:
        ValueError: shapes, types or strides that do not fit; the message names them.
    """
    check(full, linear, place, gamma, full_gate, linear_gate)
    return torch.ops.hydralens.fuse.default(full, linear, place, gamma, full_gate, linear_gate, eps)


def check(full: Tensor, linear: Tensor, place: Tensor, gamma: Tensor, full_gate: Tensor | None, linear_gate: Tensor | None) -> None:
    batch, pos, n_full, d_head = full.shape
    n_linear = linear.shape[2]
    n_heads = n_full + n_linear
    if linear.shape != (batch, pos, n_linear, d_head) or linear.dtype != full.dtype:
        raise ValueError(f"full is {list(full.shape)} {full.dtype}, linear {list(linear.shape)} {linear.dtype}; they may differ in the number of heads alone")
    if place.shape != (n_heads,) or gamma.shape not in ((n_heads, 1), (n_heads, d_head)):
        raise ValueError(
            f"place is {list(place.shape)} and gamma {list(gamma.shape)}; {n_full} + {n_linear} heads need [{n_heads}] and [{n_heads}, {d_head} or 1]"
        )
    for name, gate, heads in (("full_gate", full_gate, n_full), ("linear_gate", linear_gate, n_linear)):
        if gate is not None and gate.shape not in ((batch, pos, heads, 1), (batch, pos, heads, d_head)):
            raise ValueError(f"{name} is {list(gate.shape)}, expected [{batch}, {pos}, {heads}, {d_head} or 1]")
    for name, x in (("full", full), ("linear", linear), ("full_gate", full_gate), ("linear_gate", linear_gate)):
        if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name} has strides {x.stride()}; the last must be 1")
    for name, x in (("place", place), ("gamma", gamma)):
        if not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()}; it must be contiguous")


def strided(x: Tensor | None) -> tuple | None:
    """What ``rows_of`` takes."""
    return None if x is None else (x, *x.stride()[:3])


def constants(full: Tensor, gamma: Tensor, full_gate: Tensor | None, linear_gate: Tensor | None) -> dict[str, int]:
    d_head = full.shape[3]
    return {
        "D": d_head,
        "GAMMA": gamma.shape[1],
        "FULL_GATE": 0 if full_gate is None else full_gate.shape[3],
        "LINEAR_GATE": 0 if linear_gate is None else linear_gate.shape[3],
        "ROWS": TILE // triton.next_power_of_2(d_head),
        "num_warps": WARPS,
    }


def forward(
    full: Tensor, linear: Tensor, place: Tensor, gamma: Tensor, full_gate: Tensor | None, linear_gate: Tensor | None, eps: float
) -> Float[Tensor, "batch pos head d_head"]:
    batch, n_pos, n_full, d_head = full.shape
    n_heads = len(place)
    out = full.new_empty(batch, n_pos, n_heads, d_head)
    constant = constants(full, gamma, full_gate, linear_gate)
    grid = (n_heads, triton.cdiv(n_pos, constant["ROWS"]), batch)
    with torch.cuda.device_of(full):
        forward_kernel[grid](
            strided(full), strided(linear), strided(full_gate), strided(linear_gate), strided(out), place, gamma, n_pos, n_full, eps, **constant
        )
    return out


def backward(
    grad: Tensor, full: Tensor, linear: Tensor, place: Tensor, gamma: Tensor, full_gate: Tensor | None, linear_gate: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of full, linear, gamma and the gates, each laid out as what it is of; empty for a gate that there is not."""
    batch, n_pos, n_full, _ = full.shape
    n_heads = len(place)
    d_full, d_linear, _, d_full_gate, d_linear_gate = backward_fake(grad, full, linear, place, gamma, full_gate, linear_gate, eps)
    constant = constants(full, gamma, full_gate, linear_gate)
    programs = min(batch * triton.cdiv(n_pos, constant["ROWS"]), max(1, BACKWARD_PROGRAMS // n_heads))
    partial = gamma.new_empty(programs, *gamma.shape, dtype=torch.float32)
    with torch.cuda.device_of(full):
        backward_kernel[(programs * n_heads,)](
            strided(full),
            strided(linear),
            strided(full_gate),
            strided(linear_gate),
            strided(grad),
            strided(d_full),
            strided(d_linear),
            None if full_gate is None else strided(d_full_gate),
            None if linear_gate is None else strided(d_linear_gate),
            place,
            gamma,
            partial,
            batch,
            n_pos,
            n_heads,
            n_full,
            eps,
            **constant,
        )
    return d_full, d_linear, partial.sum(0).to(gamma.dtype), d_full_gate, d_linear_gate


def forward_fake(full, linear, place, gamma, full_gate, linear_gate, eps):
    return full.new_empty(*full.shape[:2], place.shape[0], full.shape[3])


def backward_fake(grad, full, linear, place, gamma, full_gate, linear_gate, eps):
    gates = (full.new_empty(0) if gate is None else torch.empty_like(gate) for gate in (full_gate, linear_gate))
    return torch.empty_like(full), torch.empty_like(linear), torch.empty_like(gamma), *gates


def save(ctx, inputs, output) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def differentiate(ctx, grad):
    full, linear, place, gamma, full_gate, linear_gate = ctx.saved_tensors
    d_full, d_linear, d_gamma, d_full_gate, d_linear_gate = torch.ops.hydralens.fuse_backward.default(grad.contiguous(), *ctx.saved_tensors, ctx.eps)
    return d_full, d_linear, None, d_gamma, None if full_gate is None else d_full_gate, None if linear_gate is None else d_linear_gate, None


# Defined on the dispatcher itself, a call costs a third of what torch.library.custom_op's wrappers take.
LIBRARY = torch.library.Library("hydralens", "FRAGMENT")
ARGUMENTS = "Tensor full, Tensor linear, Tensor place, Tensor gamma, Tensor? full_gate, Tensor? linear_gate, float eps"
LIBRARY.define(f"fuse({ARGUMENTS}) -> Tensor")
LIBRARY.define(f"fuse_backward(Tensor grad, {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
LIBRARY.impl("fuse", forward, "CompositeExplicitAutograd")
LIBRARY.impl("fuse_backward", backward, "CompositeExplicitAutograd")
torch.library.register_fake("hydralens::fuse", forward_fake, lib=LIBRARY)
torch.library.register_fake("hydralens::fuse_backward", backward_fake, lib=LIBRARY)
torch.library.register_autograd("hydralens::fuse", differentiate, setup_context=save, lib=LIBRARY)
