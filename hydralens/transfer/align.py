"""Stage 1: attention alone learns to give what the base model's gives, on the base model's own inputs (HydraHead Eq. 15).

One forward of the teacher aligns all layers, each with a backward pass of its own. ``shared`` trains every head twice, as a full head
and as a linear one, and a mask then picks: heads meet only in the output projection, so that the error of a head is its own.
"""

from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from hydralens.errors import InputError
from hydralens.hybrid.branches import Branch, FullHeads, Tokens
from hydralens.hybrid.modeling import HybridAttention, HydraHeadForCausalLM
from hydralens.models.lens import LensModel
from hydralens.ranks import Ranks
from hydralens.transfer.config import AlignPart
from hydralens.transfer.rows import Batch, Rows
from hydralens.transfer.teacher import teach

MEASURED = 16  # rows, at most, on which the teacher's size and the heads' errors are measured
SILENT = 1e-9  # of the largest size: what writes less is taken to write that much, so that errors relative to it are finite
WHOLE = ("q_norm", "k_norm", "down_proj")  # parameters of a branch that its heads share


class LayerAligner(nn.Module):
    """The squared error of a layer's attention output, summed over tokens."""

    def __init__(self, attention: HybridAttention):
        super().__init__()
        self.attention = attention

    def forward(self, x: Float[Tensor, "1 pos d_model"], tokens: Tokens, z: Tensor, written: Float[Tensor, "1 pos d_model"]) -> Float[Tensor, "1"]:
        return torch.stack([(self.attention(x, tokens, None).float() - written.float()).square().sum()])


class HeadAligner(nn.Module):
    """The squared error that each head's output makes in the residual stream, summed over tokens: |W_O^h (z_student - z_teacher)|^2."""

    def __init__(self, attention: HybridAttention):
        super().__init__()
        self.attention = attention
        n_heads, head_dim = len(attention.place), attention.o_proj.in_features // len(attention.place)
        weight = attention.o_proj.weight.detach().float().unflatten(1, (n_heads, head_dim))
        self.register_buffer("gram", torch.einsum("mhd,mhe->hde", weight, weight), persistent=False)
        attention.o_proj.requires_grad_(False)

    def forward(self, x: Float[Tensor, "1 pos d_model"], tokens: Tokens, z: Float[Tensor, "1 pos head d_head"], written: Tensor) -> Float[Tensor, "head"]:
        off = self.attention.fuse(self.attention.mix(x, tokens, None), x).float() - z.float()
        return head_energy(off, self.gram)


def head_energy(z: Float[Tensor, "1 pos head d_head"], gram: Float[Tensor, "head d_head d_head"]) -> Float[Tensor, "head"]:
    """|W_O^h z|^2 of every head, summed over tokens."""
    return (torch.einsum("bphd,hde->bphe", z, gram) * z).sum((0, 1, 3))


class Aligners(nn.Module):
    """All layers of one or more hybrids of the same base model."""

    def __init__(self, hybrids: Sequence[HydraHeadForCausalLM], per_head: bool, ranks: Ranks):
        super().__init__()
        kind = HeadAligner if per_head else LayerAligner
        self.per_head = per_head
        for hybrid in hybrids:
            hybrid.requires_grad_(False)
            for block in hybrid.model.layers:
                block.self_attn.requires_grad_(True)
        self.of = nn.ModuleList(nn.ModuleList(kind(block.self_attn) for block in hybrid.model.layers) for hybrid in hybrids)
        self.hybrids = list(hybrids)
        for aligner in self.each():
            fully_shard(aligner, mesh=ranks.mesh)

    def each(self) -> list[nn.Module]:
        return [aligner for own in self.of for aligner in own]

    def sizes(self, teacher: LensModel, batch: Batch) -> Float[Tensor, "layer item"]:
        """How much the teacher's heads (or layers) write, per token: what errors are relative to."""
        sizes: list[Tensor] = []

        def visit(index: int, x: Tensor, z: Tensor, written: Tensor) -> None:
            own = head_energy(z.float(), self.of[0][index].gram) if self.per_head else written.float().square().sum()[None]
            sizes.append(own / batch.tokens.shape[1])

        teach(teacher, batch, visit)
        found = torch.stack(sizes)
        return found.clamp(min=SILENT * float(found.max()))

    def errors(self, teacher: LensModel, batch: Batch, scale: Float[Tensor, "layer"] | None) -> Float[Tensor, "hybrid layer item"]:
        """Squared errors summed over tokens; with ``scale``, each layer's sum times its scale is propagated back at once."""
        found: list[list[Tensor]] = [[] for _ in self.of]
        # What a layer is told about tokens does not depend on the layer or the hybrid.
        decoder = self.hybrids[0].model
        tokens = None

        def visit(index: int, x: Tensor, z: Tensor, written: Tensor) -> None:
            nonlocal tokens
            x = x.float()
            tokens = decoder.tokens(x, cu_seqlens=batch.cu_seqlens) if tokens is None else tokens
            for own, kept in zip(self.of, found, strict=True):
                with torch.set_grad_enabled(scale is not None), torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                    error = own[index](x, tokens, z, written)
                    if scale is not None:
                        (error.sum() * scale[index]).backward()
                kept.append(error.detach())

        teach(teacher, batch, visit)
        return torch.stack([torch.stack(own) for own in found])


