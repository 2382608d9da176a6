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


def mlps(hf):
    return [block.mlp for block in (hf.transformer.h if hf.config.model_type == "gpt2" else hf.model.layers)]


def all_sites(hf, tokens):
    """Outputs of every q, k, v projection and MLP and inputs of every output projection in one forward: {(layer, site): [pos, features]}, logits."""
    kept = {}
    with ExitStack() as stack:
        for layer, mlp in enumerate(mlps(hf)):
            o, projections, _ = sites(hf, layer)
            stack.callback(o.register_forward_pre_hook(lambda m, args, at=(layer, "z"): kept.__setitem__(at, args[0][0].clone())).remove)
            stack.callback(mlp.register_forward_hook(lambda m, args, out, at=(layer, "mlp"): kept.__setitem__(at, out[0].clone())).remove)
            for name, module in projections.items():
                stack.callback(module.register_forward_hook(lambda m, args, out, at=(layer, name): kept.__setitem__(at, out[0].clone())).remove)
        return kept, hf(input_ids=tokens[None], use_cache=False).logits[0]


@torch.no_grad()
def run_with(hf, tokens, replaced):
    """One forward in which sites are replaced: {(layer, site): function of the site's [pos, features]}; all sites as they then are, and logits."""
    with ExitStack() as stack:
        for (layer, site), new in replaced.items():
            o, projections, _ = sites(hf, layer)
            if site == "z":
                handle = o.register_forward_pre_hook(lambda m, args, new=new: (new(args[0][0].clone())[None],))
            else:
                module = mlps(hf)[layer] if site == "mlp" else projections[site]
                handle = module.register_forward_hook(lambda m, args, out, new=new: new(out[0].clone())[None])
            stack.callback(handle.remove)
        return all_sites(hf, tokens)


@torch.no_grad()
def slow_path_effects(hf, pair, receivers, receiver_input, direction, columns, head_dim, *, freeze_mlps=False, second_pass="total"):
    """[layer, head] IE of every sender through the receivers: two full forwards a sender. GPT-2's fused projection is q, k and v at once."""
    base_tokens, source_tokens = (pair["clean"], pair["corrupt"]) if direction == "noise" else (pair["corrupt"], pair["clean"])
    base, base_logits = all_sites(hf, base_tokens)
    source, source_logits = all_sites(hf, source_tokens)
    n_layers, n_heads = hf.config.num_hidden_layers, hf.config.num_attention_heads
    group = n_heads // (n_heads if hf.config.model_type == "gpt2" else hf.config.num_key_value_heads)
    last = max(layer for layer, _ in receivers)

    def measure(logits):
        return metric_of(logits, pair["read"], pair["answer"], pair["foil"])

    def put(where, values, at=columns):
        def new(x):
            x[at[:, None], torch.arange(x.shape[1])[where]] = values[at][:, where]
            return x

        return new

    clean, corrupt = (measure(x) for x in ((base_logits, source_logits) if direction == "noise" else (source_logits, base_logits)))
    effects = torch.full((n_layers, n_heads), torch.nan, dtype=base_logits.dtype)
    for layer in range(last):
        for head in range(n_heads):
            sender = site_slice(hf, "z", head, head_dim)
            frozen = {(other, "z"): lambda x, other=other: base[other, "z"].clone() for other in range(n_layers)}
            frozen[layer, "z"] = lambda x, layer=layer, sender=sender: put(sender, source[layer, "z"])(base[layer, "z"].clone())
            if freeze_mlps:
                frozen |= {(other, "mlp"): lambda x, other=other: base[other, "mlp"].clone() for other in range(n_layers)}
            seen, _ = run_with(hf, base_tokens, frozen)
            second = {}
            if second_pass == "direct":  # all inputs and all outputs held, but for the receivers' replaced input and the z of its readers
                for other in range(n_layers):
                    for name in receiver_input if hf.config.model_type == "gpt2" else "qkv":
                        second[other, name] = lambda x, at=(other, name): base[at].clone()
                    reading = [h for r, h in receivers if r == other]
                    kept = [h for h in range(n_heads) if (h if receiver_input == "q" else h // group) not in reading]
                    where = torch.cat([torch.arange(h * head_dim, (h + 1) * head_dim) for h in kept] or [torch.arange(0)]).long()
                    second[other, "z"] = put(where, base[other, "z"], torch.arange(len(base_tokens)))
            for r, _ in receivers:
                at, heads = (r, receiver_input), [h for other, h in receivers if other == r]
                where = torch.cat([torch.arange(10**4)[site_slice(hf, receiver_input, h, head_dim)] for h in heads])
                before = second.get(at, lambda x: x) if second_pass == "direct" else lambda x: x
                change = put(where, seen[at])
                second[at] = lambda x, before=before, change=change: change(before(x))
            _, logits = run_with(hf, base_tokens, second)
            patched = measure(logits)
            effects[layer, head] = ((clean - patched) if direction == "noise" else (patched - corrupt)) / (clean - corrupt)
    return effects
