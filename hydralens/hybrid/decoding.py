"""Decoding a token a call in memory of a fixed size: on a GPU one CUDA graph, without the host's share of the time.

    token -> embedding -> layers -> logits;   a layer:
    norm -> one product for the inputs of all heads -> full heads | Gated DeltaNet heads, side by side -> fusion -> o_proj -> norm -> MLP

The same numbers as the model's own forward, from the same weights; what differs is where they lie. Projections that read the same input are joined into one,
keys, values and states are written in place, and positions are counted on the device, so that nothing waits for the host.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from hydralens.errors import InputError
from hydralens.hybrid.backends import fusion_backend
from hydralens.hybrid.branches import FullHeads, GatedDeltaHeads, Rope, index
from hydralens.hybrid.cache import HybridCache, HybridLayer
from hydralens.hybrid.modeling import HybridLayerBlock, HydraHeadForCausalLM


class Decoder:
    """A hybrid that decodes one token of each of ``batch`` sequences a call, in room for ``n_most`` tokens each.

    All sequences have as many tokens. Beside the model it holds a second copy of the weights that read the residual stream.

        decoder = Decoder(hybrid, batch=1, n_most=4096)
        logits = decoder.start(prompt)                  # [batch vocab]; a new prompt begins anew
        while ...:
            logits = decoder.step(logits.argmax(-1))

    Attributes:
        n_tokens: in memory, of each sequence.

    Raises:
        InputError: a GPU or Triton is missing, or some heads are neither full ones without a window nor Gated DeltaNet without convolution.
    """

    @torch.no_grad()
    def __init__(self, model: HydraHeadForCausalLM, batch: int, n_most: int):
        fusion_backend(model.device, "triton")
        for place, block in enumerate(model.model.layers):
            _check(place, block)
        self.model, self.n_most, self.n_tokens = model, n_most, 0
        self.tokens = torch.zeros(batch, dtype=torch.long, device=model.device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=model.device)
        side = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self.layers = [_Layer(block, batch, n_most, side) for block in model.model.layers]
        self._run = self._forward if side is None else self._captured()

    @property
    def memory(self) -> list[dict[str, Tensor]]:
        """Of every layer ``full.k`` and ``full.v`` ``[batch kv_head n_most d_head]`` and ``gdn.state`` ``[batch head d_k d_v]``, where it has such heads."""
        return [layer.memory for layer in self.layers]

    @torch.no_grad()
    def start(self, input_ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch vocab"]:
        """Read prompts; the logits behind them. What was in memory is forgotten."""
        cache = HybridCache(len(self.layers))
        logits = self.model(input_ids, cache=cache, logits_to_keep=1).logits[:, -1]
        self.take(cache)
        return logits

    @torch.no_grad()
    def take(self, cache: HybridCache) -> None:
        """Go on where a cache ends, which is copied. It must be of a batch without padding.

        Raises:
            InputError: another number of sequences, or more tokens than there is room for.
        """
        n_tokens = cache.get_seq_length()
        batch = next(iter(cache.layers[0].tensors.values())).shape[0]
        if batch != len(self.tokens) or n_tokens > self.n_most:
            raise InputError(f"the cache holds {batch} sequences of {n_tokens} tokens, the decoder has room for {len(self.tokens)} of {self.n_most}")
        for layer, memory in zip(cache.layers, self.memory, strict=True):
            _copy(layer, memory)
        self.n_tokens = n_tokens
        self.lengths.fill_(n_tokens)

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "batch"]) -> Float[Tensor, "batch vocab"]:
        """Logits behind one more token of each sequence.

        Raises:
            InputError: memory is full.
        """
        if self.n_tokens == self.n_most:
            raise InputError(f"all {self.n_most} places of the decoder's memory are taken; make it with a larger n_most")
        self.tokens.copy_(tokens)
        self._run()
        self.n_tokens += 1
        return self.logits.clone()

    def _forward(self) -> None:
        """From ``tokens`` to ``logits``, and the lengths one up."""
        model = self.model.model
        residual = model.embed_tokens(self.tokens)
        cos, sin = model.rotary_emb(residual[:, None], self.lengths[:, None])
        rope, seen = (cos[:, 0], sin[:, 0]), self.lengths + 1
        for layer in self.layers:
            residual = layer(residual, rope, self.lengths, seen)
        self.logits = self.model.lm_head(_norm(model.norm, residual))
        self.lengths += 1

    def _captured(self) -> Callable[[], None]:
        """``_forward`` as one graph."""
        stream = torch.cuda.Stream(self.model.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles what a capture must not
            self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward()
        return graph.replay


class _Layer:
    """One layer, its memory, and its weights as they are read: ``joined`` projections of the normed residual stream."""

    def __init__(self, block: HybridLayerBlock, batch: int, n_most: int, side: torch.cuda.Stream | None):
        self.block, self.attention, self.side = block, block.self_attn, side
        branches = dict(self.attention.branches.items())
        self.full: FullHeads | None = branches.get("full")
        self.linear: GatedDeltaHeads | None = branches.get("gdn")
        self.memory: dict[str, Tensor] = {}
        weight = self.attention.o_proj.weight
        reads: dict[str, nn.Linear] = {}  # those of few outputs last: behind them rows no longer lie on 16 bytes
        for kind, branch in branches.items():
            reads |= {f"{kind}.{name}": branch.get_submodule(f"{name}_proj") for name in "qkv"}
        if self.full is not None:
            shape = (batch, len(self.full.kv_heads), n_most, self.full.head_dim)
            self.memory |= {name: weight.new_zeros(shape) for name in ("full.k", "full.v")}
            reads |= {} if self.full.gate is None else {"full.gate": self.full.gate}
            groups = [[query for query, own in enumerate(self.full.reads) if own == kv_head] for kv_head in range(shape[1])]
            widest = max(map(len, groups))
            self.queries = torch.tensor([own + [-1] * (widest - len(own)) for own in groups], dtype=torch.int32, device=weight.device)
        if self.linear is not None:
            shape = (batch, len(self.linear.heads), self.linear.head_dim, self.linear.head_dim)
            self.memory["gdn.state"] = weight.new_zeros(shape, dtype=torch.float32)
            reads |= {} if self.linear.gate is None else {"gdn.gate": self.linear.gate}
            reads |= {"gdn.a": self.linear.a_proj, "gdn.b": self.linear.b_proj}
        self.names, self.joined = list(reads), _Joined(list(reads.values()))
        self.gate_and_up = _Joined([block.mlp.gate_proj, block.mlp.up_proj])

    def __call__(self, residual: Float[Tensor, "batch d_model"], rope: Rope, lengths: Int[Tensor, "batch"], seen: Int[Tensor, "batch"]) -> Tensor:
        x = _norm(self.block.input_layernorm, residual)
        parts = dict(zip(self.names, self.joined(x), strict=True))
        if self.full is None or self.linear is None:
            outs = [self._full(parts, rope, lengths, seen) if self.linear is None else self._linear(parts, rope)]
        else:
            outs = _side_by_side(lambda: self._full(parts, rope, lengths, seen), lambda: self._linear(parts, rope), self.side)
        residual = _added(self.attention.o_proj, self._fused(outs, parts, x).flatten(1), residual)
        gate, up = self.gate_and_up(_norm(self.block.post_attention_layernorm, residual))
        return _added(self.block.mlp.down_proj, self.block.mlp.act_fn(gate) * up, residual)

    def _full(self, parts: dict[str, Tensor], rope: Rope, lengths: Tensor, seen: Tensor) -> Float[Tensor, "batch head d_head"]:
        from hydralens.hybrid.kernels.decode_append import append
        from hydralens.hybrid.kernels.decode_attention import decode_attention

        own, k, v = self.full, self.memory["full.k"], self.memory["full.v"]
        norms = (None, None) if own.q_norm is None else (own.q_norm.weight, own.k_norm.weight)
        tables, eps = rope if own.rope else (None, None), self.attention.config.base_config.rms_norm_eps
        q = append(*self._rows("full", parts), *tables, lengths, k, v, *norms, log_scale=own.log_scale, eps=eps)
        return decode_attention(q, k, v, self.queries, seen, scale=own.head_dim**-0.5)

    def _linear(self, parts: dict[str, Tensor], rope: Rope) -> Float[Tensor, "batch head d_head"]:
        from hydralens.hybrid.kernels.gdn_step import step

        own = self.linear
        norms = (None, None) if own.q_norm is None else (own.q_norm.weight, own.k_norm.weight)
        tables = rope if own.config.linear_rope else (None, None)
        gates = (parts["gdn.a"], parts["gdn.b"], own.A_log, own.dt_bias)
        return step(*self._rows("gdn", parts), *gates, *tables, self.memory["gdn.state"], *norms, **own.constants())

    def _rows(self, kind: str, parts: dict[str, Tensor]) -> list[Float[Tensor, "batch head d_head"]]:
        return [parts[f"{kind}.{name}"].unflatten(1, (-1, self.attention.config.head_dim)) for name in "qkv"]

    def _fused(self, outs: Sequence[Tensor], parts: dict[str, Tensor], x: Tensor) -> Float[Tensor, "batch head d_head"]:
        """In the base model's order, normalised, scaled and gated."""
        from hydralens.hybrid.kernels.fusion import fuse

        attention, rows = self.attention, [out[:, None] for out in outs]
        if attention.fusion is None or attention.fusion.together is not None:
            return attention.fuse(attention.ordered(rows) if len(rows) > 1 else rows[0], x[:, None])[:, 0]
        gates = [parts[f"{kind}.gate"].unflatten(1, (len(branch.heads), -1))[:, None] if branch.gate else None for kind, branch in attention.branches.items()]
        if len(rows) == 1:
            rows, gates = [*rows, rows[0][:, :, :0]], [*gates, None]
        return fuse(*rows, index(attention.place, x.device, torch.int32), attention.fusion.gamma, *gates, eps=attention.fusion.eps)[:, 0]


