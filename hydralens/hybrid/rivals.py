"""The kinds of heads that other hybrids use instead of Gated DeltaNet, so that they can be compared under one roof.

All linear ones run token by token through ``linear_recurrence``: the reference, not a fast path.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from hydralens.hybrid.branches import FullHeads, LinearHeads, slow_decay, unit, wide
from hydralens.hybrid.config import HydraHeadConfig

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


RIVALS = {own.kind: own for own in (WindowHeads, KimiDeltaHeads, LightningHeads, GatedLinearHeads, Mamba2Heads)}
