"""The hybrid as a transformers model: the base family's own embeddings, norms and MLPs around head-wise hybrid attention.

x -> branches (full heads | Gated DeltaNet heads) -> RMSNorm and gamma per head, gate -> original head order -> o_proj
"""

import importlib
import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from hydralens.errors import InputError
from hydralens.files import write_text
from hydralens.hybrid.backends import fusion_backend
from hydralens.hybrid.branches import Branch, FullHeads, Gate, GatedDeltaHeads, LinearHeads, Tokens, causal_mask, index
from hydralens.hybrid.cache import HybridCache, HybridLayer
from hydralens.hybrid.config import HydraHeadConfig
from hydralens.hybrid.lens import hybrid_anatomy
from hydralens.hybrid.rivals import RIVALS
from hydralens.models.anatomy import Anatomy

BRANCHES = {"full": FullHeads, "gdn": GatedDeltaHeads, **RIVALS}
PREFIX = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"  # renamed in transformers 5.24

REMOTE = "hydralens_hybrid"
REMOTE_CODE = '''"""Opens this folder through hydralens."""

try:
    from hydralens.hybrid import HydraHeadConfig, HydraHeadForCausalLM
except ImportError as error:
    raise ImportError("this model is a head-wise hybrid made with hydralens: pip install hydralens") from error

__all__ = ["HydraHeadConfig", "HydraHeadForCausalLM"]
'''


def base_class(config: HydraHeadConfig, part: str) -> type[nn.Module]:
    """The base family's own ``MLP``, ``RMSNorm``, ``RotaryEmbedding`` or ``Attention``."""
    family = config.base["model_type"]
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), PREFIX[family] + part)