class _Joined:
    """Projections of the same input as one product."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self.weight, self.widths = torch.cat([layer.weight for layer in layers]), [layer.out_features for layer in layers]
        biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        self.bias = None if all(layer.bias is None for layer in layers) else torch.cat(biases)

    def __call__(self, x: Float[Tensor, "batch d_model"]) -> tuple[Tensor, ...]:
        return F.linear(x, self.weight, self.bias).split(self.widths, 1)


def _check(place: int, block: HybridLayerBlock) -> None:
    for kind, branch in block.self_attn.branches.items():
        if not (type(branch) is FullHeads and branch.window is None) and not (type(branch) is GatedDeltaHeads and branch.conv is None):
            known = "full heads without a window and Gated DeltaNet without convolution"
            raise InputError(f"layer {place} has heads of kind {kind!r} that a decoder does not know: it takes {known}; use generate()")


def _copy(layer: HybridLayer, memory: dict[str, Tensor]) -> None:
    for name, room in memory.items():
        own = layer.tensors[name]
        (room if name == "gdn.state" else room[:, :, : own.shape[2]]).copy_(own)


def _norm(norm: nn.Module, x: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch d_model"]:
    """As the base family's module, in one kernel."""
    return F.rms_norm(x, x.shape[1:], norm.weight, norm.variance_epsilon)


def _added(layer: nn.Linear, x: Tensor, residual: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch d_model"]:
    """What a projection adds to the residual stream, the sum part of the product."""
    return torch.addmm(residual if layer.bias is None else residual + layer.bias, x, layer.weight.T)


def _side_by_side(first: Callable[[], Tensor], second: Callable[[], Tensor], side: torch.cuda.Stream | None) -> list[Tensor]:
    """Both results; the second is made on another stream of the GPU where there is one."""
    if side is None:
        return [first(), second()]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = second()
    own = first()
    torch.cuda.current_stream().wait_stream(side)
    return [own, other]
