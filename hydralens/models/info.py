"""Which model a result belongs to: the identity and shape that every file of the project carries."""

from pydantic import BaseModel, ConfigDict, Field


class ModelInfo(BaseModel):
    """Identity and attention shape of a model, as written into ``run.json`` and ``head_mask.json``.

    ``fingerprint`` is a digest of the weights, so that a mask made for one checkpoint is not applied to another of the
    same shape; ``revision`` is the hub revision or ``None``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str
    revision: str | None
    fingerprint: str
    n_layers: int = Field(ge=1)
    n_heads: int = Field(ge=1)
    n_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)

    @property
    def group(self) -> int:
        """Query heads per KV head: query head ``h`` reads KV head ``h // group``."""
        return self.n_heads // self.n_kv_heads
