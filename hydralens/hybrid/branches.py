"""The two kinds of heads. A branch maps hidden states to the outputs of its own heads, with projections of its own (HydraHead)."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from hydralens.hybrid.backends import attend_causal, attend_packed, delta_rule, fusion_backend
from hydralens.hybrid.cache import HybridLayer
from hydralens.hybrid.config import HydraHeadConfig
from hydralens.hybrid.recurrence import linear_recurrence
from hydralens.models.anatomy import Rope, rotate
from hydralens.models.attention import attend

LONGEST, SHORTEST = 1e3, 10.0  # tokens after which a linear head has forgotten all but 1/e of a token, at the start of training


@dataclass(frozen=True, eq=False)
class Tokens:
    """What every layer is told about the tokens of a call.

    Attributes:
        positions: each new token's place in its document.
        rope: cosines and sines at the positions.
        real: False for padding; None where there is none.
        visible: which keys each query sees, for the full heads; None where causality says it, within documents or without padding.
        documents: where packed documents start, and the end of the last; batch is 1 then.
        unpadded: of a padded batch without cache, the places of its tokens among all, and where rows start in them, and the end of the last.
    """

    positions: Int[Tensor, "batch pos"]
    rope: Rope
    real: Bool[Tensor, "batch pos"] | None
    visible: Bool[Tensor, "batch 1 pos key"] | None
    documents: Int[Tensor, "n"] | None
    unpadded: tuple[Int[Tensor, "token"], Int[Tensor, "n"]] | None = None


class Gate(nn.Linear):
    """Starts at 0, where 2 sigmoid(W x) is 1."""


class Branch(nn.Module):
    """Projections of some heads of one layer, and their gate.

    Attributes:
        heads: the query heads of this branch, by their index in the base model.
        kv_heads: the KV head of the base model behind each key and value head of this branch.
    """

    def __init__(self, config: HydraHeadConfig, heads: list[int], kv_heads: list[int], qk_norm: nn.Module | None, bias: bool, gate: str | None):
        super().__init__()
        d_model, self.head_dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = heads, kv_heads
        self.q_proj = nn.Linear(d_model, len(heads) * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, len(kv_heads) * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, len(kv_heads) * self.head_dim, bias=bias)
        self.q_norm, self.k_norm = (None, None) if qk_norm is None else (qk_norm(), qk_norm())
        self.gate = None if gate is None else Gate(d_model, len(heads) * (self.head_dim if gate == "channel" else 1), bias=False)

    def split(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos head d_head"]:
        return rearrange(x, "batch pos (head d_head) -> batch pos head d_head", d_head=self.head_dim)

    def gates(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos head d_or_1"]:
        """2 sigmoid(W x): 1 at the start, where W is 0; ones without a gate."""
        if self.gate is None:
            return x.new_ones(*x.shape[:2], len(self.heads), 1)
        return 2 * self.gate_logits(x).sigmoid()

    def gate_logits(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos head d_or_1"] | None:
        """W x; None without a gate."""
        return None if self.gate is None else rearrange(self.gate(x), "batch pos (head d) -> batch pos head d", head=len(self.heads))


class FullHeads(Branch):
    """Softmax attention without RoPE, its queries growing with the length of the context.

    Of a KV group that the mask splits, only the KV heads that a full head reads are projected and cached.
    """

    kind = "full"

    def __init__(self, config: HydraHeadConfig, layer: int, heads: list[int], qk_norm: nn.Module | None, bias: bool):
        group = config.num_attention_heads // config.num_key_value_heads
        kv_heads = sorted({head // group for head in heads})
        super().__init__(config, heads, kv_heads, qk_norm, bias, config.full_gate)
        self.rope, self.log_scale, self.log_scale_in_training = config.full_rope, config.log_scale, config.log_scale_in_training
        self.window, self.sinks = config.window(layer), 0
        self.reads = tuple(kv_heads.index(head // group) for head in heads)
        self.grouped = all(self.reads.count(own) * len(kv_heads) == len(heads) for own in self.reads)  # kernels for grouped queries apply
        self.backend = config.attention_backend

    @property
    def by_position(self) -> bool:
        """Whether the cache holds the position of every key too."""
        return self.window is not None

    def project(self, x: Float[Tensor, "batch pos d_model"], tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[batch head pos d_head]``, and k and v of the KV heads."""
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # [batch head pos d_head]
        if self.rope:
            q, k = rotate(q, tokens.rope), rotate(k, tokens.rope)
        if self.log_scale is not None and (self.log_scale_in_training or not self.training):
            # In float32: in bfloat16 positions above 256 are no longer told apart.
            scale = (tokens.positions.float() + self.log_scale).log() / math.log(self.log_scale)
            q = (q * scale[:, None, :, None]).to(q.dtype)
        return q, k, v

    def forward(self, x: Float[Tensor, "batch pos d_model"], tokens: Tokens, memory: HybridLayer | None) -> Float[Tensor, "batch pos head d_head"]:
        q, k, v = self.project(x, tokens)
        if self.window is not None and tokens.documents is None:
            return self._recent(q, k, v, tokens, memory)
        if memory is not None:
            k, v = memory.append(f"{self.kind}.k", k), memory.append(f"{self.kind}.v", v)
        if tokens.documents is not None:
            return attend_packed(q, *self._read(k, v), tokens.documents, scale=self.head_dim**-0.5, window=self.window, sinks=self.sinks, backend=self.backend)
        if tokens.unpadded is not None:
            return self._unpadded(q, *self._read(k, v), *tokens.unpadded)
        if tokens.visible is not None:
            return F.scaled_dot_product_attention(q, *self._read(k, v), attn_mask=tokens.visible).transpose(1, 2)
        return attend_causal(q, *((k, v) if self.grouped else self._read(k, v)), backend=self.backend)

    def _read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The key and value head of every query head."""
        reads = index(self.reads, k.device)
        return k[:, reads], v[:, reads]

    def _unpadded(self, q: Tensor, k: Tensor, v: Tensor, places: Int[Tensor, "token"], starts: Int[Tensor, "n"]) -> Float[Tensor, "batch pos head d_head"]:
        """Attention within rows of a padded batch without a mask of queries x keys; padding gets 0."""
        batch, n_heads, n_pos, d_head = q.shape
        packed = (y.transpose(1, 2).reshape(batch * n_pos, n_heads, d_head)[places].transpose(0, 1)[None] for y in (q, k, v))
        out = attend_packed(*packed, starts, scale=d_head**-0.5, backend=self.backend)[0]
        return out.new_zeros(batch * n_pos, n_heads, d_head).index_copy(0, places, out).unflatten(0, (batch, n_pos))

    def _recent(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, memory: HybridLayer | None) -> Float[Tensor, "batch pos head d_head"]:
        """Attention to sinks and a window. Both are counted in positions, not in places of the cache, where padding may lie between tokens."""
        n_new = q.shape[2]
        positions = tokens.positions if tokens.real is None else tokens.positions.masked_fill(~tokens.real, -1)
        positions = positions.expand(q.shape[0], -1)[:, None].int()  # [batch 1 key]
        if memory is not None:
            k, v, positions = (memory.append(f"{self.kind}.{name}", y) for name, y in (("k", k), ("v", v), ("positions", positions)))
            self._forget(memory)
        k, v = self._read(k, v)
        if tokens.real is None and k.shape[2] == n_new:  # nothing cached: by blocks, without a mask of queries x keys
            return attend(q, k, v, scale=self.head_dim**-0.5, window=self.window, sinks=self.sinks)
        query, key = tokens.positions[:, None, :, None], positions[:, :, None]
        visible = (key >= 0) & (key <= query) & ((key > query - self.window) | (key < self.sinks))
        if tokens.real is not None:  # padding sees itself, or its softmax would be over nothing
            visible = visible.clone()
            visible[..., -n_new:] |= torch.eye(n_new, dtype=torch.bool, device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)

    def _forget(self, memory: HybridLayer) -> None:
        """Keys that no later query can see."""
        positions = memory.tensors[f"{self.kind}.positions"]
        keep = self.window - 1 + self.sinks
        if positions.shape[2] <= keep:
            return
        first = positions.amax(2, keepdim=True) + 2 - self.window  # that the next query sees, besides the sinks
        needed = (positions >= 0) & ((positions >= first) | (positions < self.sinks))
        places = needed.int().argsort(dim=2, descending=True, stable=True)[:, :, :keep].sort(2).values
        memory.tensors[f"{self.kind}.positions"] = positions.gather(2, places)
        for name in (f"{self.kind}.k", f"{self.kind}.v"):
            old = memory.tensors[name]
            memory.tensors[name] = old.gather(2, places[..., None].expand(-1, old.shape[1], -1, old.shape[3]))


class LinearHeads(Branch):
    """Heads with a recurrent state instead of a cache, every query head with a key and value head of its own.

    A kind says in ``step`` what enters the recurrence ``S <- alpha S + k u^T``. Padding neither decays the state nor is written to it.
    """

    delta = True  # whether what a key already recalls is taken off what is written to it
    rope = True
    convolved = ("q", "k", "v")  # what the convolution is for, where there is one

    def __init__(self, config: HydraHeadConfig, layer: int, heads: list[int], qk_norm: nn.Module | None, bias: bool):
        group = config.num_attention_heads // config.num_key_value_heads
        super().__init__(config, heads, [head // group for head in heads], qk_norm, bias, config.linear_gate)
        self.config, self.layer = config, layer
        taps, width = config.linear_conv, len(heads) * config.head_dim
        self.conv = None if taps is None else nn.ParameterDict({name: nn.Parameter(torch.empty(width, taps)) for name in self.convolved})
        self.make()
        self.start()

    def make(self) -> None:
        """The kind's own parameters."""

    @torch.no_grad()
    def start(self) -> None:
        """Where parameters start that the base model has none of: here a convolution that is the identity."""
        for taps in () if self.conv is None else self.conv.values():
            taps.zero_()
            taps[:, -1] = 1

    def step(self, x: Float[Tensor, "batch pos d_model"], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, log decay and beta of the recurrence, from q, k and v ``[batch pos head d_head]`` after convolution, QK-norm and RoPE."""
        raise NotImplementedError

    def forward(self, x: Float[Tensor, "batch pos d_model"], tokens: Tokens, memory: HybridLayer | None) -> Float[Tensor, "batch pos head d_head"]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.conv is not None:
            q, k, v = (self.convolve(name, y, x, tokens, memory) if name in self.conv else y for name, y in (("q", q), ("k", k), ("v", v)))
        q, k, v, log_decay, beta = self.prepare(x, self.split(q), self.split(k), self.split(v), tokens)
        state = None if memory is None else memory.tensors.get(f"{self.kind}.state")
        out, last = self.recur(q, k, v, log_decay, beta, state, tokens.documents)
        if memory is not None:
            memory.tensors[f"{self.kind}.state"] = last
        return out

    def prepare(self, x: Float[Tensor, "batch pos d_model"], q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """``step`` after QK-norm and RoPE, with padding taken out."""
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope and self.config.linear_rope:
            q, k = (rotate(y.transpose(1, 2), tokens.rope).transpose(1, 2) for y in (q, k))
        q, k, v, log_decay, beta = self.step(x, q, k, v)
        if tokens.real is not None:
            log_decay, beta = (y * tokens.real.reshape(*tokens.real.shape, *[1] * (y.ndim - 2)) for y in (log_decay, beta))
        return q, k, v, log_decay, beta

    def recur(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        return linear_recurrence(q, k, v, log_decay, beta, delta=self.delta, initial_state=state, cu_seqlens=documents)

    def convolve(
        self, name: str, y: Float[Tensor, "batch pos width"], x: Float[Tensor, "batch pos d_model"], tokens: Tokens, memory: HybridLayer | None
    ) -> Float[Tensor, "batch pos width"]:
        """``y``, which is q, k or v of the hidden states ``x``."""
        return self.over_past(name, self.conv[name], y, tokens, memory)

    def over_past(
        self, name: str, taps: Float[Tensor, "out tap"], x: Float[Tensor, "batch pos width"], tokens: Tokens, memory: HybridLayer | None
    ) -> Float[Tensor, "batch pos out"]:
        """Causal convolution over the real tokens of each document, the last inputs of the call before in front."""
        n_past, key = taps.shape[1] - 1, f"{self.kind}.conv.{name}"
        if tokens.documents is not None:
            starts = tokens.documents.tolist()
            parts = [x[:, start:stop] for start, stop in zip(starts, starts[1:], strict=False)]
            return torch.cat([_convolve(F.pad(part, (0, 0, n_past, 0)), taps) for part in parts], 1)
        past = None if memory is None else memory.tensors.get(key)
        if past is None:
            past = x.new_zeros(x.shape[0], n_past, x.shape[2])
        order = None
        if tokens.real is not None:  # real tokens are moved together, to the right end, so that no tap falls on padding, and afterwards back
            order = tokens.real.long().argsort(dim=1, stable=True)[..., None].expand_as(x)
            x = x.gather(1, order)
        joined = torch.cat([past, x], 1)
        if order is not None:  # the past stands directly before the first real token
            rows, n_padding = torch.arange(x.shape[0], device=x.device)[:, None], (~tokens.real).sum(1, keepdim=True)
            joined = joined.index_put((rows, n_padding + torch.arange(n_past, device=x.device)), past)
        if memory is not None:
            memory.tensors[key] = joined[:, -n_past:]
        out = _convolve(joined, taps)
        return out if order is None else torch.zeros_like(out).scatter(1, order[..., :1].expand_as(out), out)


class GatedDeltaHeads(LinearHeads):
    """Gated DeltaNet with RoPE (HydraHead).

    S_t = alpha_t S_{t-1} + beta_t k_t (v_t - (alpha_t S_{t-1})^T k_t)^T,   o_t = S_t^T q_t,
    alpha_t = exp(-exp(A_log) softplus(W_a x_t + dt_bias)),   beta_t = sigmoid(W_b x_t),   q and k of length 1.
    """

    kind = "gdn"

    def make(self) -> None:
        self.a_proj = nn.Linear(self.config.hidden_size, len(self.heads), bias=False)
        self.b_proj = nn.Linear(self.config.hidden_size, len(self.heads), bias=False)
        self.A_log = nn.Parameter(torch.empty(len(self.heads), dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(len(self.heads), dtype=torch.float32))

    @torch.no_grad()
    def start(self) -> None:
        """Slow decay, its time spread over the heads from 1000 to 10 tokens, beta 1/2.

        Gated DeltaNet's own start from scratch (A up to 16) would make half of the heads forget within a token or two.
        """
        super().start()
        self.a_proj.weight.zero_()
        self.b_proj.weight.zero_()
        self.A_log.zero_()
        self.dt_bias.copy_(slow_decay(len(self.heads)))

    def prepare(self, x: Float[Tensor, "batch pos d_model"], q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        own = type(self).step is GatedDeltaHeads.step and q.dtype == v.dtype and v.dtype != torch.float64
        if not own or fusion_backend(q.device, self.config.fusion_backend) == "torch":
            return super().prepare(x, q, k, v, tokens)
        from hydralens.hybrid.kernels.gdn_prepare import prepare

        q, k, log_decay, beta = prepare(q, k, *self.given(x, tokens), tokens.real, **self.constants())
        return q, k, v, log_decay, beta

    def given(self, x: Float[Tensor, "batch pos d_model"], tokens: Tokens) -> tuple[Tensor | None, ...]:
        """What the kernels take beside q, k and v."""
        rope = tokens.rope if self.config.linear_rope else (None, None)
        norms = (None, None) if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight)
        return *rope, self.a_proj(x), self.b_proj(x), self.A_log, self.dt_bias, *norms

    def constants(self) -> dict[str, float | bool]:
        return {"eps": self.config.base_config.rms_norm_eps, "negative_eigenvalues": self.config.negative_eigenvalues}

    def step(self, x: Float[Tensor, "batch pos d_model"], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        log_decay = -wide(self.A_log).exp() * F.softplus(wide(self.a_proj(x)) + wide(self.dt_bias))
        beta = wide(self.b_proj(x)).sigmoid() * (2 if self.config.negative_eigenvalues else 1)
        return unit(q), unit(k), v, log_decay, beta

    def recur(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        return delta_rule(q, k, v, log_decay, beta, initial_state=state, cu_seqlens=documents, backend=self.config.gdn_backend)


@cache
def index(order: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.long) -> Int[Tensor, "place"]:
    """On the device once: indexing with a list copies it there at every call, which a CUDA graph cannot."""
    with torch.inference_mode(False):
        return torch.tensor(order, dtype=dtype, device=device)


def unit(x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
    """Of length 1, with the epsilon of fla's kernels."""
    own = wide(x)
    return (own * (own.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def slow_decay(n_heads: int) -> Float[Tensor, "head"]:
    """Biases whose softplus is 1 / 1000 to 1 / 10, evenly on a logarithmic scale: with A = 1, heads that remember for 1000 to 10 tokens."""
    return torch.linspace(-math.log(LONGEST), -math.log(SHORTEST), n_heads).exp().expm1().log()


def _convolve(x: Float[Tensor, "batch past+pos width"], taps: Float[Tensor, "out tap"]) -> Float[Tensor, "batch pos out"]:
    return F.conv1d(x.transpose(1, 2), taps[:, None], groups=x.shape[2]).transpose(1, 2)


def causal_mask(n_queries: int, n_keys: int, device: torch.device) -> Bool[Tensor, "pos key"]:
    """The last query sees the last key."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries)
