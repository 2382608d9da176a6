"""A probe as data: counterfactual pairs of prompts, what is asked of them and where the answer is read."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hydralens.errors import InputError
from hydralens.probes import show

PAD_LABEL = -100  # fills answer, foil and read_positions of pairs whose answer is shorter than the longest


@dataclass(frozen=True, eq=False)
class Probe:
    """Counterfactual pairs that test one capability (HydraHead; clean/corrupt = ARENA's orig/new, pyvene's base/source).

    The answer is teacher-forced: ``clean`` and ``corrupt`` both end in the prompt plus the clean answer without its last
    token, so that every answer token has a read position and both runs have the same tokens there.

    Attributes:
        name: which probe, e.g. ``"niah_single_1"``.
        capability: ``"retrieval"`` or ``"reasoning"``; scores are combined per capability.
        corruption: what ``corrupt`` changes: ``"value"``, ``"key"`` or ``"swap"``.
        seed: the seed that made it.
        clean, corrupt: int64 token ids ``[pair, pos]``, padded on either side.
        attention_mask: ``[pair, pos]``, 1 on real tokens; shared by clean and corrupt.
        answer, foil: int64 ``[pair, n]``, the answer's and the counterfactual answer's tokens, padded with -100.
        read_positions: int64 ``[pair, n]``, columns of ``clean`` whose logits predict the answer tokens (-100 where padded).
        needle_span: int64 ``[pair, 2]``, first column of the needle and one past its last.
        tokenizer: used to show the probe to a person; token ids are shown without it.
    """

    name: str
    capability: str
    corruption: str
    seed: int
    clean: Int[Tensor, "pair pos"]
    corrupt: Int[Tensor, "pair pos"]
    attention_mask: Int[Tensor, "pair pos"]
    answer: Int[Tensor, "pair n"]
    foil: Int[Tensor, "pair n"]
    read_positions: Int[Tensor, "pair n"]
    needle_span: Int[Tensor, "pair 2"]
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if self.clean.ndim != 2 or self.clean.shape != self.corrupt.shape:
            raise InputError(
                f"probe {self.name}: clean has shape {tuple(self.clean.shape)} and corrupt {tuple(self.corrupt.shape)}; "
                "both must be [pair, pos] with the same number of tokens, so change only words of equal token count"
            )
        pairs, n = self.clean.shape[0], self.answer.shape[-1]
        expected = {
            "attention_mask": tuple(self.clean.shape),
            "answer": (pairs, n),
            "foil": (pairs, n),
            "read_positions": (pairs, n),
            "needle_span": (pairs, 2),
        }
        for field, shape in expected.items():
            if tuple(getattr(self, field).shape) != shape:
                raise InputError(f"probe {self.name}: {field} has shape {tuple(getattr(self, field).shape)}, expected {shape}")
        if pairs == 0:
            raise InputError(f"probe {self.name} has no pairs; ask for at least one")
        if bool((self.answer[:, 0] == self.foil[:, 0]).any()):
            pair = int((self.answer[:, 0] == self.foil[:, 0]).nonzero()[0])
            raise InputError(
                f"probe {self.name}, pair {pair}: answer and counterfactual answer share their first token "
                f"({self._show(self.answer[pair])} and {self._show(self.foil[pair])}); move the shared token into the prompt or choose other words"
            )
        if bool(((self.answer == PAD_LABEL) != (self.foil == PAD_LABEL)).any()):
            raise InputError(f"probe {self.name}: answer and counterfactual answer have different token counts; choose answers of equal token count")
        read = self.read_positions[self.scored]
        if bool((read < 0).any()) or bool((read >= self.clean.shape[1]).any()):
            raise InputError(f"probe {self.name}: read_positions must lie in 0..{self.clean.shape[1] - 1}")
        if not bool(self.attention_mask.bool().gather(1, self.read_positions.clamp(min=0))[self.scored].all()):
            raise InputError(f"probe {self.name}: a read position lies on padding")

    @property
    def label(self) -> str:
        """``name/corruption``, by which results call the probe."""
        return f"{self.name}/{self.corruption}"

    @property
    def n_pairs(self) -> int:
        return self.clean.shape[0]

    @property
    def n_tokens(self) -> int:
        """Real tokens of the longest prompt."""
        return int(self.attention_mask.sum(1).max())

    @property
    def scored(self) -> Bool[Tensor, "pair n"]:
        """True where ``answer`` holds a token."""
        return self.answer != PAD_LABEL

    def select(self, pairs: Tensor | list[int]) -> "Probe":
        """The same probe with only the given pairs (indices or a boolean mask)."""
        pairs = torch.as_tensor(pairs)
        rows = ("clean", "corrupt", "attention_mask", "answer", "foil", "read_positions", "needle_span")
        return replace(self, **{row: getattr(self, row)[pairs] for row in rows})

    def text(self, pair: int = 0, *, color: bool = False, elide: bool = False) -> str:
        """One pair for a person: the prompt with ``«needle»``, what differs as ``[clean|corrupt]``, an arrow and the answer.

        Args:
            pair: which pair.
            color: mark with ANSI colours too.
            elide: shorten long unmarked stretches.

        Raises:
            InputError: there is no such pair.
        """
        if not 0 <= pair < self.n_pairs:
            raise InputError(f"probe {self.name} has pairs 0..{self.n_pairs - 1}, not {pair}")
        return show.as_text(self, pair, color, elide)

    def __str__(self) -> str:
        return f"{show.headline(self)}\n{self.text(0, elide=True)}"

    def __repr__(self) -> str:
        return f"Probe({show.headline(self)})"

    def _repr_html_(self) -> str:
        return show.as_html(self, 0)

    def _show(self, ids: Tensor) -> str:
        ids = [int(token) for token in ids if token != PAD_LABEL]
        return repr(self.tokenizer.decode(ids)) if self.tokenizer is not None else str(ids)
