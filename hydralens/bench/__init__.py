"""Benchmarks of the hybrid's kernels, layers, decoding, sweeps and training on a GPU: ours, a peer's and the limit from one run."""

import importlib
from pathlib import Path

from hydralens.errors import check_word

BENCHMARKS = {
    "kernels": "each Triton kernel of the hybrid beside the torch code or library that it replaces, and the copy bandwidth",
    "layer": "attention of one layer, hybrid beside full, from 2K to 512K tokens, and where they cross",
    "decode": "tokens a second of a whole model, hybrid beside the base model in the same runtime",
    "sweeps": "all heads patched at 32K and 128K tokens, beside the two unpatched forwards",
    "transfer": "tokens a second and MFU of each stage, hybrid beside full attention; memory of the chunked KL",
}


def run(name: str, out: Path | None = None, *, small: bool = False) -> None:
    """Run one benchmark of ``BENCHMARKS``. Rows are printed, and with ``out`` written to ``NAME.md`` and ``NAME.json`` there, as they finish.

    Args:
        small: shapes that a CPU runs in seconds; they show that the benchmark runs, not how fast anything is.

    Raises:
        InputError: an unknown name, no GPU without ``small``, or a folder that cannot be written.
    """
    check_word("benchmark", name, tuple(BENCHMARKS))
    from hydralens.bench.report import Report

    importlib.import_module(f"hydralens.bench.{name}").main(Report(name, out, small))
