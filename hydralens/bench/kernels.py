"""Each Triton kernel of the hybrid: error against a reference in higher precision, then time beside eager torch, torch.compile or a library, and the limit."""

import importlib
import math
import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hydralens.bench.gpu import L2_FLUSH, Run, backward_of, copy_bandwidth, in_graph, median_ms, n_bytes, relative
from hydralens.bench.report import Report
from hydralens.hybrid.branches import unit, wide
from hydralens.hybrid.recurrence import gated_delta_rule_recurrent
from hydralens.models.anatomy import Rope, rotate

EPS = 1e-6
WRONG = 3e-2  # relative error from which on a kernel is not timed
PLACE = (2, 3, 4, 5, 6, 0, 7, 8, 9, 10, 11, 1, 12, 13, 14, 15)  # heads 5 and 11 are full


def main(report: Report) -> None:
    bandwidth = copy_bandwidth(report)
    report.note(f"copy: {bandwidth / 1e12:.3g} TB/s, read and written; the limit of a row is its bytes at this rate")
    for measure in (fusion, gdn_prepare, gdn_step, decode_attention):
        torch.manual_seed(0)
        measure(report, bandwidth)


def kernel(report: Report, module: str, name: str) -> Callable | None:
    """The kernel; None on a CPU, where it runs under Triton's interpreter alone (TRITON_INTERPRET=1), whose time says nothing."""
    if report.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        report.note(f"{name}: our kernel is left out: it needs a GPU, or TRITON_INTERPRET=1 to see that it is right")
        return None
    return getattr(importlib.import_module(f"hydralens.hybrid.kernels.{module}"), name)


def compiled(report: Report, function: Callable) -> Callable | None:
    """None on a CPU, where compiling takes longer than everything else together."""
    if report.device.type == "cpu":
        return None
    torch._functorch.config.donated_buffer = False  # with donated buffers a backward pass runs once only
    return torch.compile(function, fullgraph=True, dynamic=False)


def compare(
    report: Report, table: str, shape: str, moved: int, bandwidth: float, error: float | None, ours: Run | None, peers: dict[str, Run | None], calls: int = 1
) -> None:
    """One row. ``moved``: bytes of one call; ``calls``: how many each run makes."""
    if error is not None and not error < WRONG:
        report.note(f"{table}, {shape}: relative error {error:.2g}, so it is not timed")
        return
    times = {f"{name} ms": None if run is None else median_ms(run, report.device) / calls for name, run in ({"ours": ours} | peers).items()}
    limit = 1e3 * moved / bandwidth
    share = None if ours is None else limit / times["ours ms"]
    report.row(table, **{"shape": shape, "MB": moved / 1e6, "error": error, **times, "limit ms": limit, "limit / ours": share})


