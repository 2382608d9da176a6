"""The kinds of heads that other hybrids use instead of Gated DeltaNet, so that they can be compared under one roof.

All linear ones but JetBlock's run token by token through ``linear_recurrence``: the reference, not a fast path.
"""

from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hydralens.hybrid.branches import Branch, FullHeads, GatedDeltaHeads, LinearHeads, Tokens, slow_decay, unit, wide
from hydralens.hybrid.cache import HybridLayer
from hydralens.hybrid.config import HydraHeadConfig
from hydralens.models.attention import SCORES_AT_ONCE

Step = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class WindowHeads(FullHeads):
    """The base model's own attention, RoPE included, limited to the first ``sinks`` tokens and the last ``window_size`` (DuoAttention, arXiv 2410.10819).

    The cache holds no more of them either.
    """

    kind = "window"

    def __init__(self, config: HydraHeadConfig, layer: int, heads: list[int], qk_norm: nn.Module | None, bias: bool):
        super().__init__(config, layer, heads, qk_norm, bias)
        self.rope, self.log_scale, self.gate = True, None, None
        self.window, self.sinks = min(self.window or config.window_size, config.window_size), config.sinks


class MobaHeads(FullHeads):
    """The base model's own attention, RoPE included, to a few blocks of keys (MoBA, arXiv 2502.13189).

    A query sees its own block up to itself, and of the blocks before it those ``moba_top - 1`` whose mean key has the largest product with it. Blocks are
    ``moba_block`` positions of a document. No parameter is new; the cache grows as a full head's; what is not seen is masked, not skipped. Blocks stand in for
    a sliding window of the base model.
    """

    kind, by_position = "moba", True

    def __init__(self, config: HydraHeadConfig, layer: int, heads: list[int], qk_norm: nn.Module | None, bias: bool):
        super().__init__(config, layer, heads, qk_norm, bias)
        self.rope, self.log_scale, self.gate, self.window = True, None, None, None
        self.block, self.top = config.moba_block, config.moba_top

    def forward(self, x: Float[Tensor, "batch pos d_model"], tokens: Tokens, memory: HybridLayer | None) -> Float[Tensor, "batch pos head d_head"]:
        q, k, v = self.project(x, tokens)
        positions = tokens.positions if tokens.real is None else tokens.positions.masked_fill(~tokens.real, -1)
        query, key = (y.expand(len(q), -1) for y in (tokens.positions, positions))
        if tokens.documents is not None:
            pieces = pairwise(tokens.documents.tolist())
            k, v = self._read(k, v)
            return torch.cat([self._attend(*(y[:, :, i:j] for y in (q, k, v)), query[:, i:j], key[:, i:j]) for i, j in pieces], 1)
        if memory is not None:
            k, v = memory.append(f"{self.kind}.k", k), memory.append(f"{self.kind}.v", v)
            key = memory.append(f"{self.kind}.positions", key[:, None].int())[:, 0]
        return self._attend(q, *self._read(k, v), query, key)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, query: Int[Tensor, "batch pos"], key: Int[Tensor, "batch key"]
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Attention of some queries at a time; ``query`` and ``key`` are positions, of padding -1."""
        n_old, out = k.shape[2] - q.shape[2], []
        places, queries = torch.arange(k.shape[2], device=q.device), max(1, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * k.shape[2]))
        n_blocks = int(torch.maximum(query.max(), key.max())) // self.block + 1
        block = torch.where(key < 0, n_blocks, key.long() // self.block)  # padding fills a block after the last
        means = self._means(k, block, n_blocks)
        for own, at, place in zip(q.split(queries, 2), query.split(queries, 1), places[n_old:].split(queries), strict=True):
            chosen = F.pad(self._chosen(own, means, at // self.block), (0, 1))
            visible = chosen.gather(-1, block[:, None, None].expand(-1, *own.shape[1:3], -1)) & (key[:, None, None] <= at[:, None, :, None])
            visible |= places == place[:, None]  # padding sees itself, or its softmax would be over nothing
            out.append(F.scaled_dot_product_attention(own, k, v, attn_mask=visible))
        return torch.cat(out, 2).transpose(1, 2)

    @staticmethod
    @torch.no_grad()
    def _means(k: Float[Tensor, "batch head key d_head"], block: Int[Tensor, "batch key"], n_blocks: int) -> Float[Tensor, "batch head block d_head"]:
        sums = wide(k).new_zeros(*k.shape[:2], n_blocks + 1, k.shape[3])
        return sums.scatter_reduce(2, block[:, None, :, None].expand_as(k), wide(k), "mean", include_self=False)[:, :, :n_blocks]

    @torch.no_grad()
    def _chosen(
        self, q: Float[Tensor, "batch head pos d_head"], means: Float[Tensor, "batch head block d_head"], own: Int[Tensor, "batch pos"]
    ) -> Bool[Tensor, "batch head pos block"]:
        """The blocks that each query sees; where there are fewer before it, later ones too."""
        with torch.autocast(q.device.type, enabled=False):  # bfloat16 would not tell blocks apart
            scores = wide(q) @ means.transpose(-1, -2)
        own = own[:, None, :, None]
        blocks = torch.arange(means.shape[2], device=q.device)
        scores = scores.masked_fill(blocks > own, -torch.inf).masked_fill(blocks == own, torch.inf)
        best = scores.topk(min(self.top, len(blocks)), -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)


class KimiDeltaHeads(LinearHeads):
    """Kimi Delta Attention (arXiv 2510.26692): Gated DeltaNet with a decay of its own for every key channel.

    The channels' decays come from a projection of rank d_head, whose second factor starts at 0.
    """

    kind = "kda"

    def make(self) -> None:
        width = len(self.heads) * self.head_dim
        self.down_proj = nn.Linear(self.config.hidden_size, self.head_dim, bias=False)
        self.up_proj = nn.Linear(self.head_dim, width, bias=False)
        self.b_proj = nn.Linear(self.config.hidden_size, len(self.heads), bias=False)
        self.A_log = nn.Parameter(torch.empty(len(self.heads), dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=torch.float32))

    @torch.no_grad()
    def start(self) -> None:
        super().start()
        nn.init.normal_(self.down_proj.weight, std=self.config.hidden_size**-0.5)
        self.up_proj.weight.zero_()
        self.b_proj.weight.zero_()
        self.A_log.zero_()
        self.dt_bias.copy_(slow_decay(len(self.heads)).repeat_interleave(self.head_dim))

    def step(self, x: Float[Tensor, "batch pos d_model"], q: Tensor, k: Tensor, v: Tensor) -> Step:
        dt = F.softplus(wide(self.up_proj(self.down_proj(x))) + wide(self.dt_bias))
        return unit(q), unit(k), v, -wide(self.A_log).exp()[:, None] * self.split(dt), wide(self.b_proj(x)).sigmoid()


class LightningHeads(LinearHeads):
    """Lightning attention: a constant decay that differs from head to head.

    ``lightning="minimax"`` (arXiv 2506.13585): SiLU on q, k and v, no RoPE, slopes 2^(-8 (h + 1) / H) that shrink towards the last layer.
    ``lightning="hypenet"`` (arXiv 2601.22156): q and k as the base model has them, with RoPE; the same slopes in every layer.
    """

    kind, delta = "lightning", False

    @property
    def rope(self) -> bool:
        return self.config.lightning == "hypenet"

    def step(self, x: Float[Tensor, "batch pos d_model"], q: Tensor, k: Tensor, v: Tensor) -> Step:
        config = self.config
        slope = 2.0 ** (-8 * (torch.tensor(self.heads, device=x.device) + 1) / config.num_attention_heads)
        if config.lightning == "minimax":
            slope = slope * (1 - self.layer / (config.num_hidden_layers - 1 + 1e-5) + 1e-5)
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        else:
            q = q * self.head_dim**-0.5
        every = torch.ones(q.shape[:3], device=x.device)
        return q, k, v, -slope * every, every


class GatedLinearHeads(LinearHeads):
    """Gated linear attention as Liger takes it from a pretrained model: no new parameter, the decay is read off the key.

    q and k through a softmax over channels, log alpha = logsigmoid(k) / 16 of the raw key, no RoPE.
    """

    kind, delta, rope = "gla", False, False

    def step(self, x: Float[Tensor, "batch pos d_model"], q: Tensor, k: Tensor, v: Tensor) -> Step:
        return q.softmax(-1), k.softmax(-1), v, F.logsigmoid(wide(k)) / 16, torch.ones(q.shape[:3], device=x.device)


class Mamba2Heads(LinearHeads):
    """Mamba-2 (arXiv 2405.21060) with C, B and x from the rows of q, k and v, as MambaInLlama maps them; no RoPE.

    dt = softplus(W_dt u + dt_bias),   S <- exp(-dt exp(A_log)) S + dt B x^T,   y = S^T C + D x
    """

    kind, delta, rope = "mamba2", False, False

    def make(self) -> None:
        self.dt_proj = nn.Linear(self.config.hidden_size, len(self.heads), bias=False)
        self.A_log, self.dt_bias, self.D = (nn.Parameter(torch.empty(len(self.heads), dtype=torch.float32)) for _ in range(3))

    @torch.no_grad()
    def start(self) -> None:
        super().start()
        self.dt_proj.weight.zero_()
        self.A_log.zero_()
        self.dt_bias.copy_(slow_decay(len(self.heads)))
        self.D.fill_(1)

    def step(self, x: Float[Tensor, "batch pos d_model"], q: Tensor, k: Tensor, v: Tensor) -> Step:
        dt = F.softplus(wide(self.dt_proj(x)) + wide(self.dt_bias))
        if self.conv is not None:  # Mamba's activation belongs to its convolution; without it the base model's values keep their sign
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        return q, k, v, -wide(self.A_log).exp() * dt, dt

    def recur(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        out, last = super().recur(q, k, v, log_decay, beta, state, documents)
        return out + (wide(self.D)[:, None] * wide(v)).to(out.dtype), last


class JetHeads(GatedDeltaHeads):
    """JetBlock (arXiv 2508.15884), its keys and values as wide as the base model's heads: Gated DeltaNet with a convolution of v that each token computes.

    taps_t = b + W_up silu(W_down x_t), one a channel and place; W_down is an eighth as wide as the heads, W_up starts at 0; SiLU behind. q and k have SiLU
    alone, and no RoPE.
    """

    kind, rope, convolved = "jet", False, ("v",)

    def make(self) -> None:
        super().make()
        if self.conv is not None:
            rank = self.config.num_attention_heads * self.head_dim // 8
            self.down_proj = nn.Linear(self.config.hidden_size, rank, bias=False)
            self.up_proj = nn.Linear(rank, self.conv["v"].numel(), bias=False)

    @torch.no_grad()
    def start(self) -> None:
        super().start()
        if self.conv is not None:
            nn.init.normal_(self.down_proj.weight, std=self.config.hidden_size**-0.5)
            self.up_proj.weight.zero_()

    def convolve(
        self, name: str, y: Float[Tensor, "batch pos width"], x: Float[Tensor, "batch pos d_model"], tokens: Tokens, memory: HybridLayer | None
    ) -> Float[Tensor, "batch pos width"]:
        taps = self.conv[name]
        own = taps + self.up_proj(F.silu(self.down_proj(x))).unflatten(-1, taps.shape)
        unit_taps = torch.eye(taps.shape[1], dtype=y.dtype, device=y.device).repeat(taps.shape[0], 1)
        inputs = self.over_past(name, unit_taps, y, tokens, memory)  # the last of every channel, side by side
        return (inputs.unflatten(-1, taps.shape) * own).sum(-1).to(y.dtype)

    def step(self, x: Float[Tensor, "batch pos d_model"], q: Tensor, k: Tensor, v: Tensor) -> Step:
        return super().step(x, F.silu(q), F.silu(k), v if self.conv is None else F.silu(v))


class ParallelHeads(nn.Module):
    """Two mixers on every head, each with projections of its own that start from the head's rows. A head's output is the mean of the two.

    Attributes:
        mixers: their kinds.
        normed: what a mixer gives, gated, is RMS-normed first, all heads of the layer together, with a learned weight.
    """

    kind: str
    mixers: tuple[type[Branch], type[Branch]]
    normed = False
    gate = None  # gates are the mixers' own
    gates = Branch.gates

    def __init__(self, config: HydraHeadConfig, layer: int, heads: list[int], qk_norm: nn.Module | None, bias: bool):
        super().__init__()
        self.heads, self.head_dim = heads, config.head_dim
        self.parts = nn.ModuleList([mixer(config, layer, heads, qk_norm, bias) for mixer in self.mixers])
        for part in self.parts:
            part.kind = f"{self.kind}.{part.kind}"  # the name of its memory: other heads of the layer may be of this kind alone
        norm = partial(LlamaRMSNorm, len(heads) * config.head_dim, eps=config.base_config.rms_norm_eps) if self.normed else nn.Identity
        self.norms = nn.ModuleList([norm() for _ in self.mixers])

    def forward(self, x: Float[Tensor, "batch pos d_model"], tokens: Tokens, memory: HybridLayer | None) -> Float[Tensor, "batch pos head d_head"]:
        out = [norm((part(x, tokens, memory) * part.gates(x)).flatten(2)) for part, norm in zip(self.parts, self.norms, strict=True)]
        return (sum(out) / len(out)).unflatten(-1, (len(self.heads), self.head_dim))


class LigerHeads(ParallelHeads):
    """Liger attention (arXiv 2503.01496): half a window, half gated linear attention."""

    kind, mixers = "window+gla", (WindowHeads, GatedLinearHeads)


class HymbaHeads(ParallelHeads):
    """A window and a state space on every head, as in Hymba (arXiv 2411.13676), with Mamba-2 for its Mamba-1."""

    kind, mixers, normed = "window+mamba2", (WindowHeads, Mamba2Heads), True


RIVALS = {own.kind: own for own in (WindowHeads, MobaHeads, KimiDeltaHeads, LightningHeads, GatedLinearHeads, Mamba2Heads, JetHeads, LigerHeads, HymbaHeads)}
