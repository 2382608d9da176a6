"""Where z, q, k, v, the MLP and the norms of a decoder are, verified once at load and trusted afterwards."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hydralens.errors import UnsupportedModelError
from hydralens.models.attention import KeysValues, attend

NO_SOFTMAX = (
    "this asks for {!r} of a softmax layer, which the linear heads of a hybrid have not got; of a hybrid, z can be patched, ablated and compared: "
    "activation_patch(component='z'), score_heads(method='direct' or 'ablation_drop'), ablate, layer_similarity, head_similarity"
)

Rope = tuple[Float[Tensor, "1 pos d_head"], Float[Tensor, "1 pos d_head"]]


@dataclass(frozen=True, eq=False)
class Layer:
    """One pre-norm decoder layer as the patching engine sees it; the modules are the model's own.

    ``residual + post_attention_norm(o(z))``, then ``residual + post_mlp_norm(mlp(mlp_norm(residual)))``, where the two post
    norms exist in sandwich-norm families (Gemma 2 and 3) only.
    """

    attention_norm: nn.Module
    qkv: tuple[nn.Module, ...]  # (q, k, v) projections, or one fused projection (GPT-2)
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    o: nn.Module  # its INPUT is z: heads side by side, not yet mixed
    post_attention_norm: nn.Module | None
    mlp_norm: nn.Module
    mlp: nn.Module
    post_mlp_norm: nn.Module | None
    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None  # a query sees itself and the window - 1 positions before it
    rope_kind: str | None  # which rotary table this layer uses, where a model has several

    @property
    def z_input(self) -> nn.Module:
        """The module whose input is z."""
        return self.o

    def project(
        self, residual: Float[Tensor, "batch pos d_model"], rope: Rope | None
    ) -> tuple[Float[Tensor, "batch head pos d_head"], Float[Tensor, "batch kv_head pos d_head"], Float[Tensor, "batch kv_head pos d_head"]]:
        """q, k, v as attention uses them: after QK-norm and rotation."""
        x = self.attention_norm(residual)
        q, k, v = self.qkv[0](x).chunk(3, -1) if len(self.qkv) == 1 else [projection(x) for projection in self.qkv]
        q, k, v = (rearrange(y, "batch pos (head d_head) -> batch pos head d_head", d_head=self.head_dim) for y in (q, k, v))
        q = self.q_norm(q) if self.q_norm is not None else q
        k = self.k_norm(k) if self.k_norm is not None else k
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return (rotate(q, rope), rotate(k, rope), v) if rope is not None else (q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, behind: KeysValues | None = None) -> Float[Tensor, "batch pos head d_head"]:
        """z by the layer's own scale, soft cap and window, behind keys and values that all rows share."""
        return attend(q, k, v, scale=self.scale, softcap=self.softcap, window=self.window, prefix=behind)

    def mix(
        self, residual: Float[Tensor, "batch pos d_model"], rope: Rope | None, behind: KeysValues | None = None
    ) -> tuple[Float[Tensor, "batch pos head d_head"], dict[str, Tensor]]:
        """z, and what it was made from on the way: q, k and v."""
        q, k, v = self.project(residual, rope)
        return self.attend(q, k, v, behind), {"q": q, "k": k, "v": v}

    def write(self, z: Float[Tensor, "batch pos head d_head"], residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What attention adds to the residual stream; of ``residual``, which enters the layer, only the gates of a hybrid take note."""
        out = self.o(z.flatten(-2))
        return self.post_attention_norm(out) if self.post_attention_norm is not None else out

    def feed(self, residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream after this layer's MLP; position-wise."""
        out = self.mlp(self.mlp_norm(residual))
        return residual + (self.post_mlp_norm(out) if self.post_mlp_norm is not None else out)


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The whole decoder: shape, sites and the few functions that the engine's own forward is made of.

    ``head_dim`` comes from the config or the projection's shape, never from d_model / n_heads.
    """

    family: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_model: int
    layers: tuple[Layer, ...]
    embed: Callable[[Int[Tensor, "batch pos"], Int[Tensor, "pos"]], Float[Tensor, "batch pos d_model"]]
    rope: Callable[[Float[Tensor, "batch pos d_model"], Int[Tensor, "pos"]], dict[str | None, Rope]]
    final_norm: nn.Module
    unembed: nn.Module
    final_softcap: float | None
    bypassed: tuple[nn.Module, ...]  # modules whose forward the engine replaces: hooks on them are not seen
    past: tuple[str, ...] = ("k", "v")  # sites that later positions need of a run

    @property
    def group(self) -> int:
        """Query heads per KV head: query head ``h`` reads KV head ``h // group``."""
        return self.n_heads // self.n_kv_heads

    def logits(self, residual: Float[Tensor, "... d_model"]) -> Float[Tensor, "... vocab"]:
        """Logits in at least float32."""
        logits = self.unembed(self.final_norm(residual))
        return self._cap(logits.to(torch.promote_types(logits.dtype, torch.float32)))

    def logits_of(self, residual: Float[Tensor, "row n d_model"], tokens: Int[Tensor, "n token"]) -> Float[Tensor, "row n token"]:
        """Logits of the given tokens at each position only, multiplied in at least float32."""
        x = self.final_norm(residual)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        logits = torch.einsum("rnd,ntd->rnt", x, self.unembed.weight[tokens].to(x.dtype))
        if self.unembed.bias is not None:
            logits = logits + self.unembed.bias[tokens]
        return self._cap(logits)

    def _cap(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits / self.final_softcap) * self.final_softcap if self.final_softcap else logits


def rotate(x: Float[Tensor, "batch head pos d_head"], rope: Rope) -> Float[Tensor, "batch head pos d_head"]:
    """Rotary position embedding, half-split convention of the Llama family."""
    cos, sin = (table.unsqueeze(1) for table in rope)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


# --- families ------------------------------------------------------------------------------------------------------

SUPPORTED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2")

# Families people are likely to try, with the assumption each breaks; everything else is refused as unknown.
REFUSED = {
    "gpt_neox": "attention and MLP run in parallel from the same residual, so 'attention, then MLP' paths do not exist",
    "gptj": "attention and MLP run in parallel from the same residual, so 'attention, then MLP' paths do not exist",
    "falcon": "attention and MLP may run in parallel from the same residual, so 'attention, then MLP' paths do not exist",
    "phi": "attention and MLP run in parallel from the same residual, so 'attention, then MLP' paths do not exist",
    "cohere": "attention and MLP run in parallel from the same residual, so 'attention, then MLP' paths do not exist",
    "cohere2": "attention and MLP run in parallel from the same residual, so 'attention, then MLP' paths do not exist",
    "qwen3_next": "q_proj is double-width (query and output gate) and most layers are Gated DeltaNet",
    "qwen3_5_text": "q_proj is double-width (query and output gate) and most layers are Gated DeltaNet",
    "bloom": "attention adds the residual itself, so its output is not the heads' contribution alone",
    "olmo2": "layers have no pre-norm: norms follow attention and MLP",
    "olmo3": "layers have no pre-norm: norms follow attention and MLP",
    "deepseek_v2": "latent attention (MLA) has no per-head k and v projections",
    "deepseek_v3": "latent attention (MLA) has no per-head k and v projections",
    "t5": "an encoder-decoder; a decoder-only model is needed",
    "bert": "an encoder; a decoder-only model is needed",
    "gemma3": "a vision-language wrapper; pass its language model (a Gemma3ForCausalLM) instead",
}


def check_family(family: str) -> None:
    """Refuse a family that the engine cannot work with; ``family`` is a config's ``model_type``, so this needs no weights.

    Raises:
        UnsupportedModelError: names the family and the assumption that it breaks.
    """
    if family not in SUPPORTED:
        reason = REFUSED.get(family, "this family has not been checked against the engine")
        raise UnsupportedModelError(f"model family {family!r} is not supported: {reason}; supported: {', '.join(SUPPORTED)}")


def read_anatomy(hf: PreTrainedModel) -> Anatomy:
    """Find and check every site of ``hf``.

    Raises:
        UnsupportedModelError: the family is not one of ``SUPPORTED``, an assumption fails, or a projection has a shape that
            the config does not explain.
    """
    family = hf.config.model_type
    if hasattr(hf, "lens_anatomy"):  # a model that says itself where everything is: a hybrid
        return hf.lens_anatomy()
    check_family(family)
    if hf.get_output_embeddings() is None or not hasattr(hf, "lm_head"):
        raise UnsupportedModelError(f"{type(hf).__name__} has no language-model head; open it as a ...ForCausalLM model")
    anatomy = _gpt2(hf) if family == "gpt2" else _llama_like(hf)
    _check_shapes(anatomy)
    return anatomy


def _llama_like(hf: PreTrainedModel) -> Anatomy:
    config, decoder = hf.config, hf.model
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{config.model_type}: attention is bidirectional; a causal model is needed")
    sandwich = config.model_type in ("gemma2", "gemma3_text")
    layers = []
    for index, block in enumerate(decoder.layers[: config.num_hidden_layers]):
        attention = block.self_attn
        # Mistral applies its window in every layer and has no per-layer attribute.
        window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
        layers.append(
            Layer(
                attention_norm=block.input_layernorm,
                qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
                q_norm=getattr(attention, "q_norm", None),
                k_norm=getattr(attention, "k_norm", None),
                o=attention.o_proj,
                post_attention_norm=block.post_attention_layernorm if sandwich else None,
                mlp_norm=block.pre_feedforward_layernorm if sandwich else block.post_attention_layernorm,
                mlp=block.mlp,
                post_mlp_norm=block.post_feedforward_layernorm if sandwich else None,
                n_heads=config.num_attention_heads,
                n_kv_heads=config.num_key_value_heads,
                head_dim=attention.head_dim,
                scale=attention.scaling,
                softcap=getattr(attention, "attn_logit_softcapping", None),
                window=window,
                rope_kind=config.layer_types[index] if config.model_type == "gemma3_text" else None,
            )
        )

    def rope(x: Tensor, positions: Tensor) -> dict[str | None, Rope]:
        kinds = {layer.rope_kind for layer in layers}
        return {kind: decoder.rotary_emb(x, positions[None], *([kind] if kind is not None else [])) for kind in kinds}

    return Anatomy(
        family=config.model_type,
        n_layers=len(layers),
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=layers[0].head_dim,
        d_model=config.hidden_size,
        layers=tuple(layers),
        embed=lambda tokens, positions: decoder.embed_tokens(tokens),
        rope=rope,
        final_norm=decoder.norm,
        unembed=hf.lm_head,
        final_softcap=getattr(config, "final_logit_softcapping", None),
        bypassed=(hf, decoder, *decoder.layers, *(block.self_attn for block in decoder.layers)),
    )


def _gpt2(hf: PreTrainedModel) -> Anatomy:
    config, decoder = hf.config, hf.transformer
    if config.add_cross_attention:
        raise UnsupportedModelError("gpt2 with cross-attention is not supported: a decoder-only model is needed")
    layers = tuple(
        Layer(
            attention_norm=block.ln_1,
            qkv=(block.attn.c_attn,),
            q_norm=None,
            k_norm=None,
            o=block.attn.c_proj,
            post_attention_norm=None,
            mlp_norm=block.ln_2,
            mlp=block.mlp,
            post_mlp_norm=None,
            n_heads=config.n_head,
            n_kv_heads=config.n_head,
            head_dim=block.attn.head_dim,
            scale=block.attn.scaling,
            softcap=None,
            window=None,
            rope_kind=None,
        )
        for block in decoder.h
    )
    return Anatomy(
        family="gpt2",
        n_layers=len(layers),
        n_heads=config.n_head,
        n_kv_heads=config.n_head,
        head_dim=layers[0].head_dim,
        d_model=config.n_embd,
        layers=layers,
        embed=lambda tokens, positions: decoder.wte(tokens) + decoder.wpe(positions),
        rope=lambda x, positions: {None: None},
        final_norm=decoder.ln_f,
        unembed=hf.lm_head,
        final_softcap=None,
        bypassed=(hf, decoder, *decoder.h, *(block.attn for block in decoder.h)),
    )


def _check_shapes(anatomy: Anatomy) -> None:
    if anatomy.n_heads % anatomy.n_kv_heads:
        raise UnsupportedModelError(f"{anatomy.family}: {anatomy.n_heads} query heads do not divide into {anatomy.n_kv_heads} KV heads")
    query, kv = anatomy.n_heads * anatomy.head_dim, anatomy.n_kv_heads * anatomy.head_dim
    for index, layer in enumerate(anatomy.layers):
        widths = (query + 2 * kv,) if len(layer.qkv) == 1 else (query, kv, kv)
        expected = [(module, (width, anatomy.d_model)) for module, width in zip(layer.qkv, widths, strict=True)] + [(layer.o, (anatomy.d_model, query))]
        for module, shape in expected:
            found = tuple(reversed(module.weight.shape)) if isinstance(module, Conv1D) else (module.out_features, module.in_features)
            if found != shape:
                raise UnsupportedModelError(
                    f"{anatomy.family}, layer {index}: a projection maps {found[1]} to {found[0]} features, expected {shape[1]} to {shape[0]} "
                    f"from {anatomy.n_heads} query heads, {anatomy.n_kv_heads} KV heads and head_dim {anatomy.head_dim}"
                )
