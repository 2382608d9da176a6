"""What the benchmarks share: the pair of prompts, the peer, the limit, the machine and the table."""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from hydralens.errors import InputError
from hydralens.models.conversion import converted
from hydralens.models.embedded import embedded_gguf
from hydralens.models.lens import LensModel
from hydralens.patching.effects import HeadEffects
from hydralens.patching.metric import DECAY
from hydralens.patching.pairs import Pair
from hydralens.probes.base import Probe
from hydralens.probes.needles import retrieval

# The pair


def one_pair(model: LensModel, n_tokens: int) -> Probe:
    """One needle in prose, its value swapped, at half depth; the first seed whose prompt has exactly ``n_tokens`` tokens without padding."""
    for seed in range(100):
        (probe,) = retrieval(model, n_pairs=1, n_tokens=n_tokens, seed=seed, shapes=["niah_single_2"], corruptions=["value"], depth=0.5)
        if probe.n_tokens == n_tokens:
            return probe
    raise InputError(f"none of 100 seeds gives a prompt of exactly {n_tokens} tokens; choose another --tokens")


def lead(logits: Float[Tensor, "1 pos vocab"], pair: Pair) -> Float[Tensor, ""]:
    """The metric, written out again from the logits: the answer's discounted lead over the foil."""
    read = logits[0, pair.read]
    difference = read.gather(1, pair.answer[:, None]) - read.gather(1, pair.foil[:, None])
    weights = DECAY ** torch.arange(len(pair.answer), dtype=read.dtype)
    return weights @ difference[:, 0] / weights.sum()


def patched_metric(effects: HeadEffects) -> Float[Tensor, "layer head"]:
    """The metric of every patched run of the one pair, from its normalised effects."""
    clean, corrupt = effects.clean_metric[0], effects.corrupt_metric[0]
    change = effects.per_pair[0] * (clean - corrupt)
    return clean - change if effects.direction == "noise" else corrupt + change


# The peer and the limit


def require_peer() -> None:
    try:
        import transformer_lens  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("the peer, TransformerLens, is not installed; run: pip install -e '.[lens]'") from None


def boot_peer() -> Any:
    """The embedded model as a TransformerBridge, on weights of its own: booting changes the modules of the model it is given."""
    from transformer_lens.model_bridge import TransformerBridge

    folder = converted(embedded_gguf())
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return TransformerBridge.boot_transformers(str(folder), hf_model=hf, tokenizer=tokenizer, device="cpu", dtype=torch.float32)


@torch.no_grad()
def plain_forwards(model: LensModel, pair: Pair) -> None:
    """The clean and the corrupt prompt through transformers, as it is fastest: fused attention, the last position's logits only."""
    for tokens in (pair.clean, pair.corrupt):
        model.hf(input_ids=tokens[None], use_cache=False, logits_to_keep=1)


def median_seconds(run: Callable[[], None], repeats: int) -> float:
    """Wall time; where it is measured several times, after one run that does not count."""
    if repeats > 1:
        run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


# What is printed


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Versions, threads, CPU, and how busy it was in the last minute."""
    cpu = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")] if cpu.exists() else []
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "transformer_lens": _version("transformer-lens"),
        "hydralens": _version("hydralens"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "cpu": names[0] if names else platform.processor(),
        "load": os.getloadavg()[0],
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def machine_text(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {machine[name]}" for name in ("hydralens", "torch", "transformers", "transformer_lens", "python"))
    return f"{versions}\n{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, load average {machine['load']:.1f} at the start, float32"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown that reads well in a terminal too."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines)
