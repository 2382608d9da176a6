"""Work in batches that halve when memory runs out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hydralens.errors import InputError


def in_batches(compute: Callable[[Sequence], Tensor], items: Sequence, size: int) -> Tensor:
    """``torch.cat`` of ``compute(batch)`` over batches of ``items``; a batch that does not fit is halved, and so are those after it.

    Raises:
        InputError: one item alone does not fit.
    """
    results, start = [], 0
    while start < len(items):
        batch = items[start : start + size]
        try:
            results.append(compute(batch))
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            if len(batch) == 1:
                raise InputError("out of memory with a single patched run; use shorter prompts, a smaller dtype or a device with more memory") from error
            size = len(batch) // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            continue
        start += len(batch)
    return torch.cat(results)


def _out_of_memory(error: BaseException) -> bool:
    """True for CUDA's and for the CPU allocator's error, which is a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