class Fusion(nn.Module):
    """RMSNorm of every head's output on its own, then a learnable scale (Eq. 13 and 14).

    Softmax outputs grow with the norm of the query and Gated DeltaNet's do not, so that without it one kind drowns the other.
    """

    def __init__(self, config: HydraHeadConfig, layer: int):
        super().__init__()
        linear = [head for head, kind in enumerate(config.kinds[layer]) if issubclass(BRANCHES[kind], LinearHeads)]
        self.together = linear if config.norm_scope == "linear" else None
        shape = (config.num_attention_heads, config.head_dim if config.gamma == "channel" else 1)
        self.gamma = nn.Parameter(torch.ones(shape, dtype=torch.float32))
        self.eps = config.base_config.rms_norm_eps

    def forward(self, z: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
        x = z.to(torch.promote_types(z.dtype, torch.float32))
        square = x.square().mean(-1, keepdim=True)
        if self.together is None:
            scale = (square + self.eps).rsqrt()
        else:
            scale = torch.ones_like(square)
            scale[:, :, self.together] = (square[:, :, self.together].mean(2, keepdim=True) + self.eps).rsqrt()
        return (x * scale * self.gamma).to(z.dtype)


class HybridAttention(nn.Module):
    def __init__(self, config: HydraHeadConfig, layer: int):
        super().__init__()
        with torch.device("meta"):  # only asked for what it has: biases and QK-norm
            teacher = base_class(config, "Attention")(config.base_config, layer)
        qk_norm = partial(base_class(config, "RMSNorm"), config.head_dim, eps=config.base_config.rms_norm_eps) if hasattr(teacher, "q_norm") else None
        bias = teacher.q_proj.bias is not None
        kinds = config.kinds[layer]
        heads = {kind: [head for head, own in enumerate(kinds) if own == kind] for kind in BRANCHES if kind in kinds}
        self.branches = nn.ModuleDict({kind: BRANCHES[kind](config, layer, own, qk_norm, bias) for kind, own in heads.items()})
        order = [head for own in heads.values() for head in own]
        self.place = tuple(order.index(head) for head in range(len(kinds)))  # where each head of the base model stands among the branches' outputs
        self.z = nn.Identity()  # where the heads' outputs can be read and patched: they are its input
        self.fusion = Fusion(config, layer) if config.fusion_norm else None
        self.config = config
        self.o_proj = nn.Linear(len(kinds) * config.head_dim, config.hidden_size, bias=teacher.o_proj.bias is not None)

    def forward(self, x: Float[Tensor, "batch pos d_model"], tokens: Tokens, memory: HybridLayer | None) -> Float[Tensor, "batch pos d_model"]:
        outs = self.outputs(x, tokens, memory)
        if self.fused(outs[0]):
            return self.o_proj(self.fuse_in_one(outs, x).flatten(2))
        return self.write(self.ordered(outs), x)

    def outputs(self, x: Float[Tensor, "batch pos d_model"], tokens: Tokens, memory: HybridLayer | None) -> list[Float[Tensor, "batch pos head d_head"]]:
        """Of each branch, the outputs of its heads."""
        return [branch(x, tokens, memory) for branch in self.branches.values()]

    def ordered(self, outs: list[Float[Tensor, "batch pos head d_head"]]) -> Float[Tensor, "batch pos head d_head"]:
        """Every head's output, in the base model's order."""
        return self.z(torch.cat(outs, 2)[:, :, index(self.place, outs[0].device)])

    def mix(self, x: Float[Tensor, "batch pos d_model"], tokens: Tokens, memory: HybridLayer | None) -> Float[Tensor, "batch pos head d_head"]:
        return self.ordered(self.outputs(x, tokens, memory))

    def fused(self, out: Tensor) -> bool:
        """Whether order, norm, scale and gates are one kernel's work; not where somebody looks at the outputs in between, or patches them."""
        watched = self.z._forward_hooks or self.z._forward_pre_hooks
        branches = len(self.branches) <= 2 and all(isinstance(branch, Branch) for branch in self.branches.values())
        apart = watched or not branches or self.fusion is None or self.fusion.together is not None or out.dtype == torch.float64
        return not apart and fusion_backend(out.device, self.config.fusion_backend) == "triton"

    def fuse_in_one(self, outs: list[Float[Tensor, "batch pos head d_head"]], x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos head d_head"]:
        """``fuse`` of ``ordered``, as one kernel."""
        from hydralens.hybrid.kernels.fusion import fuse

        gates = [branch.gate_logits(x) for branch in self.branches.values()]
        if len(outs) == 1:
            outs, gates = [*outs, outs[0][:, :, :0]], [*gates, None]
        return fuse(*outs, index(self.place, x.device, torch.int32), self.fusion.gamma, *gates, eps=self.fusion.eps)

    def write(self, z: Float[Tensor, "batch pos head d_head"], x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        return self.o_proj(self.fuse(z, x).flatten(2))

    def fuse(self, z: Float[Tensor, "batch pos head d_head"], x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos head d_head"]:
        """What the output projection reads: the heads' outputs normalised, scaled and gated."""
        if self.fusion is not None:
            z = self.fusion(z)
        # After the norm, which would cancel what a gate does to a whole head.
        if any(branch.gate is not None for branch in self.branches.values()):
            width = max(branch.head_dim if branch.gate is not None and branch.gate.out_features > len(branch.heads) else 1 for branch in self.branches.values())
            gates = torch.cat([branch.gates(x).expand(-1, -1, -1, width) for branch in self.branches.values()], 2)[:, :, index(self.place, x.device)]
            z = z * gates
        return z


class HybridLayerBlock(GradientCheckpointingLayer):
    """The base family's pre-norm decoder layer with hybrid attention."""

    def __init__(self, config: HydraHeadConfig, layer: int):
        super().__init__()
        base = config.base_config
        norm = partial(base_class(config, "RMSNorm"), config.hidden_size, eps=base.rms_norm_eps)
        self.self_attn = HybridAttention(config, layer)
        self.mlp = base_class(config, "MLP")(base)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()

    def forward(self, residual: Float[Tensor, "batch pos d_model"], tokens: Tokens, memory: HybridLayer | None) -> Float[Tensor, "batch pos d_model"]:
        residual = residual + self.self_attn(self.input_layernorm(residual), tokens, memory)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class HydraHeadPreTrainedModel(PreTrainedModel):
    config_class = HydraHeadConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HybridLayerBlock"]
    _supports_sdpa = True
    _is_stateful = True  # the recurrent state cannot be rolled back: no assisted decoding
    # In bfloat16 the slowest decays would round to none.
    _keep_in_fp32_modules_strict = {"A_log", "dt_bias", "gamma", "D"}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        match module:
            case Gate():
                init.zeros_(module.weight)
            case Fusion():
                init.ones_(module.gamma)
            case LinearHeads():
                fresh = type(module)(module.config, module.layer, module.heads, None, False)
                for name, value in fresh.named_parameters():
                    if name.split(".")[0] not in ("q_proj", "k_proj", "v_proj", "gate"):
                        init.copy_(module.get_parameter(name), value)
            case _:
                super()._init_weights(module)


class HydraHeadModel(HydraHeadPreTrainedModel):
    def __init__(self, config: HydraHeadConfig):
        super().__init__(config)
        base = config.base_config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, base.pad_token_id)
        self.layers = nn.ModuleList([HybridLayerBlock(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = base_class(config, "RMSNorm")(config.hidden_size, eps=base.rms_norm_eps)
        self.rotary_emb = base_class(config, "RotaryEmbedding")(base)
        self.post_init()

    def forward(
        self,
        inputs_embeds: Float[Tensor, "batch pos d_model"],
        attention_mask: Int[Tensor, "batch key"] | None,
        position_ids: Int[Tensor, "batch pos"] | None,
        cache: HybridCache | None,
        cu_seqlens: Int[Tensor, "n"] | None,
    ) -> list[Float[Tensor, "batch pos d_model"]]:
        """The residual stream entering every layer, and the normed one after the last."""
        n_past = 0 if cache is None else cache.get_seq_length()
        tokens = self.tokens(inputs_embeds, attention_mask, position_ids, n_past, cu_seqlens, cache is not None)
        residual, states = inputs_embeds, []
        for place, layer in enumerate(self.layers):
            states.append(residual)
            residual = layer(residual, tokens, None if cache is None else cache.layers[place])
        if cache is not None:
            for layer in cache.layers:
                layer.n_tokens += inputs_embeds.shape[1]
        return [*states, self.norm(residual)]

    def tokens(
        self,
        x: Float[Tensor, "batch pos d_model"],
        attention_mask: Int[Tensor, "batch key"] | None = None,
        position_ids: Int[Tensor, "batch pos"] | None = None,
        n_past: int = 0,
        cu_seqlens: Int[Tensor, "n"] | None = None,
        caching: bool = False,
    ) -> Tokens:
        """What every layer is told about the tokens of a call."""
        batch, n_pos = x.shape[:2]
        here = torch.arange(n_pos, device=x.device)
        real = visible = unpadded = None
        counted = (n_past + here)[None]
        if cu_seqlens is None and attention_mask is None and position_ids is not None and not n_past:
            cu_seqlens = documents_of(position_ids)
        if cu_seqlens is not None:
            if batch != 1 or caching or attention_mask is not None:
                given = f"batch {batch}{', a cache' if caching else ''}{'' if attention_mask is None else ', an attention_mask'}"
                raise InputError(f"cu_seqlens and restarting position_ids pack documents into one row without cache or attention_mask; got {given}")
            if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != n_pos or not (cu_seqlens.diff() > 0).all():
                raise InputError(f"cu_seqlens is {cu_seqlens.tolist()[:20]}; it must run from 0 to the {n_pos} tokens of the row, rising")
            document = torch.searchsorted(cu_seqlens[1:].contiguous(), here, right=True)
            counted = (here - cu_seqlens[document])[None]
        elif attention_mask is not None:
            if attention_mask.shape != (batch, n_past + n_pos):
                raise InputError(
                    f"attention_mask is {list(attention_mask.shape)}, expected [{batch}, {n_past + n_pos}] for {n_past} cached and {n_pos} new tokens; "
                    "a longer mask means that the cache was lost on the way"
                )
            if not attention_mask.all():
                known = attention_mask.bool()
                real = known[:, n_past:]
                counted = (known.cumsum(1) - 1).clamp(min=0)[:, n_past:]
                if n_past:
                    own = torch.eye(n_pos, dtype=torch.bool, device=x.device)  # padding sees itself, or its softmax would be over nothing
                    visible = causal_mask(n_pos, n_past + n_pos, x.device) & known[:, None, None]
                    visible[..., n_past:] |= own
                else:
                    ends = real.sum(1).cumsum(0)
                    unpadded = real.flatten().nonzero()[:, 0], torch.cat([ends.new_zeros(1), ends]).unique()  # unique: a row may be all padding
        positions = (counted if position_ids is None else position_ids).expand(batch, -1)
        return Tokens(positions, self.rotary_emb(x, positions), real, visible, cu_seqlens, unpadded)


def documents_of(position_ids: Int[Tensor, "batch pos"]) -> Int[Tensor, "n"] | None:
    """Where documents start, and the end of the last, told by positions that do not go on from the one before; None where all go on."""
    if position_ids.shape[1] < 2:
        return None
    restarts = position_ids.diff(dim=1) != 1
    if not restarts.any():
        return None
    starts = restarts[0].nonzero()[:, 0] + 1
    return torch.cat([starts.new_zeros(1), starts, starts.new_tensor([position_ids.shape[1]])])


class HydraHeadForCausalLM(HydraHeadPreTrainedModel, GenerationMixin):
    """Generates, trains, saves and loads like any transformers model; see ``HydraHeadConfig`` for the choices and ``build_hybrid`` for weights."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: HydraHeadConfig):
        super().__init__(config)
        self.model = HydraHeadModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def lens_choices(self) -> str:
        """What hybrids of the same weights differ by."""
        names = ["kinds", *(name for name in HydraHeadConfig.__init__.__kwdefaults__ if not name.endswith("_backend"))]
        return json.dumps({name: getattr(self.config, name) for name in names}, sort_keys=True)

    def lens_anatomy(self) -> Anatomy:
        """Where the patching engine finds everything; ``load_model`` asks."""
        return hybrid_anatomy(self)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate() leaves the cache to forward()

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Int[Tensor, "batch key"] | None = None,
        position_ids: Int[Tensor, "batch pos"] | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: Float[Tensor, "batch pos d_model"] | None = None,
        labels: Int[Tensor, "batch pos"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool | None = None,
        cu_seqlens: Int[Tensor, "n"] | None = None,
        cache: HybridCache | None = None,
        cu_seq_lens_q: Int[Tensor, "n"] | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the last ``logits_to_keep`` positions, of all where it is 0.

        Args:
            attention_mask: 1 for tokens, 0 for padding on either side, over cached and new tokens.
            past_key_values, cache: a ``HybridCache``, under either of the names that transformers has for it.
            use_cache: make a cache where none is given.
            position_ids: without attention_mask and cache, a row whose positions start anew holds packed documents.
            cu_seqlens, cu_seq_lens_q: starts of documents packed into a single row, and the end of the last one; the second is transformers' name.

        Raises:
            InputError: a cache of another kind, a mask that does not fit, cu_seqlens with a batch or a cache.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = HybridCache(self.config.num_hidden_layers)
        if cache is not None and not isinstance(cache, HybridCache):
            raise InputError(f"a hybrid needs its own cache, got {type(cache).__name__}; pass none, or hydralens.hybrid.HybridCache(n_layers)")
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give either input_ids or inputs_embeds")
        embeds = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        states = self.model(embeds, attention_mask, position_ids, cache, cu_seq_lens_q if cu_seqlens is None else cu_seqlens)
        logits = self.lm_head(states[-1][:, -logits_to_keep:] if logits_to_keep else states[-1])
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=tuple(states) if output_hidden_states else None, **{CACHE: cache})

    @classmethod
    def from_pretrained(cls, place: str | Path | None, *args: Any, **kwargs: Any) -> "HydraHeadForCausalLM":
        """As in transformers.

        Raises:
            InputError: a weight file is damaged or cut short.
        """
        try:
            return super().from_pretrained(place, *args, **kwargs)
        except SafetensorError as error:
            raise InputError(f"a weight file of {str(place)!r} is damaged or cut short ({error}); save or copy it again") from None

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """As in transformers, and beside it a module through which ``trust_remote_code=True`` opens the folder wherever hydralens is installed."""
        self.config.auto_map = {name: f"{REMOTE}.{own.__name__}" for name, own in (("AutoConfig", HydraHeadConfig), ("AutoModelForCausalLM", type(self)))}
        super().save_pretrained(save_directory, **kwargs)
        write_text(Path(save_directory) / f"{REMOTE}.py", REMOTE_CODE)

    def cache_bytes(self, n_tokens: int, batch: int = 1) -> dict[str, int]:
        """Bytes of a cache of ``n_tokens``: ``"hybrid"``, of it ``"kv"`` and ``"state"``, and ``"base"`` for the base model in the same dtype."""
        config, size = self.config, torch.finfo(self.dtype).bits // 8
        kv = state = 0
        for part in self.modules():
            if isinstance(part, FullHeads):
                n_kept = n_tokens if part.window is None else min(n_tokens, part.window - 1 + part.sinks)
                kv += n_kept * (2 * len(part.kv_heads) * config.head_dim * size + 4 * part.by_position)
            elif isinstance(part, LinearHeads):
                n_past = 0 if part.conv is None else len(part.conv) * (config.linear_conv - 1)
                state += len(part.heads) * config.head_dim * (config.head_dim * 4 + n_past * size)
        windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        held = sum(n_tokens if window is None else min(n_tokens, window - 1) for window in windows)
        base = held * 2 * config.num_key_value_heads * config.head_dim * size
        return {"hybrid": batch * (kv + state), "kv": batch * kv, "state": batch * state, "base": batch * base}
