# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Patching by hand
#
# What `activation_patch` and `path_patch` do, once with nothing but forward hooks, and beside it the same through TransformerLens and nnsight.

# %%
import torch

import hydralens as hl

model = hl.load_model("embedded")
probe = hl.probes.niah(model, "niah_single_2", "swap", n_pairs=1, n_tokens=128, seed=0)
clean, corrupt = probe.clean, probe.corrupt
read, answer, foil = probe.read_positions[0, 0], probe.answer[0, 0], probe.foil[0, 0]
print(probe)

# %% [markdown]
# The metric is the lead of the right answer over the answer of the other prompt, in logits.


# %%
@torch.no_grad()
def metric(tokens):
    logits = model.hf(tokens).logits[0, read]
    return float(logits[answer] - logits[foil])


print(f"clean {metric(clean):+.2f}, corrupt {metric(corrupt):+.2f}")

# %% [markdown]
# ## Activation patching
#
# z is what a head gives to the output projection: its slice of the projection's INPUT. Behind the projection heads are mixed. We record z of the corrupt run and put one head's slice into the clean run.

# %%
width = model.info.head_dim


def record(layer, tokens):
    seen = {}
    handle = model.hf.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.update(z=args[0].clone()))
    with torch.no_grad():
        model.hf(tokens)
    handle.remove()
    return seen["z"]


def patched(layer, head, z):
    def insert(_, args):
        new = args[0].clone()
        new[:, :, head * width : (head + 1) * width] = z[:, :, head * width : (head + 1) * width]
        return (new,)

    handle = model.hf.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(insert)
    value = metric(clean)
    handle.remove()
    return value


layer = 23
z = record(layer, corrupt)
span = metric(clean) - metric(corrupt)
by_hand = torch.tensor([(metric(clean) - patched(layer, head, z)) / span for head in range(model.info.n_heads)])
by_hand

# %% [markdown]
# Each number is the share of the difference that this head alone accounts for. That took two forwards a head. The library measures all 270 at once:

# %%
effect = hl.activation_patch(model, probe, "z", mode="total", direction="noise", positions="all", readout="first")
print("largest difference in this layer:", float((effect.values[layer] - by_hand).abs().max()))
hl.figures.head_heatmap(effect)

# %% [markdown]
# ## Direct and total
#
# In the total effect everything behind the head may react. With later attention frozen, what is left goes straight to the answer, through residual stream and MLPs. A head with a total and no direct effect
# works through other heads.

# %%
direct = hl.activation_patch(model, probe, "z", mode="direct", direction="noise", positions="answer", readout="first")
top = direct.values.flatten().topk(5).indices
[(f"L{i // 9}H{i % 9}", round(float(direct.values.flatten()[i]), 2), round(float(effect.values.flatten()[i]), 2)) for i in top.tolist()]

# %% [markdown]
# ## Path patching
#
# Who tells these heads where to look? Change one sender, freeze every other head, read what that does to the receivers' queries, and insert only those queries into the clean run.

# %%
receivers = [divmod(i, model.info.n_heads) for i in top.tolist()]
senders = hl.path_patch(model, probe, receivers, "q", readout="first")
best = senders.values.nan_to_num().flatten().topk(5).indices
[(f"L{i // 9}H{i % 9}", round(float(senders.values.flatten()[i]), 3)) for i in best.tolist()]

# %% [markdown]
# ## The same through other libraries
#
# `backend=` runs the experiment through TransformerLens's or nnsight's own hooks. They are slow for a whole model, so a few heads are asked. Both come with `pip install 'hydralens[lens]'`; without them the cell says so.

# %%
asked = receivers[:2]
for backend in ("hooks", "transformer_lens", "nnsight"):
    try:
        own = hl.activation_patch(model, probe, "z", mode="total", positions="all", readout="first", heads=asked, backend=backend)
        print(f"{backend:17s}", [round(float(own.values[cell]), 5) for cell in asked])
    except hl.InputError as error:
        print(f"{backend:17s}", error)

# %% [markdown]
# ## Look at the heads
#
# Click on a head: what it looks at from the answer's position, what each probe loses without it, and the tokens that it raises and lowers.

# %%
probes = hl.probes.retrieval(model, n_pairs=2, n_tokens=128, shapes=("niah_single_2", "niah_multikey_1"), corruptions=("value", "swap"))
scores = hl.score_heads(model, probes, method="direct")
hl.widgets.head_explorer(model, probes, scores)

# %% [markdown]
# Next: [choosing a mask](04_choosing_a_mask.ipynb)
