# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Block-wise and head-wise
#
# The premise of a head-wise hybrid: neighbouring layers are alike, so choosing whole layers chooses between near copies; heads of one layer are not alike, so choosing heads chooses between different
# things. Is that so in SmolLM2?

# %%
import hydralens as hl

model = hl.load_model("embedded")
probes = hl.probes.retrieval(model, n_pairs=2, n_tokens=160, seed=0, corruptions=("value",))
len(probes)

# %% [markdown]
# ## Similarity
#
# The cosine between layer outputs at the same token, averaged over tokens; and the same between what heads add to the residual stream.

# %%
layers = hl.layer_similarity(model, probes)
heads = hl.head_similarity(model, probes)
structure = hl.block_structure(layers, heads, n_draws=199)
hl.figures.block_similarity(layers, heads, structure)

# %% [markdown]
# Blue is alike, red is opposed. Left, squares along the diagonal that are darker than what lies around them are blocks. Right, a dark blue square on the diagonal would be a layer whose heads are alike.
#
# ## A number instead of an impression
#
# `block_structure` divides the layers into the blocks that fit best and asks two questions. Is there more order than in shuffled layers? And, since any smooth drift over depth beats shuffled layers: is there
# more than in layers that drift evenly? The same measure is applied to heads, with layers as the blocks.

# %%
print(structure.finding)
print("blocks of layers:", structure.layers.spans)
print(f"p = {structure.layers.p:.3f} against {structure.layers.against}")
print(f"heads of a layer: explained {structure.magnitudes.explained:.1%} of the variance")

# %% [markdown]
# ## It depends on the measure
#
# The residual stream carries a large common part, which makes cosines of outputs high everywhere. Updates (output minus input) and debiased CKA see something else.

# %%
from hydralens.similarity.blocks import layer_blocks

for metric in ("output", "update", "cka"):
    ordered, beyond = layer_blocks(hl.layer_similarity(model, probes, metric=metric), n_draws=199)
    says = f"explained {ordered.explained:.0%}; beyond even drift {beyond.explained:.0%}, p = {beyond.p:.3f}"
    print(f"{metric:8s} {says}")

# %% [markdown]
# ## How different are the heads of a layer in what they do?
#
# The Gini coefficient of a layer is 0 where all heads matter alike and near 1 where one does everything. `hl.head_profile(scores)` has the numbers.

# %%
scores = hl.score_heads(model, probes, method="paper", senders=0)
hl.figures.layer_profile(scores)

# %% [markdown]
# Next: [patching by hand](03_patching_by_hand.ipynb)
