"""What a result was made with: command, versions, device."""

import platform
import sys
from importlib.metadata import version
from typing import Any

import torch

from hydralens.models.lens import LensModel


def environment(model: LensModel) -> dict[str, Any]:
    """Versions, device and dtype, as ``run.json`` records them."""
    packages = ("hydralens", "torch", "transformers", "numpy")
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {
        "versions": {"python": platform.python_version()} | {package: version(package) for package in packages},
        "device": device,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def made_with(model: LensModel) -> str:
    """The command that is running and what it runs on, as one line for the head of a table."""
    found = environment(model)
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    return f"`{' '.join(['python', *sys.argv])}` ({versions}; {found['device']}; {found['dtype']})"
