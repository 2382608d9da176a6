"""``HydraHeadConfig``: the base model's config, a mixer kind per head, and every choice that HydraHead's description leaves open."""

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hydralens.errors import InputError, check_word
from hydralens.hybrid.backends import ATTENTION, FUSION, GDN, WORDS

BASES = ("llama", "qwen2", "qwen3", "mistral")
KINDS = ("full", "gdn", "window", "moba", "kda", "lightning", "gla", "mamba2", "jet", "window+gla", "window+mamba2")
GATES = (None, "head", "channel")
REFUSED = {
    "gemma2": "its attention scores are soft-capped and its norms sandwiched, which the branches do not reproduce",
    "gemma3_text": "its norms are sandwiched and its layers use two rotary tables, which the branches do not reproduce",
    "gpt2": "its positions are learned and absolute, so the linear branch would have none to rotate",
}


class HydraHeadConfig(PreTrainedConfig):
    """A head-wise hybrid (HydraHead): which heads keep softmax attention, which become Gated DeltaNet, and how they are fused.

    Args:
        base: the base model's config as a dict, ``model_type`` included; everything but attention follows it.
        kinds: ``[layer][head]``: ``"full"`` or ``"gdn"``; or, to compare with other hybrids, ``"window"``, ``"moba"``, ``"kda"``, ``"lightning"``, ``"gla"``,
            ``"mamba2"``, ``"jet"``, and two at once: ``"window+gla"``, ``"window+mamba2"``.
        full_rope: keep RoPE on the full heads. HydraHead removes it.
        log_scale: ``a`` of the query's length scale ``log(t + a) / log(a)`` at position ``t`` of the full heads, so that attention stays sharp over
            long contexts; None: none. HydraHead names the scale and not its form; this is HypeNet's (Eq. 11).
        log_scale_in_training: apply it in training too; HypeNet does not.
        full_gate: sigmoid gate on the output of the full heads: one value a head, one a channel, or None. It is ``2 sigmoid(W x)`` with W = 0 at
            the start, so that it starts as the identity, and acts after the fusion norm, which would cancel a constant gate before it.
        linear_rope: RoPE on q and k of the linear heads.
        linear_conv: taps of a causal convolution on q, k and v of the linear heads, which starts as the identity; None: none. HydraHead keeps
            one, HypeNet found that it hurts small conversions.
        linear_gate: as ``full_gate``, on the linear heads.
        negative_eigenvalues: beta in 0..2 instead of 0..1.
        fusion_norm: RMSNorm of every head's output on its own (Eq. 13). False: outputs are taken as they are.
        norm_scope: ``"head"``, or ``"linear"``: one RMSNorm over all linear heads of a layer together and none on the full heads.
        gamma: learnable scale after it (Eq. 14): one a ``"head"`` or one a ``"channel"``.
        window_size, sinks: what window heads see: the last tokens, their own included, and the first.
        moba_block, moba_top: what MoBA heads see: so many blocks of so many tokens, their own block included. The defaults are those of MoBA's own
            training runs; for contexts of a million tokens it takes 12 of 4096.
        lightning: whose lightning attention: ``"minimax"`` or ``"hypenet"``.
        gdn_backend, attention_backend, fusion_backend: what runs the delta rule, attention of the full heads, and the fusion with what surrounds it; see
            ``hydralens.hybrid.backends``, whose environment variables win.

    Raises:
        InputError: an unsupported base, kinds of another shape or of an unknown name, an unknown choice.
    """

    model_type = "hydrahead"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    def __init__(
        self,
        base: dict[str, Any] | None = None,
        kinds: Sequence[Sequence[str]] | None = None,
        *,
        full_rope: bool = False,
        log_scale: float | None = 512.0,
        log_scale_in_training: bool = True,
        full_gate: str | None = "head",
        linear_rope: bool = True,
        linear_conv: int | None = None,
        linear_gate: str | None = None,
        negative_eigenvalues: bool = False,
        fusion_norm: bool = True,
        norm_scope: str = "head",
        gamma: str = "channel",
        window_size: int = 64,
        sinks: int = 4,
        moba_block: int = 512,
        moba_top: int = 3,
        lightning: str = "minimax",
        gdn_backend: str = "auto",
        attention_backend: str = "auto",
        fusion_backend: str = "auto",
        **kwargs: Any,
    ):
        if base is not None:  # transformers makes an empty config of every class when it compares with the defaults
            family = base.get("model_type")
            if family not in BASES:
                reason = REFUSED.get(family, "this family has not been checked")
                raise InputError(f"a hybrid of a {family!r} model cannot be built: {reason}; bases: {', '.join(BASES)}")
            parts = self._base_of(base)
            shape = (parts.num_hidden_layers, parts.num_attention_heads)
            found = sorted({len(row) for row in kinds or []})
            if len(kinds or []) != shape[0] or found != [shape[1]]:
                raise InputError(f"kinds has {len(kinds or [])} layers of {found} heads, the base has {shape[0]} layers of {shape[1]}; give one kind per head")
            unknown = sorted({kind for row in kinds for kind in row} - set(KINDS))
            if unknown:
                raise InputError(f"kind {unknown[0]!r} is unknown; choose one of {', '.join(KINDS)}")
            if parts.num_attention_heads % parts.num_key_value_heads:
                raise InputError(f"{parts.num_attention_heads} query heads do not divide into {parts.num_key_value_heads} KV heads")
            # What generation, caches and other tools read of any config.
            for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
                setattr(self, name, getattr(parts, name))
            self.head_dim = getattr(parts, "head_dim", None) or parts.hidden_size // parts.num_attention_heads
            for name in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"):
                kwargs.setdefault(name, getattr(parts, name, None))
        for name, value in (("full_gate", full_gate), ("linear_gate", linear_gate)):
            if value not in GATES:
                raise InputError(f"{name} is {value!r}; choose 'head', 'channel' or None")
        check_word("norm_scope", norm_scope, ("head", "linear"))
        check_word("gamma", gamma, ("head", "channel"))
        check_word("lightning", lightning, ("minimax", "hypenet"))
        if window_size < 1 or sinks < 0:
            raise InputError(f"window_size is {window_size} and sinks {sinks}; a head sees at least itself: give 1 or more, and sinks of 0 or more")
        if moba_block < 1 or moba_top < 1:
            raise InputError(f"moba_block is {moba_block} and moba_top {moba_top}; a head sees its own block at least: give 1 or more of each")
        backends = {GDN: ("gdn_backend", gdn_backend), ATTENTION: ("attention_backend", attention_backend), FUSION: ("fusion_backend", fusion_backend)}
        for variable, (name, value) in backends.items():
            check_word(name, value, WORDS[variable])
        if log_scale is not None and log_scale <= 1:
            raise InputError(f"log_scale is {log_scale}; it must be above 1, or None for no scale")
        if linear_conv is not None and linear_conv < 2:
            raise InputError(f"linear_conv is {linear_conv}; give 2 taps or more, or None for no convolution")
        self.base = base
        self.kinds = None if kinds is None else [list(row) for row in kinds]
        self.full_rope = full_rope
        self.log_scale = log_scale
        self.log_scale_in_training = log_scale_in_training
        self.full_gate = full_gate
        self.linear_rope = linear_rope
        self.linear_conv = linear_conv
        self.linear_gate = linear_gate
        self.negative_eigenvalues = negative_eigenvalues
        self.fusion_norm = fusion_norm
        self.norm_scope = norm_scope
        self.gamma = gamma
        self.window_size = window_size
        self.sinks = sinks
        self.moba_block = moba_block
        self.moba_top = moba_top
        self.lightning = lightning
        self.gdn_backend = gdn_backend
        self.attention_backend = attention_backend
        self.fusion_backend = fusion_backend
        super().__init__(**kwargs)

    @staticmethod
    def _base_of(base: dict[str, Any]) -> PreTrainedConfig:
        return AutoConfig.for_model(**base)

    @property
    def base_config(self) -> PreTrainedConfig:
        """The base model's config as an object."""
        return self._base_of(self.base)

    def window(self, layer: int) -> int | None:
        """The base model's own sliding window in a layer; its full heads never see further."""
        base = self.base_config
        if base.model_type == "mistral":
            return base.sliding_window
        sliding = getattr(base, "layer_types", None) is not None and base.layer_types[layer] == "sliding_attention"
        return base.sliding_window if sliding else None
