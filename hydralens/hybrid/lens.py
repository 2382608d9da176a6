"""A hybrid as the patching engine sees it: z of every head, full or linear, at the fusion's input."""

from dataclasses import dataclass, field
from typing import Any, NoReturn

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydralens.errors import InputError
from hydralens.hybrid.branches import Tokens
from hydralens.hybrid.cache import HybridLayer
from hydralens.models.anatomy import NO_SOFTMAX, Anatomy


@dataclass(frozen=True, eq=False)
class HybridSites:
    """What ``hydralens.models.anatomy.Layer`` is for a softmax model; the modules are the hybrid's own.

    Its linear heads have no keys that a query looks up, so what reads q, k or v is refused by name.
    """

    attention_norm: nn.Module
    attention: nn.Module
    mlp_norm: nn.Module
    mlp: nn.Module
    rope_kind: None = field(default=None, init=False)

    @property
    def z_input(self) -> nn.Module:
        return self.attention.z

    def mix(
        self, residual: Float[Tensor, "batch pos d_model"], tokens: Tokens, behind: HybridLayer | None = None
    ) -> tuple[Float[Tensor, "batch pos head d_head"], dict[str, HybridLayer]]:
        """z, and the memory of these positions and of everything behind them."""
        memory = HybridLayer() if behind is None else behind.continued(len(residual))
        return self.attention.mix(self.attention_norm(residual), tokens, memory), {"memory": memory}

    def write(self, z: Float[Tensor, "batch pos head d_head"], residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What attention adds to the residual stream: z through fusion, gates (which read ``residual``) and output projection."""
        return self.attention.write(z, self.attention_norm(residual))

    def feed(self, residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        return residual + self.mlp(self.mlp_norm(residual))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(NO_SOFTMAX.format(name))


def hybrid_anatomy(hf: PreTrainedModel) -> Anatomy:
    """Where everything is in a ``HydraHeadForCausalLM``."""
    config, decoder = hf.config, hf.model

    def rope(x: Tensor, positions: Int[Tensor, "pos"]) -> dict[None, Any]:
        return {None: Tokens(positions[None], decoder.rotary_emb(x, positions[None]), None, None, None)}

    return Anatomy(
        family=config.model_type,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        d_model=config.hidden_size,
        layers=tuple(HybridSites(block.input_layernorm, block.self_attn, block.post_attention_layernorm, block.mlp) for block in decoder.layers),
        embed=lambda tokens, positions: decoder.embed_tokens(tokens),
        rope=rope,
        final_norm=decoder.norm,
        unembed=hf.lm_head,
        final_softcap=None,
        bypassed=(hf, decoder, *decoder.layers, *(block.self_attn for block in decoder.layers)),
        past=("memory",),
    )
