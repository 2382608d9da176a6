"""The engine's own forward: the model's modules in the model's order, with every site in reach."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hydralens.errors import InputError
from hydralens.models.anatomy import NO_SOFTMAX, Anatomy, Rope


@dataclass(eq=False)
class Trace:
    """What a run leaves behind; lists have one entry per layer.

    Residual, z, writes and q are kept at ``columns`` only, k and v at every position of the run. Columns count from the start
    of the prompt, k and v from the end of the run's prefix.
    """

    columns: Int[Tensor, "column"]
    ropes: dict[str | None, Rope | None]  # of the columns
    n_tokens: int  # of the prompt up to the end of this run
    residual: list[Float[Tensor, "batch column d_model"]] = field(default_factory=list)  # entering each layer
    z: list[Float[Tensor, "batch column head d_head"]] = field(default_factory=list)
    written: list[Float[Tensor, "batch column d_model"]] = field(default_factory=list)  # what attention adds to the residual stream
    q: list[Float[Tensor, "batch head column d_head"]] = field(default_factory=list)
    k: list[Float[Tensor, "batch kv_head pos d_head"]] = field(default_factory=list)
    v: list[Float[Tensor, "batch kv_head pos d_head"]] = field(default_factory=list)
    memory: list[Any] = field(default_factory=list)  # of a hybrid's layers: what positions after the run need of it
    final: Float[Tensor, "batch column d_model"] | None = None  # after the last layer

    def behind(self, layer: int) -> Any:
        """What attention of a layer needs of this run, to continue it."""
        return self.memory[layer] if self.memory else (self.k[layer], self.v[layer])


# Attention of one layer: (layer, q, k, v) -> z, with q [batch, head, pos, d_head] and z [batch, pos, head, d_head].
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def trace(
    anatomy: Anatomy,
    tokens: Int[Tensor, "batch pos"],
    columns: Int[Tensor, "column"],
    keep: Collection[str] = (),
    *,
    prefix: Trace | None = None,
    attention: Attention | None = None,
    start: tuple[int, Float[Tensor, "batch pos d_model"]] | None = None,
) -> Trace:
    """Run unpadded prompts of equal length and keep the named sites at ``columns``.

    Args:
        keep: any of ``residual``, ``z``, ``written``, ``q``, ``k``, ``v``; of a hybrid ``memory`` instead of the last three.
        prefix: a run of the tokens before ``tokens`` that kept ``anatomy.past``; all rows continue it, or each its own.
        attention: replaces the attention of layer ``l``: ``attention(l, q, k, v) -> z [batch, pos, head, d_head]``; not with ``prefix``.
        start: a layer and the residual stream entering it, of a run that is equal up to there; earlier layers are skipped.
    """
    n_before = 0 if prefix is None else prefix.n_tokens
    positions = torch.arange(n_before, n_before + tokens.shape[1], device=tokens.device)
    first, residual = start if start is not None else (0, anatomy.embed(tokens, positions))
    ropes = anatomy.rope(residual, positions)
    kept_at = columns - n_before
    run = Trace(columns, anatomy.rope(residual, columns) if len(columns) else {}, n_before + tokens.shape[1])
    for index in range(first, anatomy.n_layers):
        layer = anatomy.layers[index]
        if attention is None:
            z, made = layer.mix(residual, ropes[layer.rope_kind], None if prefix is None else prefix.behind(index))
        else:
            q, k, v = layer.project(residual, ropes[layer.rope_kind])
            z, made = attention(index, q, k, v), {"q": q, "k": k, "v": v}
        written = layer.write(z, residual)
        sites = {"residual": residual, "z": z, "written": written} | made
        for site in keep:
            if site not in sites:
                raise InputError(NO_SOFTMAX.format(site))
            at = (slice(None), kept_at) if site in ("residual", "z", "written") else (slice(None), slice(None), kept_at) if site == "q" else None
            getattr(run, site).append(sites[site] if at is None else sites[site][at])
        residual = layer.feed(residual + written)
    run.final = residual[:, kept_at]
    return run
