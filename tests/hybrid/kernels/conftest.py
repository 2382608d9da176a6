"""Kernels run on the GPU where there is one, else under Triton's interpreter. Test modules import triton by ``pytest.importorskip`` before the kernels."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

ON_GPU = torch.cuda.is_available()


def interpret() -> None:
    """Kernels defined from here on run under the interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    # Modules collected earlier import triton (transformers does), whose own tl.sum and the like are then compiled functions, which the interpreter cannot call.
    for module in (tl, tl.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))


if not ON_GPU and importlib.util.find_spec("triton") is not None:
    interpret()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ON_GPU and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")
