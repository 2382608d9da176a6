"""Decoding with a whole Qwen3-1.7B-shaped model: the 7:1 hybrid beside the base model, which is a hybrid of full heads alone in the same runtime.

Two runtimes: the model's own forward with a cache that grows, as ``generate`` calls it, and ``Decoder``, one CUDA graph a token.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hydralens.bench.gpu import AS_BASE, copy_bandwidth, free, median_ms, n_bytes, qwen3, random_model, relative, spread_mask
from hydralens.bench.report import Report
from hydralens.hybrid import Decoder, HybridCache, HydraHeadForCausalLM, build_hybrid

TOKENS = 96  # on which logits are compared


@torch.no_grad()
def main(report: Report) -> None:
    bandwidth = copy_bandwidth(report)
    report.note(f"copy: {bandwidth / 1e12:.3g} TB/s; the limit of a row is weights and keys read once and states read and written once at this rate")
    base = random_model(qwen3(report.small), report)
    mask = spread_mask(base.config.num_hidden_layers, base.config.num_attention_heads)
    models = {"base": build_hybrid(base, torch.ones_like(mask), **AS_BASE), "7:1": build_hybrid(base, mask)}
    tokens = torch.randint(base.config.vocab_size, (1, TOKENS), device=report.device)
    as_hybrid = relative(models["base"](tokens).logits, base(tokens).logits)
    in_steps = relative(by_token(models["7:1"], tokens), models["7:1"](tokens).logits)
    report.note(f"relative error of the logits: base as a hybrid against transformers {as_hybrid:.2g}; hybrid token by token against at once {in_steps:.2g}")
    runtimes = {"forward": forward_step}
    if report.device.type == "cuda":
        runtimes["graph"] = graph_step
        errors = {name: relative(by_graph(model, tokens), model(tokens).logits[:, TOKENS // 2 - 1 :]) for name, model in models.items()}
        report.note(", ".join(f"{name} in a graph against at once {error:.2g}" for name, error in errors.items()))
    del base
    free(report.device)
    for batch, context in ((1, 64), (2, 128)) if report.small else ((1, 32768), (1, 131072), (1, 524288), (64, 32768)):
        for runtime, step in runtimes.items():
            base_speed = None
            for name, model in models.items():
                held = model.cache_bytes(context, batch)
                values = {
                    "batch": batch,
                    "context": context,
                    "runtime": runtime,
                    "model": name,
                    "KV GiB": held["kv"] / 2**30,
                    "state GiB": held["state"] / 2**30,
                }
                if not fits(model, held, report):
                    report.row("decode", **values, **dict.fromkeys(("tokens/s", "limit tokens/s", "ours / limit", "times base")))
                    report.note(f"batch {batch}, {context} tokens: the cache of {name}, {held['hybrid'] / 2**30:.0f} GiB, does not fit")
                    continue
                speed = 1e3 * batch / median_ms(step(model, batch, context), model.device)
                limit = batch * bandwidth / (n_bytes(*model.parameters()) + held["kv"] + 2 * held["state"])
                base_speed = speed if name == "base" else base_speed
                times = None if base_speed is None else speed / base_speed
                report.row("decode", **values, **{"tokens/s": speed, "limit tokens/s": limit, "ours / limit": speed / limit, "times base": times})
                free(report.device)


def by_token(model: HydraHeadForCausalLM, tokens: Tensor) -> Tensor:
    """Logits of all positions, the second half decoded one at a time."""
    half, cache = tokens.shape[1] // 2, HybridCache(model.config.num_hidden_layers)
    logits = [model(tokens[:, :half], cache=cache).logits]
    logits += [model(tokens[:, place : place + 1], cache=cache).logits for place in range(half, tokens.shape[1])]
    return torch.cat(logits, 1)


def by_graph(model: HydraHeadForCausalLM, tokens: Tensor) -> Tensor:
    """Logits of the second half and of the position before it."""
    half, decoder = tokens.shape[1] // 2, Decoder(model, len(tokens), tokens.shape[1])
    return torch.stack([decoder.start(tokens[:, :half]), *(decoder.step(tokens[:, place]) for place in range(half, tokens.shape[1]))], 1)


def fits(model: HydraHeadForCausalLM, held: dict[str, int], report: Report) -> bool:
    """Whether the cache fits, and beside it one layer's part as it is copied to grow and repeated to the query heads."""
    if report.device.type == "cpu":
        return True
    free(report.device)
    return held["hybrid"] * (1 + 4 / model.config.num_hidden_layers) < 0.95 * torch.cuda.mem_get_info()[0]


def forward_step(model: HydraHeadForCausalLM, batch: int, context: int) -> Callable[[], None]:
    """The likeliest next token of all rows together, behind a cache of ``context`` random tokens."""
    cache = random_cache(model, batch, context)
    token = torch.randint(model.config.vocab_size, (batch, 1), device=model.device)
    return lambda: token.copy_(model(token, cache=cache).logits.argmax(-1))


def graph_step(model: HydraHeadForCausalLM, batch: int, context: int) -> Callable[[], None]:
    """The same by a decoder, which decodes the last place again and again."""
    decoder = Decoder(model, batch, context)
    for memory in decoder.memory:
        for tensor in memory.values():
            tensor.normal_()
    token = torch.randint(model.config.vocab_size, (batch,), device=model.device)

    def step() -> None:
        decoder.n_tokens = context - 1
        decoder.lengths.fill_(context - 1)
        token.copy_(decoder.step(token).argmax(-1))

    return step


def random_cache(model: HydraHeadForCausalLM, batch: int, context: int) -> HybridCache:
    """What a prompt of ``context`` tokens leaves, with random numbers in it."""
    config = model.config
    cache = HybridCache(config.num_hidden_layers)
    for layer, block in zip(cache.layers, model.model.layers, strict=True):
        layer.n_tokens = context
        for kind, branch in block.self_attn.branches.items():
            if kind == "full":
                shape = (batch, len(branch.kv_heads), context, config.head_dim)
                layer.tensors |= {f"full.{name}": torch.randn(shape, device=model.device, dtype=model.dtype) for name in ("k", "v")}
            else:
                shape = (batch, len(branch.heads), config.head_dim, config.head_dim)
                layer.tensors[f"{kind}.state"] = torch.randn(shape, device=model.device)
    return cache
