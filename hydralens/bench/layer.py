"""Attention of one Qwen3-1.7B layer: all heads in full, and hybrids of few full heads and Gated DeltaNet; how much faster, and from which length on."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hydralens.bench.gpu import AS_BASE, Run, free, in_graph, matmul_rate, median_ms, qwen3, random_model, relative, spread_mask
from hydralens.bench.report import Report
from hydralens.hybrid.backends import delta_rule
from hydralens.hybrid.branches import slow_decay, unit
from hydralens.hybrid.build import build_hybrid
from hydralens.hybrid.recurrence import CHUNK, gated_delta_rule

RATIOS = {"7:1": 8, "3:1": 4}  # full heads are one of so many
PREFIX = 512  # positions that are compared with float32: a causal output depends on nothing after them

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # [batch pos head d_head] -> the same


def main(report: Report) -> None:
    rate = matmul_rate(report)
    report.note(f"matrix product: {rate / 1e12:.3g} TFLOP/s; the limit of a row is its operations at this rate")
    lengths = (64, 128, 256) if report.small else (2048, 8192, 32768, 131072, 524288)
    backends = attentions(report)
    wrong = errors(report, backends)
    speedups: dict[str, list[float]] = {ratio: [] for ratio in RATIOS}
    for n_pos in lengths:
        for ratio, speedup in forward(report, backends, wrong, n_pos, rate).items():
            speedups[ratio].append(speedup)
        free(report.device)
    for ratio, own in speedups.items():
        length = crossover(lengths, own)
        found = "no crossing at these lengths" if length is None else f"the hybrid is faster from {length:,.0f} tokens on"
        report.note(f"attention from q, k, v, forward, {ratio}: {found}")
    for n_pos in lengths[1:2] if report.small else (8192, 32768):
        forward_and_backward(report, backends, n_pos, rate)
        free(report.device)
    modules(report, lengths)


def crossover(lengths: Sequence[int], speedups: Sequence[float]) -> float | None:
    """Where the speed-up passes 1 for the last time, between two lengths in a straight line of its logarithm over the length's; None if it never does."""
    steps = list(zip(lengths, speedups, strict=True))
    for (short, slow), (long, fast) in reversed(list(zip(steps, steps[1:], strict=False))):
        if slow < 1 <= fast:
            share = -math.log(slow) / (math.log(fast) - math.log(slow))
            return short * (long / short) ** share
    return None


# The two kinds of heads


