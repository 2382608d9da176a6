"""What the benchmarks share: the clock, the limits that are measured beside everything else, and models of random weights."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from jaxtyping import Bool
from torch import Tensor

from hydralens.bench.report import Report
from hydralens.selection import heads_for_ratio

L2_FLUSH = 2**28  # bytes written before each timed call, several times the cache
LONG_MS = 1000.0
RATIO = "7:1"
LONGEST = 2**20  # tokens; of a model with random weights any length will do
AS_BASE = {"full_rope": True, "log_scale": None, "full_gate": None, "fusion_norm": False}  # a hybrid of full heads alone is the base model then

Run = Callable[[], Any]


# The clock


def median_ms(run: Run, device: torch.device, *, budget_ms: float = 200.0) -> float:
    """Median milliseconds of as many calls as fit the budget, three at least, after one that does not count; one alone where a call takes ``LONG_MS``.

    On a GPU by CUDA events, the L2 cache overwritten before each call: what ``triton.testing.do_bench`` does, which calls the slowest eight times.
    """
    run()
    (first,) = _times(run, device, 1)
    if first > LONG_MS:
        return first
    return statistics.median(_times(run, device, min(100, max(3, int(budget_ms / max(first, 1e-3))))))


def _times(run: Run, device: torch.device, n: int) -> list[float]:
    if device.type != "cuda":
        return [_wall_ms(run) for _ in range(n)]
    cache = torch.empty(L2_FLUSH, dtype=torch.int8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for start, stop in events:
        cache.zero_()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def _wall_ms(run: Run) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def in_graph(runs: Sequence[Run], device: torch.device) -> Run:
    """One CUDA graph of all ``runs``, without the host's share of the time; on a CPU the runs themselves."""

    def each() -> None:
        for run in runs:
            run()

    if device.type != "cuda":
        return each
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and tunes what a capture must not
        each()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        each()
    return graph.replay


def backward_of(out: Tensor | Sequence[Tensor], inputs: Sequence[Tensor], upstream: Tensor | Sequence[Tensor]) -> Run:
    """The backward pass alone, over and over."""
    return lambda: torch.autograd.grad(out, inputs, upstream, retain_graph=True)


# Correctness and limits


def relative(found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor]) -> float:
    """Largest of |found - expected| / |expected|, in float64; NaN stays NaN."""
    pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
    return max((float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs), key=lambda error: (error != error, error))


def copy_bandwidth(report: Report) -> float:
    """Bytes a second, read and written both counted, of a large copy on the device: the limit of whatever moves bytes."""
    source = torch.randn(2**20 if report.small else 2**30, device=report.device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / median_ms(lambda: target.copy_(source), report.device) * 1e3


def matmul_rate(report: Report) -> float:
    """Floating-point operations a second of a large matrix product of random numbers: the limit of whatever multiplies."""
    n = 256 if report.small else 8192
    a, b = (torch.randn(n, n, device=report.device, dtype=report.dtype) for _ in range(2))
    return 2 * n**3 / median_ms(lambda: a @ b, report.device) * 1e3


def n_bytes(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def peak_gib(run: Run, device: torch.device) -> float | None:
    """Largest memory of the GPU that tensors held during one call; None on a CPU."""
    if device.type != "cuda":
        run()
        return None
    free(device)
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def free(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Models


def qwen3(small: bool) -> transformers.Qwen3Config:
    """Qwen3-1.7B's shape, for a context of any length."""
    if small:
        sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    else:
        sizes = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "head_dim": 128}
    return transformers.Qwen3Config(**sizes, num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True, max_position_embeddings=LONGEST)


def smollm2(small: bool) -> transformers.LlamaConfig:
    """The embedded model's shape (SmolLM2-135M)."""
    if small:
        sizes = {"vocab_size": 512, "hidden_size": 144, "intermediate_size": 288, "num_hidden_layers": 2}
    else:
        sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    return transformers.LlamaConfig(**sizes, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=LONGEST)


def random_model(config: transformers.PreTrainedConfig, report: Report) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(report.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=report.dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def spread_mask(n_layers: int, n_heads: int, ratio: str = RATIO) -> Bool[Tensor, "layer head"]:
    """True for the first heads of every layer, so that those of one layer share KV heads; as many in all as the ratio says."""
    full = torch.zeros(n_layers, n_heads, dtype=torch.bool)
    for index in range(heads_for_ratio(ratio, n_layers * n_heads)):
        full[index % n_layers, index // n_layers] = True
    return full
