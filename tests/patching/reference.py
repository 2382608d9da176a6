"""The slow references: one full forward of the transformers model per cell, with plain hooks."""

from contextlib import ExitStack

import torch

from hydralens.patching.metric import DECAY


def sites(hf, layer):
    """Modules of one layer: (z's projection, {q, k, v: projection}, attention, (q_norm, k_norm)); GPT-2's fused one for q, k and v."""
    if hf.config.model_type == "gpt2":
        attention = hf.transformer.h[layer].attn
        return attention.c_proj, {name: attention.c_attn for name in "qkv"}, attention
    attention = hf.model.layers[layer].self_attn
    return attention.o_proj, {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj}, attention


def site_slice(hf, component, head, head_dim):
    start = head * head_dim
    if hf.config.model_type == "gpt2" and component in "qkv":
        start += "qkv".index(component) * hf.config.n_embd
    return slice(start, start + head_dim)


def record(hf, tokens, component):
    """Per layer, the site's activations [pos, features] and attention's output [1, pos, d_model]."""
    kept, written, n_layers = {}, {}, hf.config.num_hidden_layers
    with ExitStack() as stack:
        for layer in range(n_layers):
            o, projections, attention = sites(hf, layer)
            if component == "z":
                handle = o.register_forward_pre_hook(lambda m, args, layer=layer: kept.__setitem__(layer, args[0][0].clone()))
            else:
                handle = projections[component].register_forward_hook(lambda m, args, out, layer=layer: kept.__setitem__(layer, out[0].clone()))
            stack.callback(handle.remove)
            handle = attention.register_forward_hook(lambda m, args, out, layer=layer: written.__setitem__(layer, out[0].clone()))
            stack.callback(handle.remove)
        logits = hf(input_ids=tokens[None], use_cache=False).logits[0]
    return kept, written, logits


def metric_of(logits, read, answer, foil, readout="span"):
    weights = DECAY ** torch.arange(len(answer), dtype=logits.dtype)
    if readout == "first":
        weights = torch.eye(len(answer), dtype=logits.dtype)[0]
    difference = logits[read].gather(1, answer[:, None])[:, 0] - logits[read].gather(1, foil[:, None])[:, 0]
    return (weights * difference).sum() / weights.sum()


@torch.no_grad()
def slow_effects(hf, pair, component, mode, direction, columns, n_heads, head_dim, readout="span"):
    """[layer, head] IE: for each head a full forward of the base prompt with the head's slice replaced at ``columns``."""
    base_tokens, source_tokens = (pair["clean"], pair["corrupt"]) if direction == "noise" else (pair["corrupt"], pair["clean"])
    _, written, base_logits = record(hf, base_tokens, component)
    source, _, source_logits = record(hf, source_tokens, component)

    def measure(logits):
        return metric_of(logits, pair["read"], pair["answer"], pair["foil"], readout)

    clean, corrupt = (measure(x) for x in ((base_logits, source_logits) if direction == "noise" else (source_logits, base_logits)))
    effects = torch.zeros(hf.config.num_hidden_layers, n_heads, dtype=base_logits.dtype)
    for layer in range(hf.config.num_hidden_layers):
        for head in range(n_heads):
            where = site_slice(hf, component, head, head_dim)

            def replace(x, layer=layer, where=where):
                x = x.clone()
                x[0, columns, where] = source[layer][columns, where]
                return x

            with ExitStack() as stack:
                o, projections, _ = sites(hf, layer)
                if component == "z":
                    handle = o.register_forward_pre_hook(lambda m, args: (replace(args[0]),))
                else:
                    handle = projections[component].register_forward_hook(lambda m, args, out: replace(out))
                stack.callback(handle.remove)
                for later in range(layer + 1, hf.config.num_hidden_layers) if mode == "direct" else ():
                    handle = sites(hf, later)[2].register_forward_hook(lambda m, args, out, later=later: (written[later], *out[1:]))
                    stack.callback(handle.remove)
                patched = measure(hf(input_ids=base_tokens[None], use_cache=False).logits[0])
            effects[layer, head] = ((clean - patched) if direction == "noise" else (patched - corrupt)) / (clean - corrupt)
    return effects
