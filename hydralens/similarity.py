"""How alike layers are, and how alike heads are: cosine similarities averaged over tokens (HydraHead section 2, Fig. 2)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from hydralens.errors import InputError
from hydralens.files import write_atomically
from hydralens.models.anatomy import Anatomy
from hydralens.models.forward import Trace, trace
from hydralens.models.lens import LensModel
from hydralens.probes.base import Probe

VALUES_AT_ONCE = 2**24  # vector entries compared at a time (64 MiB in float32)


@dataclass(frozen=True, eq=False)
class Similarity:
    """A square similarity matrix with its labels.

    Attributes:
        matrix: float32 ``[item, item]``, symmetric, in -1..1.
        labels: ``L0``, ``L1``.. for layers, ``L0H0``, ``L0H1``.. for heads, in the matrix's order.
        kind: ``"layer"`` or ``"head"``.
        metric: which vectors were compared, for a person.
        n_tokens: tokens the cosines were averaged over.
    """

    matrix: Float[Tensor, "item item"]
    labels: list[str]
    kind: str
    metric: str
    n_tokens: int

    @property
    def layers(self) -> Int[Tensor, "item"]:
        """The layer of each row."""
        return torch.tensor([int(label[1:].split("H")[0]) for label in self.labels])

    @property
    def mean_within_layer(self) -> float:
        """Mean over pairs of different heads of the same layer; NaN for a matrix of layers, which has no such pairs."""
        same = self.layers[:, None] == self.layers
        return float(self.matrix[same & ~torch.eye(len(same), dtype=torch.bool)].mean())

    @property
    def mean_between_layers(self) -> float:
        """Mean over pairs from different layers."""
        return float(self.matrix[self.layers[:, None] != self.layers].mean())

    def to_frame(self) -> pd.DataFrame:
        """The matrix with its labels as index and columns."""
        return pd.DataFrame(self.matrix.numpy(), index=self.labels, columns=self.labels)

    def save_csv(self, path: str | Path) -> Path:
        """Write ``to_frame`` with six significant digits, whole or not at all."""
        return write_atomically(path, lambda temporary: self.to_frame().to_csv(temporary, float_format="%.6g"))


def layer_similarity(model: LensModel, prompts: Sequence[Probe] | Sequence[str], *, tokens_per_prompt: int = 1024) -> Similarity:
    """Cosine between layer outputs at the same token, averaged over tokens (HydraHead Fig. 2b).

    A layer's output is the residual stream after it. Memory does not grow with the number of prompts.

    Args:
        prompts: probes, whose clean prompts are used, or texts.
        tokens_per_prompt: longer prompts are read in full and compared at this many evenly spaced tokens.

    Raises:
        InputError: there are no prompts, a text is empty, or texts were given to a model without tokenizer.
    """

    def outputs(run: Trace, tokens: slice) -> Float[Tensor, "token layer d_model"]:
        return torch.stack([residual[0, tokens] for residual in (*run.residual[1:], run.final)], 1)

    labels = [f"L{layer}" for layer in range(model.anatomy.n_layers)]
    matrix, n_tokens = _mean_cosine(model, prompts, tokens_per_prompt, ("residual",), outputs, len(labels), model.anatomy.d_model)
    return Similarity(matrix, labels, "layer", "cosine of layer outputs", n_tokens)


def head_similarity(model: LensModel, prompts: Sequence[Probe] | Sequence[str], *, of: str = "write", tokens_per_prompt: int = 1024) -> Similarity:
    """Cosine between heads at the same token, averaged over tokens (the head-wise counterpart of HydraHead Fig. 2b).

    Args:
        prompts: probes, whose clean prompts are used, or texts.
        of: ``"write"`` compares what heads add to the residual stream: z through the head's slice of the output projection,
            without bias and before any post-norm. All layers share that basis. ``"z"`` compares the inputs of the output
            projection, whose basis each head has to itself: only a chance agreement of bases makes it large.
        tokens_per_prompt: longer prompts are read in full and compared at this many evenly spaced tokens.

    Raises:
        InputError: ``of`` is something else, there are no prompts, a text is empty, or texts were given to a model without tokenizer.
    """
    if of not in ("write", "z"):
        raise InputError(f"of={of!r} is unknown; choose 'write' (contributions to the residual stream) or 'z' (inputs of the output projection)")
    anatomy = model.anatomy
    slices = _output_slices(anatomy) if of == "write" else None

    def heads(run: Trace, tokens: slice) -> Float[Tensor, "token item width"]:
        z = [layer[0, tokens] for layer in run.z]  # [token, head, d_head] each
        if slices is not None:
            z = [torch.einsum("thd,hdm->thm", own, weight) for own, weight in zip(z, slices, strict=True)]
        return torch.cat(z, 1)

    labels = [f"L{layer}H{head}" for layer in range(anatomy.n_layers) for head in range(anatomy.n_heads)]
    matrix, n_tokens = _mean_cosine(model, prompts, tokens_per_prompt, ("z",), heads, len(labels), anatomy.d_model if of == "write" else anatomy.head_dim)
    metric = "cosine of heads' contributions to the residual stream" if of == "write" else "cosine of heads' outputs z"
    return Similarity(matrix, labels, "head", metric, n_tokens)


def _output_slices(anatomy: Anatomy) -> list[Float[Tensor, "head d_head d_model"]]:
    """Each head's slice of the output projection: the module's answer to unit vectors minus its answer to zero.

    Asking the module works for every way of storing weights (Linear, transposed Conv1D, quantised, with an adapter).
    """
    slices = []
    with torch.no_grad():
        for layer in anatomy.layers:
            weight = layer.o.weight
            units = torch.eye(anatomy.n_heads * anatomy.head_dim, dtype=weight.dtype, device=weight.device)
            slices.append((layer.o(units) - layer.o(torch.zeros_like(units[:1]))).reshape(anatomy.n_heads, anatomy.head_dim, -1))
    return slices


@torch.no_grad()
def _mean_cosine(
    model: LensModel,
    prompts: Sequence[Probe] | Sequence[str],
    tokens_per_prompt: int,
    keep: tuple[str, ...],
    vectors: Callable[[Trace, slice], Float[Tensor, "token item width"]],
    n_items: int,
    width: int,
) -> tuple[Float[Tensor, "item item"], int]:
    total, n_tokens = torch.zeros(n_items, n_items, dtype=torch.float64), 0
    block = max(1, VALUES_AT_ONCE // (n_items * width))
    for ids in _token_rows(model, prompts):
        columns = torch.linspace(0, len(ids) - 1, min(len(ids), tokens_per_prompt)).round().long()
        run = trace(model.anatomy, ids[None].to(model.device), columns.to(model.device), keep=keep)
        for start in range(0, len(columns), block):
            compared = vectors(run, slice(start, start + block))
            unit = F.normalize(compared.float(), dim=-1).transpose(0, 1).flatten(1)  # [item, token * width]: one product sums over tokens
            total += (unit @ unit.T).cpu()
        n_tokens += len(columns)
    return (total / n_tokens).float(), n_tokens


def _token_rows(model: LensModel, prompts: Sequence[Probe] | Sequence[str]) -> Iterator[Int[Tensor, "pos"]]:
    """The real tokens of every prompt."""
    prompts = [prompts] if isinstance(prompts, str | Probe) else prompts
    if len(prompts) == 0:
        raise InputError("similarity needs at least one prompt; pass probes or texts")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, Probe):
            yield from (ids[mask] for ids, mask in zip(prompt.clean, prompt.attention_mask.bool(), strict=True))
            continue
        if model.tokenizer is None:
            raise InputError("similarity over texts needs a tokenizer; load the model with one or pass probes")
        ids = torch.tensor(model.tokenizer(prompt)["input_ids"], dtype=torch.long)
        if len(ids) == 0:
            raise InputError(f"text {index} is empty; give every text at least one token")
        yield ids
