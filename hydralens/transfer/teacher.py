"""The base model on packed rows: what its layers read and give, and its last hidden states."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface

from hydralens.hybrid.backends import attend_packed
from hydralens.models.lens import LensModel
from hydralens.transfer.rows import Batch

# What a layer's attention reads (after the norm), every head's output z, and what attention adds to the residual stream.
Visit = Callable[[int, Float[Tensor, "1 pos d_model"], Float[Tensor, "1 pos head d_head"], Float[Tensor, "1 pos d_model"]], None]


def _packed(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: None, scaling: float, cu_seq_lens_q: Tensor, sliding_window: int | None = None, **_: Any
) -> tuple[Tensor, None]:
    return attend_packed(q, k, v, cu_seq_lens_q, scale=scaling, window=sliding_window), None


AttentionInterface.register("hydralens_packed", _packed)


@torch.no_grad()
def teach(teacher: LensModel, batch: Batch, visit: Visit | None = None) -> Float[Tensor, "pos d_model"]:
    """The normed hidden states after the last layer; ``visit`` is called for every layer on the way, so that nothing of it need be kept."""
    hf = teacher.hf
    before = hf.config._attn_implementation
    with ExitStack() as stack:
        if visit is not None:
            for index, block in enumerate(hf.model.layers):
                _watch(stack, index, block.self_attn, teacher.info.n_heads, visit)
        stack.callback(setattr, hf.config, "_attn_implementation", before)
        hf.config._attn_implementation = "hydralens_packed"
        out = hf.model(input_ids=batch.tokens, position_ids=batch.position_ids, cu_seq_lens_q=batch.cu_seqlens, use_cache=False)
    return out.last_hidden_state[0]


def _watch(stack: ExitStack, index: int, attention: nn.Module, n_heads: int, visit: Visit) -> None:
    read: list[Tensor] = []

    def reads(_: nn.Module, args: tuple[Tensor]) -> None:
        read[:] = args

    def gives(_: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        visit(index, read[0], args[0].unflatten(-1, (n_heads, -1)), out)

    stack.callback(attention.q_proj.register_forward_pre_hook(reads).remove)
    stack.callback(attention.o_proj.register_forward_hook(gives).remove)