def attentions(report: Report) -> dict[str, Attention]:
    """Causal softmax attention by every library that is there and takes the layer's shape."""

    def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    if report.device.type == "cpu":
        return {"math": partial(sdpa, SDPBackend.MATH)}

    def fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func

        out = flash_attn_func(q, k, v, causal=True)
        return out[0] if isinstance(out, tuple) else out

    found = {}
    named = {"fa4": fa4, "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION), "flash": partial(sdpa, SDPBackend.FLASH_ATTENTION)}
    for name, attend in named.items():
        try:
            attend(*softmax_inputs(report, PREFIX))
            found[name] = attend
        except (ImportError, RuntimeError) as error:
            report.note(f"{name} is left out: {str(error).splitlines()[0]}")
    return found


def softmax_inputs(report: Report, n_pos: int, share: int = 1) -> list[Tensor]:
    """q, k and v of one in ``share`` of the layer's heads, whole KV groups."""
    config = qwen3(report.small)
    return [
        torch.randn(1, n_pos, n_heads // share, config.head_dim, device=report.device, dtype=report.dtype)
        for n_heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    ]


def linear_inputs(report: Report, n_pos: int, n_heads: int) -> list[Tensor]:
    """q, k, v, log decay and beta."""
    to = {"device": report.device}
    q, k, v = (torch.randn(1, n_pos, n_heads, qwen3(report.small).head_dim, dtype=report.dtype, **to) for _ in range(3))
    log_decay = -F.softplus(torch.randn(1, n_pos, n_heads, **to) + slow_decay(n_heads).to(report.device))
    return [unit(q), unit(k), v, log_decay, torch.rand(1, n_pos, n_heads, **to)]


def linear(*given: Tensor) -> Tensor:
    return delta_rule(*given, initial_state=None, cu_seqlens=None, backend="auto")[0]


def errors(report: Report, backends: dict[str, Attention]) -> dict[str, float]:
    """Of every backend and of the delta rule against float32, relative."""
    q, k, v = softmax_inputs(report, PREFIX)
    exact = (x.float().transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True).transpose(1, 2)
    found = {name: relative(attend(q, k, v), expected) for name, attend in backends.items()}
    given = linear_inputs(report, PREFIX, 4)
    return found | {"gdn": relative(linear(*given), gated_delta_rule(*(x.float() for x in given))[0])}


# Given q, k and v


@torch.no_grad()
def forward(report: Report, backends: dict[str, Attention], wrong: dict[str, float], n_pos: int, rate: float) -> dict[str, float]:
    """A row for full attention and one a ratio; returns how many times faster each hybrid is than the best full attention."""
    device, config = report.device, qwen3(report.small)
    full = {name: median_ms(partial(attend, *softmax_inputs(report, n_pos)), device) for name, attend in backends.items()}
    best = min(full.values())
    n_heads, d_head = config.num_attention_heads, config.head_dim
    for name, ms in full.items():
        limit = 1e3 * softmax_flops(n_pos, n_heads, d_head) / rate
        report.row("attention from q, k, v, forward: full", tokens=n_pos, by=name, error=wrong[name], ms=ms, **{"limit ms": limit, "limit / ours": limit / ms})
    found = {}
    for ratio, share in RATIOS.items():
        kept, n_linear = softmax_inputs(report, n_pos, share), n_heads - n_heads // share
        own = {name: median_ms(partial(attend, *kept), device) for name, attend in backends.items()}
        name = min(own, key=own.get)
        few, others = partial(backends[name], *kept), partial(linear, *linear_inputs(report, n_pos, n_linear))
        alone, serial = median_ms(others, device), median_ms(lambda few=few, others=others: (few(), others()), device)
        graph = median_ms(in_graph([beside(few, others, device)], device), device)
        limit = 1e3 * (softmax_flops(n_pos, n_heads // share, d_head) + delta_flops(n_pos, n_linear, d_head)) / rate
        found[ratio] = best / min(serial, graph)
        report.row(
            "attention from q, k, v, forward: hybrid",
            **{"tokens": n_pos, "heads": f"{n_heads // share} {name} + {n_linear} GDN", "error GDN": wrong["gdn"], "full heads ms": own[name], "GDN ms": alone},
            **{"serial ms": serial, "graph ms": graph, "best full ms": best, "times faster": found[ratio], "limit ms": limit},
        )
    return found


def beside(one: Run, other: Run, device: torch.device) -> Run:
    """Both at once, on two streams."""
    if device.type != "cuda":
        return lambda: (one(), other())
    side = torch.cuda.Stream()

    def run() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other()
        one()
        torch.cuda.current_stream().wait_stream(side)

    return run


def forward_and_backward(report: Report, backends: dict[str, Attention], n_pos: int, rate: float) -> None:
    """Eager, one after the other: a training step is not captured."""
    config, device = qwen3(report.small), report.device
    n_heads, d_head = config.num_attention_heads, config.head_dim

    def both(function: Callable[..., Tensor], inputs: list[Tensor]) -> Run:
        inputs = [x.requires_grad_() for x in inputs]
        upstream = torch.randn_like(function(*inputs))
        return lambda: torch.autograd.grad(function(*inputs), inputs, upstream)

    def fastest(share: int) -> tuple[str, float, Run]:
        runs = {name: both(attend, softmax_inputs(report, n_pos, share)) for name, attend in backends.items()}
        times = {name: median_ms(run, device) for name, run in runs.items()}
        name = min(times, key=times.get)
        return name, times[name], runs[name]

    name, best, _ = fastest(1)
    limit = 3.5e3 * softmax_flops(n_pos, n_heads, d_head) / rate  # five products backward for two forward
    table, limit_of = "attention from q, k, v, forward and backward, eager", {"limit ms": limit}
    report.row(table, tokens=n_pos, heads=f"{n_heads} {name}", **{"full heads ms": best, "GDN ms": None, "serial ms": best, "times faster": 1.0}, **limit_of)
    for share in RATIOS.values():
        name, own, few = fastest(share)
        others = both(linear, linear_inputs(report, n_pos, n_heads - n_heads // share))
        alone, serial = median_ms(others, device), median_ms(lambda few=few, others=others: (few(), others()), device)
        limit = 1e3 * (3.5 * softmax_flops(n_pos, n_heads // share, d_head) + 3 * delta_flops(n_pos, n_heads - n_heads // share, d_head)) / rate
        values = {"full heads ms": own, "GDN ms": alone, "serial ms": serial, "times faster": best / serial, "limit ms": limit}
        report.row(table, tokens=n_pos, heads=f"{n_heads // share} {name} + {n_heads - n_heads // share} GDN", **values)


def softmax_flops(n_pos: int, n_heads: int, d_head: int) -> float:
    """Two products, half of each masked."""
    return 2.0 * n_pos**2 * n_heads * d_head


def delta_flops(n_pos: int, n_heads: int, d_head: int) -> float:
    """Chunk by chunk: of a token and head 2 D (6 D + 8 C)."""
    return 2.0 * d_head * (6 * d_head + 8 * CHUNK) * n_pos * n_heads


# The whole module, projections included


@torch.no_grad()
def modules(report: Report, lengths: Sequence[int]) -> None:
    """transformers' own attention of the base model (SDPA) beside the hybrid's, both eager."""
    config = qwen3(report.small)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    base = random_model(config, report)
    mask = spread_mask(1, config.num_attention_heads)
    hybrid = build_hybrid(base, mask)
    same = build_hybrid(base, torch.ones_like(mask), **AS_BASE)
    own, alike, theirs = (model.model.layers[0].self_attn for model in (hybrid, same, base))
    for n_pos in lengths:
        x = torch.randn(1, n_pos, config.hidden_size, device=report.device, dtype=report.dtype)
        tokens = hybrid.model.tokens(x)
        run = partial(theirs, hidden_states=x, position_embeddings=tokens.rope, attention_mask=None)
        error = relative(alike(x, tokens, None), run()[0])
        ours, base_ms = median_ms(partial(own, x, tokens, None), report.device), median_ms(run, report.device)
        values = {"error, all heads full": error, "hybrid ms": ours, "base ms": base_ms, "times faster": base_ms / ours}
        report.row("attention module with projections, forward, eager, 7:1", tokens=n_pos, **values)