def aligned(aligners: Aligners, teacher: LensModel, rows: Rows, part: AlignPart, ranks: Ranks):
    """The stage's ``run`` and ``weigh`` for ``loop.train``.

    The loss is the mean over layers and hybrids of the squared error relative to what the teacher's layer writes.
    """
    measured = rows.batch(0, min(part.rows, MEASURED)).to(ranks.device)
    size = aligners.sizes(teacher, measured).sum(1)
    n_sums = size.numel() * len(aligners.of)

    def run(batch: Batch, scale: Tensor) -> dict[str, Tensor]:
        errors = aligners.errors(teacher, batch, scale / size / n_sums)
        relative = errors.sum(2) / size
        return {"loss": relative.mean(), "layers": relative.mean(0)}

    return run, lambda batch: torch.tensor(float(batch.tokens.numel()), device=ranks.device)


def head_errors(aligners: Aligners, teacher: LensModel, rows: Rows, names: Sequence[str], ranks: Ranks) -> pd.DataFrame:
    """Columns layer, head and one for each hybrid: squared error of a head's contribution relative to its size, on rows that were not trained on."""
    batch = rows.batch(0, min(MEASURED, rows.per_epoch)).to(ranks.device)
    size = aligners.sizes(teacher, batch) * batch.tokens.shape[1]
    relative = (aligners.errors(teacher, batch, None) / size).cpu()
    layers, heads = torch.meshgrid(*map(torch.arange, relative.shape[1:]), indexing="ij")
    return pd.DataFrame(
        {"layer": layers.flatten(), "head": heads.flatten()} | {name: own.flatten().tolist() for name, own in zip(names, relative, strict=True)}
    )


@torch.no_grad()
def pick(hybrid: HydraHeadForCausalLM, banks: dict[str, HydraHeadForCausalLM]) -> None:
    """Every head of ``hybrid`` becomes the bank's head of its kind; ``banks``: kind -> a hybrid whose heads are all of that kind.

    Raises:
        InputError: there is no bank of a kind.
    """
    for index, block in enumerate(hybrid.model.layers):
        for kind, branch in block.self_attn.branches.items():
            if kind not in banks:
                raise InputError(f"there is no bank of {kind!r} heads; it has {', '.join(banks)}")
            source = banks[kind].model.layers[index].self_attn
            _take(branch, source.branches[kind])
            if block.self_attn.fusion is not None:
                block.self_attn.fusion.gamma[branch.heads] = source.fusion.gamma[branch.heads]


def _take(own: Branch, bank: Branch) -> None:
    for name, parameter in own.named_parameters():
        source = bank.get_parameter(name)
        part = name.split(".")[0]
        if part in WHOLE:
            parameter.copy_(source)
            continue
        kept, every = (own.kv_heads, bank.kv_heads) if part in ("k_proj", "v_proj") and isinstance(own, FullHeads) else (own.heads, bank.heads)
        rows = source.unflatten(0, (len(every), -1))
        parameter.copy_(rows[[every.index(head) for head in kept]].flatten(0, 1))


def every_head(hybrid: HydraHeadForCausalLM) -> tuple[Bool[Tensor, "layer head"], set[str]]:
    """Where the full heads are, and which other kinds there are."""
    kinds = hybrid.config.kinds
    return torch.tensor([[kind == "full" for kind in row] for row in kinds]), {kind for row in kinds for kind in row} - {"full"}
