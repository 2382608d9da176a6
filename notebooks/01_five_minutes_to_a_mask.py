# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Five minutes to a mask
#
# Which attention heads of a language model look things up far back in the text? This notebook asks SmolLM2-135M, 270 heads, and writes the answer down as a head mask.
#
# Everything is small here, so that it runs in about a minute on a CPU: two prompts a probe. Take eight or more for a result you want to rely on.

# %%
import hydralens as hl

model = hl.load_model("embedded")
model

# %% [markdown]
# ## A probe is a pair of prompts
#
# The clean prompt hides a needle in a haystack and asks for it. In the corrupt prompt one thing is different, here two needles have exchanged their keys: the question is the same and the answer is
# another. Whatever brings the answer from the needle to the end of the prompt must differ between the two.

# %%
probes = hl.probes.retrieval(
    model,
    n_pairs=2,
    n_tokens=160,
    seed=0,
    shapes=("niah_single_2", "niah_multikey_1"),
    corruptions=("swap",),
)
print(probes[0])

# %% [markdown]
# ## Which heads does the answer need?
#
# `score_heads` asks what the mask would do: it limits every head to the first four tokens and a recent window, and measures how much of the answer that costs. The score of a head is its share of the cost, averaged over prompts, of which none counts below zero.
# Direct effects are measured beside it: exchange the output of one head between clean and corrupt run, freeze all later attention, and see how far the answer follows.

# %%
scores = hl.score_heads(model, probes)
best = scores.to_frame().query("capability == 'composite'").sort_values("rank").head(10)
best[["layer", "head", "kv_head", "score"]].round(3)

# %% [markdown]
# Look for the few dark cells: most heads do nothing for these prompts. Hover over a cell to see its score.

# %%
hl.figures.head_heatmap(scores)

# %% [markdown]
# ## From scores to a mask
#
# At a ratio of 7:1, one head in eight keeps full attention. The mask is a file that other programs can read, with the scores and the probes behind it.

# %%
mask = hl.select_heads(scores, ratio="7:1")
print(f"{mask.n_full} heads; they read {mask.kv_share:.0%} of the KV heads")
mask.array.sum(1)  # full heads in every layer

# %% [markdown]
# ## Does the mask mean anything?
#
# The preview limits all heads outside the mask to sinks and a window, without any training, and asks prompts that were not used for scoring: of the six, those whose needle lies beyond the window. Beside it: as many random heads.

# %%
from hydralens.validation import mask_preview, random_masks

checks = hl.probes.retrieval(
    model,
    n_pairs=6,
    n_tokens=160,
    seed=100,
    shapes=("niah_single_2",),
    corruptions=("value",),
)
masks = {"selected": [mask.array], "random": random_masks(mask.array.shape, mask.n_full, 2)}
mask_preview(model, masks, checks).round(2)

# %% [markdown]
# `hydralens run` on the command line does all of this on every probe, with a report. Next: [are layers alike, and heads not?](02_block_wise_and_head_wise.ipynb)
