"""The two kinds of heads. A branch maps hidden states to the outputs of its own heads, with projections of its own (HydraHead section 2)."""

import math
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from hydralens.hybrid.backends import delta_rule
from hydralens.hybrid.cache import HybridLayer
from hydralens.hybrid.config import HydraHeadConfig
from hydralens.models.anatomy import Rope, rotate

LONGEST, SHORTEST = 1e3, 10.0  # tokens after which a linear head has forgotten all but 1/e of a token, at the start of training


@dataclass(frozen=True, eq=False)
class Tokens:
    """What every layer is told about the tokens of a call.

    Attributes:
        positions: each token's place in its document.
        rope: cosines and sines at the positions.
        real: False for padding; None where there is none.
        visible: which keys each query sees, for the full heads; None where plain causality says it.
        documents: where packed documents start, and the end of the last; batch is 1 then.
    """

    positions: Int[Tensor, "batch pos"]
    rope: Rope
    real: Bool[Tensor, "batch pos"] | None
    visible: Bool[Tensor, "batch 1 pos key"] | None
    documents: Int[Tensor, "n"] | None


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
        self.gate = None if gate is None else nn.Linear(d_model, len(heads) * (self.head_dim if gate == "channel" else 1), bias=False)

    def split(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos head d_head"]:
        return rearrange(x, "batch pos (head d_head) -> batch pos head d_head", d_head=self.head_dim)

    def gates(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos head d_or_1"]:
        """2 sigmoid(W x): 1 at the start, where W is 0; ones without a gate."""
        if self.gate is None:
            return x.new_ones(*x.shape[:2], len(self.heads), 1)
        return 2 * rearrange(self.gate(x), "batch pos (head d) -> batch pos head d", head=len(self.heads)).sigmoid()


class FullHeads(Branch):
    """Softmax attention without RoPE, its queries growing with the length of the context (section 2.2).

    Of a KV group that the mask splits, only the KV heads that a full head reads are projected and cached.
    """

    def __init__(self, config: HydraHeadConfig, layer: int, heads: list[int], qk_norm: nn.Module | None, bias: bool):
        group = config.num_attention_heads // config.num_key_value_heads
        kv_heads = sorted({head // group for head in heads})
        super().__init__(config, heads, kv_heads, qk_norm, bias, config.full_gate)
        self.config, self.window = config, config.window(layer)
        self.reads = [kv_heads.index(head // group) for head in heads]

    def forward(self, x: Float[Tensor, "batch pos d_model"], tokens: Tokens, memory: HybridLayer | None) -> Float[Tensor, "batch pos head d_head"]:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # [batch head pos d_head]
        if self.config.full_rope:
            q, k = rotate(q, tokens.rope), rotate(k, tokens.rope)
        if self.config.log_scale is not None and (self.config.log_scale_in_training or not self.training):
            # In float32: in bfloat16 positions above 256 are no longer told apart.
            scale = (tokens.positions.float() + self.config.log_scale).log() / math.log(self.config.log_scale)
            q = (q * scale[:, None, :, None]).to(q.dtype)
        if memory is not None:
            k, v = memory.append("full.k", k), memory.append("full.v", v)
        k, v = k[:, self.reads], v[:, self.reads]
        visible = self._visible(tokens, q.shape[2], k.shape[2], q.device)
        # Causality is told by is_causal only where queries and keys are the same tokens: it aligns the first query with the first key.
        causal = visible is None and q.shape[2] == k.shape[2] and q.shape[2] > 1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal).transpose(1, 2)

    def _visible(self, tokens: Tokens, n_queries: int, n_keys: int, device: torch.device) -> Bool[Tensor, "batch 1 pos key"] | None:
        visible = tokens.visible
        if self.window is None or self.window >= n_keys:
            if visible is None and 1 < n_queries < n_keys:
                return causal_mask(n_queries, n_keys, device)
            return visible
        near = causal_mask(n_queries, n_keys, device).triu(n_keys - n_queries - self.window + 1)
        return near if visible is None else visible & near


class GatedDeltaHeads(Branch):
    """Gated DeltaNet with RoPE, every query head with a key and value head of its own (section 2.3).

        S_t = alpha_t S_{t-1} + beta_t k_t (v_t - (alpha_t S_{t-1})^T k_t)^T,   o_t = S_t^T q_t,
        alpha_t = exp(-exp(A_log) softplus(W_a x_t + dt_bias)),   beta_t = sigmoid(W_b x_t),   q and k of length 1.

    Padding neither decays the state nor is written to it.
    """

    def __init__(self, config: HydraHeadConfig, layer: int, heads: list[int], qk_norm: nn.Module | None, bias: bool):
        group = config.num_attention_heads // config.num_key_value_heads
        super().__init__(config, heads, [head // group for head in heads], qk_norm, bias, config.linear_gate)
        self.config = config
        self.a_proj = nn.Linear(config.hidden_size, len(heads), bias=False)
        self.b_proj = nn.Linear(config.hidden_size, len(heads), bias=False)
        self.A_log = nn.Parameter(torch.empty(len(heads), dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(len(heads), dtype=torch.float32))
        taps = config.linear_conv
        width = len(heads) * config.head_dim
        self.conv = None if taps is None else nn.ParameterDict({name: nn.Parameter(torch.empty(width, taps)) for name in ("q", "k", "v")})
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Slow decay, its time spread over the heads from 1000 to 10 tokens, beta 1/2, a convolution that is the identity.

        Gated DeltaNet's own start from scratch (A up to 16) would make half of the heads forget within a token or two.
        """
        self.a_proj.weight.zero_()
        self.b_proj.weight.zero_()
        self.A_log.zero_()
        dt = torch.linspace(-math.log(LONGEST), -math.log(SHORTEST), len(self.heads), device=self.dt_bias.device).exp()
        self.dt_bias.copy_(dt.expm1().log())  # softplus(dt_bias) = dt
        for taps in () if self.conv is None else self.conv.values():
            taps.zero_()
            taps[:, -1] = 1

    def forward(self, x: Float[Tensor, "batch pos d_model"], tokens: Tokens, memory: HybridLayer | None) -> Float[Tensor, "batch pos head d_head"]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.conv is not None:
            q, k, v = (self._convolved(name, y, tokens, memory) for name, y in (("q", q), ("k", k), ("v", v)))
        q, k, v = self.split(q), self.split(k), self.split(v)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.config.linear_rope:
            q, k = (rotate(y.transpose(1, 2), tokens.rope).transpose(1, 2) for y in (q, k))
        q, k = F.normalize(q.float(), dim=-1).to(v.dtype), F.normalize(k.float(), dim=-1).to(v.dtype)
        log_decay = -self.A_log.float().exp() * F.softplus(self.a_proj(x).float() + self.dt_bias.float())
        beta = self.b_proj(x).float().sigmoid() * (2 if self.config.negative_eigenvalues else 1)
        if tokens.real is not None:
            log_decay, beta = (y * tokens.real[..., None] for y in (log_decay, beta))
        state = None if memory is None else memory.tensors.get("gdn.state")
        out, state = delta_rule(q, k, v, log_decay, beta, initial_state=state, cu_seqlens=tokens.documents, backend=self.config.gdn_backend)
        if memory is not None:
            memory.tensors["gdn.state"] = state
        return out

    def _convolved(self, name: str, x: Float[Tensor, "batch pos width"], tokens: Tokens, memory: HybridLayer | None) -> Float[Tensor, "batch pos width"]:
        """Causal convolution over the real tokens of each document, the last inputs of the call before in front."""
        taps = self.conv[name]
        n_past = taps.shape[1] - 1
        if tokens.documents is not None:
            starts = tokens.documents.tolist()
            parts = [x[:, start:stop] for start, stop in zip(starts, starts[1:], strict=False)]
            return torch.cat([_convolve(F.pad(part, (0, 0, n_past, 0)), taps) for part in parts], 1)
        past = None if memory is None else memory.tensors.get(f"gdn.conv.{name}")
        if past is None:
            past = x.new_zeros(x.shape[0], n_past, x.shape[2])
        if tokens.real is None:
            joined = torch.cat([past, x], 1)
            if memory is not None:
                memory.tensors[f"gdn.conv.{name}"] = joined[:, -n_past:]
            return _convolve(joined, taps)
        # Real tokens are moved together, to the right end, so that no tap falls on padding; afterwards everything goes back to its place.
        order = tokens.real.long().argsort(dim=1, stable=True)[..., None].expand_as(x)
        real = tokens.real.sum(1)
        packed = x.gather(1, order)
        rows, n_pos = torch.arange(x.shape[0], device=x.device)[:, None], x.shape[1]
        joined = torch.cat([torch.zeros_like(past), packed], 1)
        # The past stands directly before the first real token.
        place = n_pos - real[:, None] + torch.arange(n_past, device=x.device)
        joined = joined.index_put((rows, place), past)
        if memory is not None:
            memory.tensors[f"gdn.conv.{name}"] = joined[:, -n_past:]
        return torch.zeros_like(x).scatter(1, order, _convolve(joined, taps))


def _convolve(x: Float[Tensor, "batch past+pos width"], taps: Float[Tensor, "width tap"]) -> Float[Tensor, "batch pos width"]:
    return F.conv1d(x.transpose(1, 2), taps[:, None], groups=taps.shape[0]).transpose(1, 2)


def causal_mask(n_queries: int, n_keys: int, device: torch.device) -> Bool[Tensor, "pos key"]:
    """The last query sees the last key."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries)


BRANCHES = {"full": FullHeads, "gdn": GatedDeltaHeads}
