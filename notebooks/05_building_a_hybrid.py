# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Building and using a hybrid
#
# A mask names the heads that keep full attention. Here the model is built in which every other head is Gated DeltaNet: a head with a state of fixed size instead of a cache that grows with every token.

# %%
import tempfile
from pathlib import Path

import pandas as pd
import torch

import hydralens as hl

model = hl.load_model("embedded")
probes = hl.probes.retrieval(model, n_pairs=2, n_tokens=160, shapes=("niah_single_2",))
scores = hl.score_heads(model, probes)
mask = hl.select_heads(scores, ratio="7:1")
hl.figures.head_heatmap(scores, mask)

# %% [markdown]
# Two pairs of one probe are enough to show the way; a mask to keep is made by `hydralens run`.
#
# ## The hybrid

# %%
hybrid = hl.build_hybrid(model, mask, calibration=probes[0].clean[:1])
print(f"{sum(p.numel() for p in hybrid.parameters()) / 1e6:.0f}M parameters, {sum(p.numel() for p in model.hf.parameters()) / 1e6:.0f}M in the base model")
hybrid.model.layers[int(mask.array.sum(1).argmax())].self_attn

# %% [markdown]
# A layer has two branches, each with the projections of its own heads. The full heads keep the base model's rows of q, k and v without RoPE; the linear ones keep theirs too, with a key and value head each. Then every head's output is normalised on its own (`Fusion`), so that neither kind drowns the other, and the base model's output projection follows.
#
# Nothing is lost in taking the layer apart: with every head full, and the base model's own choices, the hybrid is the base model.

# %%
every = torch.ones_like(mask.array)
same = hl.build_hybrid(model, every, full_rope=True, log_scale=None, full_gate=None, fusion_norm=False)
prompt = probes[0].clean[:1]
with torch.no_grad():
    print("largest difference of logits:", float((same(prompt).logits - model.hf(prompt).logits).abs().max()))

# %% [markdown]
# ## The cache
#
# Full heads cache keys and values, linear heads a state of 64 x 64. How much that saves depends on the mask: heads of one KV group share their keys, so what counts is how many groups still have a full head.

# %%
tokens = [1024, 4096, 8192, 32768]
cache = pd.DataFrame([{"tokens": n} | {f"{name}, MB": size / 2**20 for name, size in hybrid.cache_bytes(n).items()} for n in tokens]).set_index("tokens")
cache["times smaller"] = cache["base, MB"] / cache["hybrid, MB"]
cache.round(1)

# %% [markdown]
# That is the formula. What a cache really holds after a prompt:

# %%
with torch.no_grad():
    held = hybrid(prompt, use_cache=True)
held = getattr(held, "cache", None) or held.past_key_values
print(f"{held.n_bytes / 2**20:.2f} MB held after {prompt.shape[1]} tokens; by the formula {hybrid.cache_bytes(prompt.shape[1])['hybrid'] / 2**20:.2f} MB")

# %% [markdown]
# ## It does not speak yet
#
# All weights come from the base model, but a head that was made for softmax does something else inside a recurrence.

# %%
question = model.tokenizer("The capital of France is", return_tensors="pt").input_ids
for name, own in (("base", model.hf), ("hybrid", hybrid)):
    print(f"{name:7s}", repr(model.tokenizer.decode(own.generate(question, max_new_tokens=12, do_sample=False)[0])))

# %% [markdown]
# It has to be trained: attention alone first, then by the base model's logits, then on longer text. `hydralens transfer examples/embedded-one-gpu.toml` does that in minutes on a GPU; [the how-to](../docs/how-to/transfer.md) says what is in the file.
#
# ## What its heads do
#
# The hybrid opens like any model, and every head of either kind can be patched at the fusion's input. Untrained, the effects mean nothing; after the transfer they tell whether retrieval still sits in the heads that were kept.

# %%
lens = hl.load_model(hybrid, model.tokenizer)
effect = hl.activation_patch(lens, probes[0], "z", mode="direct", min_span=0)
hl.figures.head_heatmap(effect, mask)

# %% [markdown]
# ## Saved, reopened, compared
#
# A hybrid is a transformers model.

# %%
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import hydralens.hybrid  # makes the class known to transformers

logging.disable_progress_bar()
with tempfile.TemporaryDirectory() as folder:
    hybrid.save_pretrained(folder)
    print(sorted(path.name for path in Path(folder).iterdir()))
    again = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    print("equal to the bit:", torch.equal(again(prompt).logits, hybrid(prompt).logits))

# %% [markdown]
# Other hybrids of the same model come out of the same builder, so that they can be trained and compared alike.

# %%
from hydralens.hybrid import RECIPES

rivals = {
    name: hl.build_hybrid(model, mask if recipe.full_layers is None else None, recipe=name)
    for name, recipe in RECIPES.items()
    if name in ("duo", "kimi-linear")
}
pd.DataFrame(
    {
        name: {
            "others": RECIPES[name].others,
            "full heads": sum(row.count("full") for row in rival.config.kinds),
            "MB at 8192": rival.cache_bytes(8192)["hybrid"] / 2**20,
        }
        for name, rival in {"hydrahead": hybrid, **rivals}.items()
    }
).T
