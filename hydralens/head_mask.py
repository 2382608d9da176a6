"""``head_mask.json``: which heads keep full attention, for which model, and how they were chosen.

``python -m hydralens.head_mask`` writes the published JSON schema (``head_mask.schema.json``, beside this file) anew.
"""

import json
import os
import re
from datetime import UTC, date, datetime
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
import transformers
from jaxtyping import Bool, Float
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import Tensor

from hydralens import __version__
from hydralens.errors import InputError
from hydralens.files import read_json, write_json, write_text
from hydralens.models.info import ModelInfo
from hydralens.models.lens import LensModel

SCHEMA_FILE = Path(__file__).with_name("head_mask.schema.json")
_RATIO = r"^[0-9]{1,9}(\.[0-9]{1,9})?:1$"
_ANEW = "correct it or write the file anew with `hydralens select`"


def parse_ratio(ratio: str) -> Fraction:
    """The r of ``"r:1"`` (linear heads per full-attention head), exactly.

    Raises:
        InputError: not of that form, or r is zero.
    """
    if not isinstance(ratio, str) or not re.fullmatch(_RATIO, ratio) or Fraction(ratio[:-2]) == 0:
        raise InputError(f"ratio {ratio!r} is not of the form r:1 (linear heads : full heads) with r above zero; write for example 7:1 or 2.5:1")
    return Fraction(ratio[:-2])


# --- the file's types ----------------------------------------------------------------------------------------------


def _bit(value: Any) -> int:
    if type(value) is not int or value not in (0, 1):
        raise InputError(f"must be 0 (linear attention) or 1 (full attention), not {value!r}; {_ANEW}")
    return value


def _version(value: Any) -> int:
    if type(value) is not int or value != 1:
        raise InputError(f"is {value!r}, but this version of hydralens reads schema_version 1; update hydralens or write the file anew")
    return value


def _iso_date(value: str) -> str:
    try:
        date.fromisoformat(value)
    except ValueError as error:
        raise InputError(f"{value!r} is no date; write YYYY-MM-DD") from error
    return value


def _six_digits(value: float) -> float:
    """Six significant digits: the object holds exactly what the file will, and a negative zero is a zero."""
    return float(f"{value:.6g}") + 0.0


Bit = Annotated[int, Field(ge=0, le=1), BeforeValidator(_bit)]
Score = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_six_digits)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Selection(_Strict):
    """How the heads were chosen: ``k`` of them, of which ``n_with_signal`` have a non-zero score (0 where scores are unknown)."""

    rule: str
    k: int = Field(ge=0)
    tie_break: str
    n_with_signal: int = Field(ge=0)


class ProbeEntry(_Strict):
    """One probe behind the scores."""

    name: str
    capability: str
    n_pairs: int = Field(ge=1)
    n_tokens: int = Field(ge=1)
    seed: int
    direction: str
    metric: str


