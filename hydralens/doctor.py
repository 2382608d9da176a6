"""``hydralens doctor``: versions, devices, and what each operation will run on and why."""

import importlib.util
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

import torch

from hydralens.errors import InputError
from hydralens.figures.saving import BROWSERS
from hydralens.hybrid.backends import doctor_lines
from hydralens.models.embedded import embedded_gguf

CORE = ("hydralens", "torch", "transformers", "numpy", "plotly")
OPTIONAL = {
    "transformer-lens": "cross-checks through TransformerLens",
    "nnsight": "cross-checks through nnsight",
    "kaleido": "PNG beside each HTML figure",
}


def report() -> str:
    """The lines that ``hydralens doctor`` prints."""
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    lines = [f"python           {platform.python_version()} on {platform.system()} {platform.machine()}, {cores}"]
    lines += [f"{name:<16} {version(name)}" for name in CORE]
    lines += [f"{name:<16} {_version(name)}: {use}" for name, use in OPTIONAL.items()]
    if torch.cuda.is_available():
        lines += [f"device           cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
        lines.append("forward          bfloat16 on cuda:0 unless --device or --dtype say otherwise; metric and effects in float32")
    else:
        lines += ["device           cpu (no CUDA device is visible to torch)", "forward          float32 on the CPU; metric and effects in float32"]
    lines.append("attention        torch SDPA; explicit softmax in query blocks where scores are soft-capped (Gemma 2) or rows share a prefix")
    lines += [f"{operation:<16} {what}" for operation, what in doctor_lines().items()]
    try:
        lines.append(f"embedded         {embedded_gguf().name} is installed")
    except InputError as error:
        lines.append(f"embedded         {error}")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    images = f"PNG through {browser}" if browser and importlib.util.find_spec("kaleido") else "HTML only; PNG needs kaleido and Chromium or Chrome"
    lines.append(f"images           {images}")
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
