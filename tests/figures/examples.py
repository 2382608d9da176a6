"""Small results of known content: 4 layers, 6 query heads, 2 KV heads."""

from dataclasses import replace

import pandas as pd
import torch
from scipy.stats import binomtest

from hydralens.head_mask import HeadMask
from hydralens.models.info import ModelInfo
from hydralens.patching.effects import HeadEffects
from hydralens.scores import HeadScores
from hydralens.similarity import Similarity

LAYERS, HEADS, KV_HEADS = 4, 6, 2


def info(model_id: str = "toy/model") -> ModelInfo:
    return ModelInfo(id=model_id, revision=None, fingerprint="0" * 64, n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=8)


def effects(
    strong: dict[tuple[int, int], float], probe: str = "needle", corruption: str = "value", capability: str = "retrieval", component: str = "z"
) -> HeadEffects:
    """Four pairs around the given effects, which are their exact means."""
    mean = torch.zeros(LAYERS, KV_HEADS if component in ("k", "v") else HEADS)
    for cell, value in strong.items():
        mean[cell] = value
    spread = torch.tensor([0.5, 0.9, 1.1, 1.5])[:, None, None]
    logits, every = torch.full((4,), 5.0), torch.ones(4, dtype=torch.bool)
    return HeadEffects(
        per_pair=mean * spread,
        component=component,
        mode="direct",
        direction="noise",
        positions="answer",
        clean_metric=logits,
        corrupt_metric=-logits,
        kept=every,
        answered=every,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        probe=probe,
        capability=capability,
        corruption=corruption,
    )


def scores(composite: dict[tuple[int, int], float] | None = None, model_id: str = "toy/model") -> HeadScores:
    """Two retrieval probes and one reasoning probe."""
    receivers = {
        "retrieval": {"needle/value": effects({(3, 4): 0.4, (2, 1): 0.2, (1, 0): -0.3}), "needle/key": effects({(0, 5): 0.3, (2, 1): 0.1}, corruption="key")},
        "reasoning": {"names/value": effects({(3, 4): 0.5}, "names", capability="reasoning")},
    }
    values = torch.zeros(LAYERS, HEADS)
    for cell, value in (composite or {(3, 4): 1.0, (2, 1): 0.5, (0, 5): 0.3}).items():
        values[cell] = value
    return HeadScores(info(model_id), receivers, values, [])


def with_senders() -> HeadScores:
    """L2H1 and L0H2 act through L3H4, nothing lies behind layer 3."""
    found = scores()

    def through(label: str, effect: HeadEffects) -> HeadEffects:
        name, corruption = label.split("/")
        sent = effects({(2, 1): 0.3, (0, 2): 0.05, (1, 1): -0.2}, name, corruption, effect.capability)
        sent.per_pair[:, 3] = torch.nan
        return replace(sent, through="q of L3H4")

    senders = {capability: {label: through(label, effect) for label, effect in probes.items()} for capability, probes in found.receivers.items()}
    return replace(found, senders=senders)


def many_prompts(n: int = 16) -> HeadScores:
    """The restriction scores of ``n`` prompts: three heads of which every prompt agrees, and noise."""
    generator = torch.Generator().manual_seed(1)
    values = 0.02 * torch.randn(n, LAYERS, HEADS, generator=generator)
    for cell, value in {(3, 4): 0.5, (2, 1): 0.3, (1, 0): -0.2}.items():
        values[(slice(None), *cell)] += value
    logits, every = torch.full((n,), 5.0), torch.ones(n, dtype=torch.bool)
    like = effects({})
    measured = replace(
        like, per_pair=values, clean_metric=logits, corrupt_metric=-logits, kept=every, answered=every, mode="restriction", direction="integrated",
        positions="window 64, sinks 4",
    )  # fmt: skip
    found = scores()
    return replace(found, method="restriction", measured={"retrieval": {"needle/value": measured}}, composite=values.mean(0).where(values.mean(0) > 0.1, 0))


def mask(found: HeadScores, k: int = 6) -> HeadMask:
    full = torch.zeros(LAYERS * HEADS, dtype=torch.bool)
    full[found.composite.flatten().argsort(descending=True, stable=True)[:k]] = True
    return HeadMask.of(full.reshape(LAYERS, HEADS), found.model, rule="global", tie_break="lower layer, then lower head", ratio="3:1", scores=found.composite)


def _accuracy(right: int, n: int) -> dict:
    interval = binomtest(right, n).proportion_ci(method="wilson")
    return {"accuracy": right / n, "ci_low": interval.low, "ci_high": interval.high, "margin": 4 * right / n - 1, "n_prompts": n}


def knockout_frame(scored: dict[int, int], random: dict[int, list[int]], n: int = 20) -> pd.DataFrame:
    """Right answers of ``n`` at each k."""
    rows = [{"k": k, "order": "scored", "draw": 0} | _accuracy(right, n) for k, right in scored.items()]
    rows += [{"k": k, "order": "random", "draw": draw} | _accuracy(right, n) for k, draws in random.items() for draw, right in enumerate(draws)]
    return pd.DataFrame(rows)


def clear_knockout() -> pd.DataFrame:
    return knockout_frame({0: 20, 1: 19, 4: 1, 12: 0}, {1: [20, 20], 4: [19, 20], 12: [19, 19]})


def unclear_knockout() -> pd.DataFrame:
    return knockout_frame({0: 20, 1: 20, 4: 19, 12: 16}, {1: [20, 20], 4: [20, 19], 12: [19, 18]})


def preview_frame(selected: list[int], random: list[list[int]], full: list[int], none: list[int], n: int = 20) -> pd.DataFrame:
    """Right answers of ``n`` in each task."""
    rows = []
    for index in range(len(selected)):
        task = {"task": f"task {index}"}
        rows.append({"mask": "all heads full", "draw": 0} | task | _accuracy(full[index], n))
        rows.append({"mask": "selected", "draw": 0} | task | _accuracy(selected[index], n))
        rows += [{"mask": "random", "draw": draw} | task | _accuracy(right[index], n) for draw, right in enumerate(random)]
        rows.append({"mask": "no head full", "draw": 0} | task | _accuracy(none[index], n))
    return pd.DataFrame(rows)


def clear_preview() -> pd.DataFrame:
    return preview_frame(selected=[18, 10], random=[[2, 3], [3, 1]], full=[20, 16], none=[1, 1])


def unclear_preview() -> pd.DataFrame:
    return preview_frame(selected=[3, 3], random=[[2, 3], [4, 3]], full=[20, 16], none=[1, 1])


def layers() -> Similarity:
    """Neighbours 0.9, two layers apart 0.5, three apart 0.1."""
    distance = (torch.arange(LAYERS)[:, None] - torch.arange(LAYERS)).abs()
    return Similarity(torch.tensor([1, 0.9, 0.5, 0.1])[distance], [f"L{layer}" for layer in range(LAYERS)], "layer", "cosine of layer outputs", 1234)


def heads(within: float, between: float, n_layers: int = LAYERS, n_heads: int = HEADS) -> Similarity:
    layer = torch.arange(n_layers).repeat_interleave(n_heads)
    matrix = torch.where(layer[:, None] == layer, within, between).fill_diagonal_(1)
    return Similarity(matrix, [f"L{i}H{h}" for i in range(n_layers) for h in range(n_heads)], "head", "cosine of heads' contributions", 1234)