class CreatedWith(_Strict):
    """Versions, and the day (UTC) as YYYY-MM-DD."""

    hydralens: str
    torch: str
    transformers: str
    date: Annotated[str, Field(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}$"), AfterValidator(_iso_date)]

    @classmethod
    def now(cls) -> Self:
        """The installed versions and today's date, or the day of ``SOURCE_DATE_EPOCH`` when that is set, so that a file can be made again to the byte."""
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is not None and not re.fullmatch("[0-9]{1,11}", epoch):
            raise InputError(f"SOURCE_DATE_EPOCH is {epoch!r}; set it to whole seconds since 1970 or unset it")
        day = datetime.now(UTC) if epoch is None else datetime.fromtimestamp(int(epoch), UTC)
        return cls(date=day.date().isoformat(), hydralens=__version__, torch=str(torch.__version__), transformers=transformers.__version__)


class HeadMask(_Strict):
    """Which heads keep full attention (1) and which become linear (0).

    Attributes:
        schema_version: 1.
        model: whose heads these are.
        space: ``"query"`` (a column is a query head) or ``"kv"`` (a column is a KV head, standing for its whole group).
        mask: ``[layer][head]``, 0 or 1.
        ratio: the requested ``"r:1"`` (linear : full), if one was.
        selection: the rule and how many heads it chose, in the mask's own space.
        scores: ``[layer][query head]`` whatever the space, to six significant digits; ``None`` where unknown.
        probes: what the scores were measured with.
        created_with: versions and date.

    Build one with ``HeadMask.of``, ``select_heads`` or ``HeadMask.load``: these refuse bad values with an ``InputError`` that names the field.
    """

    schema_version: Annotated[Literal[1], BeforeValidator(_version)]
    model: ModelInfo
    space: Literal["query", "kv"]
    mask: list[list[Bit]]
    ratio: Annotated[str, Field(pattern=_RATIO)] | None
    selection: Selection
    scores: list[list[Score]] | None
    probes: list[ProbeEntry]
    created_with: CreatedWith

    @field_validator("ratio")
    @classmethod
    def _positive(cls, ratio: str | None) -> str | None:
        if ratio is not None:
            parse_ratio(ratio)
        return ratio

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        model, selection = self.model, self.selection
        if model.n_heads % model.n_kv_heads:
            raise InputError(f"model.n_heads is {model.n_heads}, not a multiple of model.n_kv_heads {model.n_kv_heads}; {_ANEW}")
        for field, rows, columns in (("mask", self.mask, "n_heads" if self.space == "query" else "n_kv_heads"), ("scores", self.scores, "n_heads")):
            if rows is None:
                continue
            if len(rows) != model.n_layers:
                raise InputError(f"{field} has {len(rows)} rows, model.n_layers is {model.n_layers}; {_ANEW}")
            width = getattr(model, columns)
            for layer, row in enumerate(rows):
                if len(row) != width:
                    raise InputError(f"{field}[{layer}] has {len(row)} columns, model.{columns} is {width} (space is {self.space!r}); {_ANEW}")
        if selection.k != self.n_full:
            raise InputError(f"selection.k is {selection.k}, but mask has {self.n_full} ones; {_ANEW}")
        if self.scores is None and selection.n_with_signal > selection.k:
            raise InputError(f"selection.n_with_signal is {selection.n_with_signal}, more than selection.k {selection.k}; {_ANEW}")
        if self.scores is not None and selection.n_with_signal != (counted := _n_with_signal(self.array, torch.tensor(self.scores, dtype=torch.float64))):
            raise InputError(f"selection.n_with_signal is {selection.n_with_signal}, but {counted} chosen heads have a non-zero score; {_ANEW}")
        return self

    # --- making and reading ---

    @classmethod
    def of(
        cls,
        full: Bool[Tensor, "layer head"],
        model: ModelInfo,
        *,
        rule: str,
        tie_break: str = "none",
        space: Literal["query", "kv"] = "query",
        ratio: str | None = None,
        scores: Float[Tensor, "layer head"] | None = None,
        probes: list[dict] | None = None,
    ) -> Self:
        """A mask from an array, today's date and the installed versions.

        Args:
            full: True for heads that keep full attention, in ``space``.
            scores: ``[layer, query head]``; with a NaN in it (a head that could not be measured) no scores are stored, but those with signal are counted.

        Raises:
            InputError: a shape or a value does not fit ``model``; the line names the field and both values.
        """
        shapes = {
            "mask": (full, (model.n_layers, model.n_heads if space == "query" else model.n_kv_heads)),
            "scores": (scores, (model.n_layers, model.n_heads)),
        }
        for field, (array, shape) in shapes.items():
            if array is not None and array.shape != shape:
                raise InputError(f"{field} has shape {tuple(array.shape)}, the model needs {shape} (space is {space!r}); give one value per layer and head")
        stored = None if scores is None or bool(scores.isnan().any()) else scores.tolist()
        values = {
            "schema_version": 1,
            "model": model.model_dump(),
            "space": space,
            "mask": full.int().tolist(),
            "ratio": ratio,
            "selection": {"rule": rule, "k": int(full.sum()), "tie_break": tie_break, "n_with_signal": 0 if scores is None else _n_with_signal(full, scores)},
            "scores": stored,
            "probes": probes or [],
            "created_with": CreatedWith.now().model_dump(),
        }
        return cls._checked(values, "head mask")

    @classmethod
    def load(cls, path: str | Path, model: LensModel | ModelInfo | None = None) -> Self:
        """Read and check a file; with ``model``, also that it was made for that model.

        Raises:
            InputError: unreadable, not JSON, a key missing, unknown or twice, a wrong type, shape or value, or another model; names file and field.
        """
        values = read_json(path)
        if not isinstance(values, dict):
            raise InputError(f"{path}: holds a JSON {type(values).__name__}, not a head mask; other projects' files are read by `hydralens mask convert`")
        mask = cls._checked(values, path)
        if model is not None:
            mask.check_model(model, path)
        return mask

    @classmethod
    def _checked(cls, values: dict, source: str | Path) -> Self:
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{source}: {_explain(error)}") from error

    def check_model(self, model: LensModel | ModelInfo, source: str | Path = "head mask") -> None:
        """Pass if the mask was made for ``model``: same shape and same weights. Another id or revision of the same weights passes.

        Raises:
            InputError: names the field and both values.
        """
        info = model if isinstance(model, ModelInfo) else model.info
        for field in ("n_layers", "n_heads", "n_kv_heads", "head_dim", "fingerprint"):
            ours, theirs = getattr(self.model, field), getattr(info, field)
            if ours != theirs:
                raise InputError(
                    f"{source}: model.{field} is {ours}, but the model has {theirs}: the mask was made for {self.model.id!r}, not for {info.id!r}; "
                    "score and select on this model, or open the one the mask was made for"
                )

    # --- writing ---

    def to_text(self) -> str:
        """The file's text: keys in the schema's order, one row or probe a line, equal for equal masks."""
        fields = []
        for name, value in self.model_dump().items():
            if name in ("mask", "scores", "probes") and value:
                text = "[\n" + ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in value) + "\n  ]"
            else:
                text = json.dumps(value, ensure_ascii=False)
            fields.append(f'  "{name}": {text}')
        return "{\n" + ",\n".join(fields) + "\n}\n"

    def save(self, path: str | Path) -> Path:
        """Write the file, whole or not at all."""
        return write_text(path, self.to_text())

    # --- looking at it ---

    @property
    def array(self) -> Bool[Tensor, "layer head"]:
        """True where full attention is kept, in the mask's own space."""
        return torch.tensor(self.mask, dtype=torch.bool)

    @property
    def n_full(self) -> int:
        """Heads that keep full attention, in the mask's own space."""
        return sum(map(sum, self.mask))

    @property
    def kept_kv_heads(self) -> Bool[Tensor, "layer kv_head"]:
        """KV heads whose cache survives: those that any full-attention query head reads."""
        return self.array if self.space == "kv" else _groups(self.array, self.model.group).any(-1)

    @property
    def kv_share(self) -> float:
        """Share of the KV cache that survives, to be read beside the share of heads: scattered heads keep many KV heads alive."""
        return float(self.kept_kv_heads.double().mean())

    def kv_bytes(self, n_tokens: int, bytes_per_element: int = 2) -> int:
        """Bytes of the surviving KV cache (keys and values) of one sequence; linear heads' states are not counted."""
        return int(self.kept_kv_heads.sum()) * 2 * self.model.head_dim * n_tokens * bytes_per_element

    def __repr__(self) -> str:
        kept = self.kept_kv_heads
        return (
            f"HeadMask({self.model.id}: {self.n_full} of {self.array.numel()} {self.space} heads full by rule {self.selection.rule}, "
            f"{self.selection.n_with_signal} with signal; {int(kept.sum())} of {kept.numel()} KV heads survive)"
        )

    __str__ = __repr__

    # --- between query heads and KV heads ---

    def to_query(self) -> "HeadMask":
        """The same mask with one column per query head: a full KV head makes its whole group full."""
        if self.space == "query":
            return self
        return self._in_space("query", self.array.repeat_interleave(self.model.group, -1), f"{self.selection.rule}, KV heads repeated", self.ratio)

    def to_kv(self, group_reduce: Literal["any", "max", "mean"] = "any") -> "HeadMask":
        """The mask with one column per KV head.

        Args:
            group_reduce: what becomes of a group of query heads.
                ``"any"``: full if any of its heads is (no full head is lost; the mask grows).
                ``"mean"``: full if at least half of its heads are.
                ``"max"``: the share of full heads is kept: the ``n_full / group`` groups (halves up, at least one if any head is full) with the highest
                score of a single head; ties by lower layer, then lower head. Needs scores.

        Raises:
            InputError: unknown ``group_reduce``, or ``"max"`` on a mask without scores.
        """
        if self.space == "kv":
            return self
        group = self.model.group
        share = _groups(self.array, group).double().mean(-1)
        match group_reduce:
            case "any":
                full = share > 0
            case "mean":
                full = share >= 0.5
            case "max":
                if self.scores is None:
                    raise InputError("group_reduce 'max' ranks KV heads by score, but this mask has scores null; use 'any' or 'mean'")
                best = _groups(torch.tensor(self.scores, dtype=torch.float64), group).amax(-1).flatten()
                k = max((2 * self.n_full + group) // (2 * group), min(self.n_full, 1))
                full = torch.zeros(best.shape, dtype=torch.bool)
                full[best.argsort(descending=True, stable=True)[:k]] = True
                full = full.reshape(share.shape)
            case _:
                raise InputError(f"group_reduce {group_reduce!r} is unknown; use 'any', 'max' or 'mean'")
        return self._in_space("kv", full, f"{self.selection.rule}, groups reduced by {group_reduce}", None)

    def _in_space(self, space: Literal["query", "kv"], full: Bool[Tensor, "layer head"], rule: str, ratio: str | None) -> "HeadMask":
        scores = None if self.scores is None else torch.tensor(self.scores, dtype=torch.float64)
        probes = [probe.model_dump() for probe in self.probes]
        return HeadMask.of(full, self.model, rule=rule, tie_break=self.selection.tie_break, space=space, ratio=ratio, scores=scores, probes=probes)


# --- helpers -------------------------------------------------------------------------------------------------------


def _groups(heads: Tensor, group: int) -> Tensor:
    """``[layer, head]`` as ``[layer, kv_head, head in group]``."""
    return heads.unflatten(-1, (-1, group))


def _n_with_signal(full: Bool[Tensor, "layer head"], scores: Float[Tensor, "layer head"]) -> int:
    """Full heads with a non-zero score; a KV head has one if any query head of its group does."""
    signal = (scores != 0) & ~scores.isnan()
    return int((full & _groups(signal, signal.shape[-1] // full.shape[-1]).any(-1)).sum())


def _explain(error: ValidationError) -> str:
    """The first thing wrong, as ``field: what; how to mend it``."""
    first, *others = error.errors(include_url=False)
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    match first["type"]:
        case "missing":
            text = f"is missing; {_ANEW}"
        case "extra_forbidden":
            text = "is not a key of schema_version 1; remove it"
        case "value_error":
            text = str(first["ctx"]["error"])
        case _:
            text = f"{first['msg'][0].lower()}{first['msg'][1:]}, not {repr(first['input'])[:60]}; {_ANEW}"
    return (f"{field}: " if field else "") + text + (f" ({len(others)} more like this)" if others else "")


def schema() -> dict:
    """The published JSON schema: types, keys and single values. What ties fields together (shapes, ``k``) only the reader checks."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **HeadMask.model_json_schema()}


if __name__ == "__main__":
    print(write_json(SCHEMA_FILE, schema()))