def both_ways(report: Report, bandwidth: float, name: str, shape: str, functions: dict[str, Callable | None], inputs: Sequence[Tensor]) -> None:
    """Rows of the forward and of the backward pass; the reference is the eager function on float32 copies."""
    exact = [x.float().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    out = {key: None if f is None else _tuple(f(*inputs)) for key, f in functions.items()}
    expected = _tuple(functions["eager"](*exact))
    upstream = [torch.randn_like(x) for x in out["eager"]]
    gradients = torch.autograd.grad(expected, exact, [x.float() for x in upstream])
    read, written = n_bytes(*inputs), n_bytes(*upstream)

    def quiet(f: Callable) -> Run:
        return torch.no_grad()(lambda: f(*inputs))

    runs = {key: None if f is None else quiet(f) for key, f in functions.items()}
    error = None if out["ours"] is None else relative(out["ours"], expected)
    compare(report, f"{name}, forward", shape, read + written, bandwidth, error, runs.pop("ours"), runs)
    runs = {key: None if own is None else backward_of(own, inputs, upstream) for key, own in out.items()}
    ours = runs.pop("ours")
    error = None if ours is None else relative(ours(), gradients)
    compare(report, f"{name}, backward", shape, 2 * read + written, bandwidth, error, ours, runs)


def _tuple(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)


# RMSNorm, gamma and gate of every head, from two sources into the model's order of heads


def fuse_in_torch(full: Tensor, linear: Tensor, place: Tensor, gamma: Tensor, gate: Tensor | None = None) -> Tensor:
    z = torch.cat([full, linear], 2)[:, :, place]
    x = z.float()
    out = (x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * gamma).to(z.dtype)
    if gate is None:
        return out
    gates = torch.cat([2 * gate.sigmoid(), gate.new_ones(*gate.shape[:2], linear.shape[2], 1)], 2)
    return out * gates[:, :, place]


def fusion(report: Report, bandwidth: float) -> None:
    n_pos, d_head, to = *((64, 16) if report.small else (32768, 128)), {"device": report.device, "dtype": report.dtype}
    place = torch.tensor(PLACE, dtype=torch.int32, device=report.device)
    fuse = kernel(report, "fusion", "fuse")
    functions = {"ours": fuse and partial(fuse, eps=EPS), "eager": fuse_in_torch, "compile": compiled(report, fuse_in_torch)}

    def placed(function: Callable) -> Callable:
        return lambda full, linear, gamma, *gate: function(full, linear, place, gamma, *gate)

    for name, gated in (("no gate", False), ("gate a full head", True)):
        inputs = [torch.randn(1, n_pos, 2, d_head, **to), torch.randn(1, n_pos, 14, d_head, **to), torch.rand(16, d_head, device=report.device)]
        inputs += [torch.randn(1, n_pos, 2, 1, **to)] if gated else []
        placed_functions = {key: None if f is None else placed(f) for key, f in functions.items()}
        both_ways(report, bandwidth, "fusion", f"1 x {n_pos} x 16 x {d_head}, {name}", placed_functions, inputs)


# QK-norm, RoPE, length 1, decay and beta before the recurrence


def prepare_in_torch(
    rope: Rope, q: Tensor, k: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, q_weight: Tensor, k_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def one(x: Tensor, weight: Tensor) -> Tensor:
        normed = weight * (wide(x) * (wide(x).square().mean(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)
        return unit(rotate(normed.transpose(1, 2), rope).transpose(1, 2)).to(x.dtype)

    log_decay = -A_log.exp() * F.softplus(wide(a) + dt_bias)
    return one(q, q_weight), one(k, k_weight), log_decay, wide(b).sigmoid()


def _inputs(report: Report, batch: int, n_pos: int, n_heads: int, d_head: int) -> tuple[Rope, list[Tensor]]:
    """RoPE's tables and the inputs of ``prepare_in_torch``."""
    to = {"device": report.device, "dtype": report.dtype}
    angles = torch.rand(1, n_pos, d_head // 2, device=report.device).repeat(1, 1, 2) * 2 * math.pi
    q, k = (torch.randn(batch, n_pos, n_heads, d_head, **to) for _ in range(2))
    a, b = (torch.randn(batch, n_pos, n_heads, **to) for _ in range(2))
    A_log, dt_bias = torch.zeros(n_heads, device=report.device), torch.linspace(-7, -2, n_heads, device=report.device)
    weights = (1 + 0.1 * torch.randn(d_head, **to) for _ in range(2))
    return (angles.cos().to(report.dtype), angles.sin().to(report.dtype)), [q, k, a, b, A_log, dt_bias, *weights]


def gdn_prepare(report: Report, bandwidth: float) -> None:
    n_pos, n_heads, d_head = (64, 2, 16) if report.small else (32768, 14, 128)
    (cos, sin), inputs = _inputs(report, 1, n_pos, n_heads, d_head)
    prepare = kernel(report, "gdn_prepare", "prepare")
    eager = partial(prepare_in_torch, (cos, sin))

    def ours(q: Tensor, k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return prepare(q, k, cos, sin, *others, eps=EPS)

    functions = {"ours": prepare and ours, "eager": eager, "compile": compiled(report, eager)}
    both_ways(report, bandwidth, "gdn_prepare", f"1 x {n_pos} x {n_heads} x {d_head}", functions, inputs)


# One decoded token: all of that and the recurrence, the state updated in place


@torch.no_grad()
def gdn_step(report: Report, bandwidth: float) -> None:
    n_heads, d_head = (2, 16) if report.small else (14, 128)
    step = kernel(report, "gdn_step", "step")
    for batch in (1, 2) if report.small else (1, 64):
        (cos, sin), inputs = _inputs(report, batch, 1, n_heads, d_head)
        v = torch.randn_like(inputs[0])
        state = torch.randn(batch, n_heads, d_head, d_head, device=report.device)
        q, k, log_decay, beta = prepare_in_torch((cos, sin), *inputs)
        exact = [x.double() for x in prepare_in_torch((cos.double(), sin.double()), *(x.double() for x in inputs))]
        expected = gated_delta_rule_recurrent(*exact[:2], v.double(), *exact[2:], initial_state=state.double())
        now = [x[:, 0] for x in inputs[:4]]

        def ours(state: Tensor, now=now, v=v, cos=cos, sin=sin, inputs=inputs) -> Tensor:
            q, k, a, b = now
            return step(q, k, v[:, 0], a, b, *inputs[4:6], cos[:, 0], sin[:, 0], state, *inputs[6:], eps=EPS)

        def peer(state: Tensor, given=(q, k, v, log_decay, beta)) -> tuple[Tensor, Tensor]:
            if report.device.type == "cpu":
                return gated_delta_rule_recurrent(*given, initial_state=state)
            from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as recurrent

            names = dict(zip(("q", "k", "v", "g", "beta"), given, strict=True))
            return recurrent(**names, scale=1.0, initial_state=state, output_final_state=True)

        error = None
        if step is not None:
            after = state.clone()
            error = relative([ours(after)[:, None], after], expected)
        # More states than the cache holds, so that every call reads its own from memory.
        states = [torch.randn_like(state) for _ in range(2 if report.small else max(2, L2_FLUSH // n_bytes(state)))]
        functions = {"ours": step and ours, "torch" if report.device.type == "cpu" else "fla": peer}
        runs = {name: None if f is None else in_graph([partial(f, own) for own in states], report.device) for name, f in functions.items()}
        moved = 2 * n_bytes(state) + n_bytes(*now, v, v)
        compare(report, "gdn_step, in a CUDA graph", f"{batch} x {n_heads} x {d_head}", moved, bandwidth, error, runs.pop("ours"), runs, len(states))


# One query over the cache of the full heads


@torch.no_grad()
def decode_attention(report: Report, bandwidth: float) -> None:
    d_head, group = (16, 2) if report.small else (128, 2)
    shapes = ((1, 1, 256), (2, 2, 64)) if report.small else ((1, 1, 131072), (1, 8, 131072), (64, 1, 8192), (64, 8, 8192))
    attend = kernel(report, "decode_attention", "decode_attention")
    to = {"device": report.device, "dtype": report.dtype}
    for batch, n_kv, context in shapes:
        q = torch.randn(batch, n_kv * group, d_head, **to)
        caches = [[torch.randn(batch, n_kv, context, d_head, **to) for _ in range(2)]]
        moved = n_bytes(*caches[0], q, q)
        n_sets = 2 if report.small else 1 + L2_FLUSH // moved
        caches += [[torch.randn_like(x) for x in caches[0]] for _ in range(n_sets - 1)]
        reads = torch.arange(n_kv, dtype=torch.int32, device=report.device).repeat_interleave(group)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=report.device)

        def ours(k: Tensor, v: Tensor, q=q, reads=reads, lengths=lengths) -> Tensor:
            return attend(q, k, v, reads, lengths, scale=d_head**-0.5)

        def sdpa(k: Tensor, v: Tensor, q=q) -> Tensor:
            return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

        pattern = (q.float().unflatten(1, (n_kv, group)) @ caches[0][0].float().transpose(-1, -2) * d_head**-0.5).softmax(-1)
        expected = (pattern @ caches[0][1].float()).flatten(1, 2)
        wrong = None if attend is None else relative(ours(*caches[0]), expected)
        run = None if attend is None else in_graph([partial(ours, *own) for own in caches], report.device)
        peers = {}
        backends = {"math": SDPBackend.MATH} if report.small else {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        for name, backend in backends.items():
            try:
                with sdpa_kernel(backend):
                    peers[name] = in_graph([partial(sdpa, *own) for own in caches], report.device)
            except RuntimeError as error:
                peers[name] = None
                report.note(f"decode_attention, SDPA {name}: {str(error).splitlines()[0]}")
        shape = f"{batch} x {n_kv * group} over {n_kv} x {context} x {d_head}"
        compare(report, "decode_attention, in a CUDA graph", shape, moved, bandwidth, wrong, run, peers, n_sets)
