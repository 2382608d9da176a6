"""The TOML of a transfer: every choice a field, with defaults from HydraHead and from HALO, the recipe whose budget it shares."""

import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hydralens.errors import InputError
from hydralens.files import read_text


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelPart(_Part):
    """Which model becomes which hybrid.

    Attributes:
        base: anything that ``load_model`` opens.
        mask: a ``head_mask.json`` of it; none for a recipe of whole layers.
        recipe: see ``build_hybrid``.
        choices: fields of ``HydraHeadConfig``.
    """

    base: str = "embedded"
    mask: Path | None = None
    recipe: str = "hydrahead"
    choices: dict[str, Any] = {}


class DataPart(_Part):
    """What is read; exactly one of the first three.

    Attributes:
        text: a file or folder of .txt, .md, .jsonl, .jsonl.gz or .parquet.
        hub: a dataset of the hub, of which ``max_tokens`` are streamed.
        sampled_tokens: no data: so many tokens sampled from the base model itself.
        column: of JSON lines, parquet and hub rows.
        subset, revision: the hub dataset's configuration, and its branch, tag or commit.
        max_tokens: read of the hub dataset.
        synthetic: share of rows that are retrieval prompts; such rows need 128 tokens.
        answer_weight: of an answer's tokens in the loss; all others count 1.
        held_out: share of the tokens, the last ones, that is kept for measuring.
    """

    text: Path | None = None
    hub: str | None = None
    sampled_tokens: int | None = Field(default=None, ge=1)
    column: str = "text"
    subset: str | None = None
    revision: str | None = None
    max_tokens: int = Field(default=1_000_000_000, ge=1)
    synthetic: float = Field(default=0.2, ge=0, le=1)
    answer_weight: float = Field(default=10.0, gt=0)
    held_out: float = Field(default=0.02, gt=0, lt=1)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("text", "hub", "sampled_tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of text, hub and sampled_tokens, got {' and '.join(given) or 'none'}")
        return self


class Stage(_Part):
    """What all stages have in common.

    Attributes:
        tokens: to train on, all ranks together.
        length: tokens a row.
        rows: rows a step, all ranks together.
        micro_rows: rows that one rank runs at once; default: all of its own.
        lr, final_lr: at the end of the warm-up, and of the cosine after it.
        warmup: steps.
        fresh_lr: times this for gates and gamma, which no pretrained model has.
        clip: largest norm of the gradient.
        checkpoint_every: steps.
    """

    tokens: int = Field(ge=1)
    length: int = Field(default=512, ge=2)
    rows: int = Field(ge=1)
    micro_rows: int | None = Field(default=None, ge=1)
    lr: float = Field(gt=0)
    final_lr: float = Field(ge=0)
    warmup: int = Field(default=50, ge=0)
    fresh_lr: float = Field(default=1.0, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)
    checkpoint_every: int = Field(default=500, ge=1)

    @property
    def steps(self) -> int:
        return max(1, self.tokens // (self.rows * self.length))


class AlignPart(Stage):
    """Stage 1 (Eq. 15): attention alone learns to give what the base model's gives on the base model's own inputs.

    Attributes:
        shared: train every head once as a full and once as a linear head and let the mask pick from both: comparable for all masks, and it measures what
            each head loses either way. False: the paper's, the layer's whole output of this very hybrid.
        bank: a folder ``align`` of an earlier shared run of the same base model and choices; its heads are taken and nothing is trained.
    """

    tokens: int = Field(default=320_000_000, ge=1)
    rows: int = Field(default=32, ge=1)
    lr: float = Field(default=1e-3, gt=0)
    final_lr: float = Field(default=1e-5, ge=0)
    shared: bool = True
    bank: Path | None = None


class LearnPart(Stage):
    """Stages 2 (Eq. 16) and 3: all weights learn, from the base model's logits and from the text.

    Attributes:
        kl, cross_entropy: what each of the two losses counts.
        temperature: of the KL.
        recompute: keep no activations within layers, for long rows.
    """

    kl: float = Field(default=1.0, ge=0)
    cross_entropy: float = Field(default=0.0, ge=0)
    temperature: float = Field(default=1.0, gt=0)
    recompute: bool = False

    @model_validator(mode="after")
    def _some_loss(self) -> Self:
        if not self.kl and not self.cross_entropy:
            raise ValueError("kl and cross_entropy are both 0; at least one must count")
        return self


class DistilPart(LearnPart):
    tokens: int = Field(default=1_000_000_000, ge=1)
    rows: int = Field(default=96, ge=1)
    lr: float = Field(default=1e-4, gt=0)
    final_lr: float = Field(default=1e-5, ge=0)


class FinetunePart(LearnPart):
    tokens: int = Field(default=1_000_000_000, ge=1)
    length: int = Field(default=16_384, ge=2)
    rows: int = Field(default=128, ge=1)
    lr: float = Field(default=1e-5, gt=0)
    final_lr: float = Field(default=1e-5, ge=0)
    kl: float = Field(default=0.0, ge=0)
    cross_entropy: float = Field(default=1.0, ge=0)
    recompute: bool = True


class TransferConfig(_Part):
    """A whole transfer; a stage that is not there is not run.

    Attributes:
        out: the folder of everything that is written.
        device, dtype: as in ``load_model``, of the teacher; the student's weights are float32, its products bfloat16 on a GPU.
        tensorboard: also write TensorBoard's files.
    """

    out: Path
    model: ModelPart = ModelPart()
    data: DataPart
    align: AlignPart | None = None
    distil: DistilPart | None = None
    finetune: FinetunePart | None = None
    seed: int = Field(default=0, ge=0)
    device: str | None = None
    dtype: str | None = None
    tensorboard: bool = False

    @model_validator(mode="after")
    def _some_stage(self) -> Self:
        if not (self.align or self.distil or self.finetune):
            raise ValueError("no stage: give [align], [distil] or [finetune]")
        return self


def read_config(path: str | Path) -> TransferConfig:
    """A TOML file; paths in it are relative to the working directory.

    Raises:
        InputError: it cannot be read, is not TOML, or a field is unknown, missing or out of range; names the field.
    """
    try:
        values = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: is not TOML: {error}") from None
    try:
        return TransferConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        got = "" if first["type"] in ("missing", "value_error") else f", got {first['input']!r}"
        raise InputError(f"{path}: {where + ': ' if where else ''}{said}{got}") from None
