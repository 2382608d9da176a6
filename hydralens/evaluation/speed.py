"""How fast a prompt is read, how fast tokens follow, and what the cache takes."""

import time
from statistics import median
from typing import Any

import torch

from hydralens.models.lens import LensModel

REPEATS, STEPS = 3, 16


@torch.no_grad()
def speed(model: LensModel, length: int, *, repeats: int = REPEATS, steps: int = STEPS) -> dict[str, float]:
    """Median tokens a second of one prompt of ``length`` random tokens and of the ``steps`` tokens after it, through the model's own forward; and the
    bytes that its cache holds after the prompt.

    Times of one machine in one moment: compare models within a run only.
    """
    tokens = torch.randint(model.anatomy.unembed.weight.shape[0], (1, length), generator=torch.Generator().manual_seed(0)).to(model.device)
    reading, following, held = [], [], 0
    for _ in range(repeats + 1):  # the first warms up
        begun = _now(model)
        out = model.hf(input_ids=tokens, use_cache=True, logits_to_keep=1)
        read = _now(model)
        named = "cache" if "cache" in out else "past_key_values"  # its name since transformers 5.24, and before
        held = _bytes(out[named])
        for _ in range(steps):
            out = model.hf(input_ids=out.logits[:, -1:].argmax(-1), **{named: out[named]}, use_cache=True)
        reading.append(read - begun)
        following.append(_now(model) - read)
    return {
        "length": length,
        "prefill_tokens_per_s": length / median(reading[1:]),
        "decode_tokens_per_s": steps / median(following[1:]),
        "cache_bytes": held,
    }


def _now(model: LensModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def _bytes(cache: Any) -> int:
    """A hybrid's cache knows; another's is the keys and values of its layers."""
    own = getattr(cache, "n_bytes", None)
    return own if own is not None else sum(tensor.numel() * tensor.element_size() for layer in cache.layers for tensor in (layer.keys, layer.values))
