"""One pair of prompts as an intervention takes it: unpadded, with the words for what is patched and where."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hydralens.errors import InputError
from hydralens.probes.base import Probe

COMPONENTS = ("z", "q", "k", "v")
DIRECTIONS = ("noise", "denoise")
POSITIONS = ("answer", "needle", "suffix", "all")


@dataclass(frozen=True, eq=False)
class Pair:
    """One pair of a probe without its padding; columns count from its first real token, and end with the last read position."""

    clean: Int[Tensor, "pos"]
    corrupt: Int[Tensor, "pos"]
    answer: Int[Tensor, "n"]
    foil: Int[Tensor, "n"]
    read: Int[Tensor, "n"]
    needle: tuple[int, int]

    @property
    def first_difference(self) -> int:
        """First column in which clean and corrupt differ; the last column if none does."""
        different = (self.clean != self.corrupt).nonzero()
        return min(int(different[0]), int(self.read.min())) if len(different) else int(self.read.min())

    def patched(self, positions: str) -> Bool[Tensor, "pos"]:
        """The columns a patch at ``positions`` touches."""
        columns = torch.arange(len(self.clean), device=self.clean.device)
        match positions:
            case "answer":
                return torch.isin(columns, self.read)
            case "needle":
                return (columns >= self.needle[0]) & (columns < self.needle[1])
            case "suffix":
                return columns >= self.first_difference
            case _:
                return torch.ones_like(columns, dtype=torch.bool)


def unpad(probe: Probe, index: int, device: torch.device) -> Pair:
    """Pair ``index`` of ``probe``; nothing after the last read position can matter to a causal model, so it is cut."""
    mask, scored = probe.attention_mask[index].bool(), probe.scored[index]
    column = mask.cumsum(0) - 1
    read = column[probe.read_positions[index][scored]]
    stop = int(read.max()) + 1
    start, end = probe.needle_span[index].tolist()
    to = {"device": device}
    return Pair(
        clean=probe.clean[index][mask][:stop].to(**to),
        corrupt=probe.corrupt[index][mask][:stop].to(**to),
        answer=probe.answer[index][scored].to(**to),
        foil=probe.foil[index][scored].to(**to),
        read=read.to(**to),
        needle=(int(column[start]), int(column[end - 1]) + 1),
    )


def check_heads(heads: Sequence[tuple[int, int]], n_layers: int, n_heads: int) -> None:
    """Refuse heads that do not exist.

    Raises:
        InputError: names the first head that is wrong and the range.
    """
    for layer, head in heads:
        if not (0 <= layer < n_layers and 0 <= head < n_heads):
            raise InputError(f"L{layer}H{head} does not exist: the model has layers 0..{n_layers - 1} and heads 0..{n_heads - 1}")


def chosen_heads(heads: Collection[tuple[int, int]] | None, n_layers: int, n_heads: int) -> list[tuple[int, int]]:
    """The given heads, each once and by layer; all there are where none are given.

    Raises:
        InputError: no head, or one that does not exist.
    """
    if heads is None:
        return list(np.ndindex(n_layers, n_heads))
    if not heads:
        raise InputError("heads is empty; give at least one (layer, head)")
    check_heads(list(heads), n_layers, n_heads)
    return sorted(set(heads))
