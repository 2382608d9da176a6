"""What a benchmark found: tables as text and as JSON, with the versions and the device that they were measured with."""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hydralens.errors import InputError
from hydralens.files import write_json, write_text

PACKAGES = ("hydralens", "torch", "triton", "fla-core", "flash-attn-4", "transformers")


class Report:
    """Tables whose rows are printed and written down as they come, so that a run that is killed leaves what it measured.

    Attributes:
        small: whether the shapes are those for a CPU.
        device, dtype: of everything that is measured: bfloat16 on a GPU, float32 on a CPU.
    """

    def __init__(self, name: str, out: Path | None, small: bool):
        if not small and not torch.cuda.is_available():
            raise InputError(f"benchmark {name} needs an NVIDIA GPU, and torch sees none; --small runs smaller shapes on a CPU")
        self.name, self.out, self.small = name, out, small
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.result: dict[str, Any] = {"benchmark": name, "small": small, "machine": machine(self.device), "tables": {}, "notes": []}
        self.table, self.widths = "", []
        self._say(", ".join(f"{key} {value}" for key, value in self.result["machine"].items()))

    def row(self, table: str, **values: Any) -> None:
        """A line of ``table``; all lines of a table have the same columns. Floats are shown with three digits, and whole in the JSON."""
        cells = [_shown(value) for value in values.values()]
        self.result["tables"].setdefault(table, []).append(values)
        if table != self.table:
            self.table, self.widths = table, [max(len(key), len(cell), 8) for key, cell in zip(values, cells, strict=True)]
            self._say(f"\n{table}\n\n{self._line(list(values))}\n{self._line(['-' * width for width in self.widths])}")
        self._say(self._line(cells))

    def note(self, text: str) -> None:
        """A finding, or why something was not measured."""
        self.result["notes"].append(text)
        self.table = ""
        self._say(f"\n{text}")

    def _line(self, cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, self.widths, strict=True)) + " |"

    def _say(self, text: str) -> None:
        print(text, flush=True)
        if self.out is not None:
            write_json(self.out / f"{self.name}.json", self.result)
            write_text(self.out / f"{self.name}.md", self.markdown())

    def markdown(self) -> str:
        """Everything so far, each table in one piece."""
        parts = [", ".join(f"{key} {value}" for key, value in self.result["machine"].items()), *self.result["notes"]]
        for name, rows in self.result["tables"].items():
            lines = [list(rows[0]), ["---"] * len(rows[0]), *([_shown(value) for value in row.values()] for row in rows)]
            parts.append(f"### {name}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
        return "\n\n".join(parts) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value)


def machine(device: torch.device) -> dict[str, str]:
    """Versions and the device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "python": platform.python_version()} | {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
