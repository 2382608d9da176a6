# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Choosing a mask
#
# Rules, ratios, KV bytes, and what other projects' head scores would choose.

# %%
from dataclasses import asdict

import pandas as pd

import hydralens as hl
from hydralens.selection import RULES, selection_report
from hydralens.statistics import agreement
from hydralens.validation import mask_preview, random_masks

model = hl.load_model("embedded")
probes = hl.probes.retrieval(
    model,
    n_pairs=2,
    n_tokens=160,
    seed=0,
    shapes=("niah_single_2", "niah_multikey_1"),
    corruptions=("swap",),
)
scores = hl.score_heads(model, probes)

# %% [markdown]
# ## Rules
#
# `global` takes the best heads wherever they are. The others put conditions on it, and `selection_report` says what they cost: the share of the score given up, layers left without a full head, and the
# part of the KV cache that survives. Heads share KV heads, so the same number of heads can keep very different numbers of bytes.

# %%
reports = [selection_report(scores, hl.select_heads(scores, "7:1", rule=rule)) for rule in RULES]
columns = ["n_full", "cost", "layers_without_full", "kv_share"]
pd.DataFrame(reports).set_index("rule")[columns].round(3)

# %% [markdown]
# ## Ratios

# %%
rows, total = [], float(scores.composite.sum())
for ratio in ("1:1", "3:1", "7:1", "15:1", "31:1"):
    report = selection_report(scores, hl.select_heads(scores, ratio))
    shares = {"score kept": f"{report['score_kept'] / total:.0%}", "KV heads": f"{report['kv_share']:.0%}"}
    rows.append({"ratio": ratio, "heads": report["n_full"]} | shares)
pd.DataFrame(rows)

# %% [markdown]
# ## Rival detectors
#
# Ten head scores of other projects have the same interface. Three that look at attention only, on the same probes:

# %%
names = ("attention_mass", "copy_paste", "headkv")
rivals = {name: hl.score_heads(model, probes, method=name) for name in names}
k = hl.select_heads(scores, "7:1").n_full
pd.DataFrame(
    {name: asdict(agreement(scores.composite, own.composite, k)) for name, own in rivals.items()},
    index=["top_k_overlap", "spearman"],
).round(2)

# %% [markdown]
# They agree in part. What matters is which heads keep retrieval when all the others are limited, on prompts that were not used for scoring. Of the six made here, those whose needle lies
# beyond the window are asked. So few prompts are a hint only: `analyses/best_mask.py` asks hundreds.

# %%
checks = hl.probes.retrieval(
    model,
    n_pairs=6,
    n_tokens=160,
    seed=100,
    shapes=("niah_single_2",),
    corruptions=("value",),
)
masks = {"restriction": [hl.select_heads(scores, "15:1").array]}
masks |= {name: [hl.select_heads(own, "15:1").array] for name, own in rivals.items()}
masks |= {"random": random_masks(masks["restriction"][0].shape, int(masks["restriction"][0].sum()), 1)}
mask_preview(model, masks, checks).round(2)

# %% [markdown]
# ## Keep it
#
# The mask is written as `head_mask.json`; `hydralens mask convert` turns it into the lists of other projects and back.

# %%
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    path = hl.select_heads(scores, "7:1").save(Path(folder) / "head_mask.json")
    print(hl.HeadMask.load(path).selection)
