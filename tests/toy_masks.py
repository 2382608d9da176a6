"""Small models, scores and masks for the tests of the mask file, its formats and the selection."""

import torch
from hypothesis import strategies as st

from hydralens.head_mask import HeadMask
from hydralens.models.info import ModelInfo
from hydralens.patching.effects import HeadEffects
from hydralens.scores import HeadScores

PROBE = {"name": "niah/value", "capability": "retrieval", "n_pairs": 8, "n_tokens": 512, "seed": 0, "direction": "noise", "metric": "logit difference"}


def toy_info(n_layers: int, n_heads: int, n_kv_heads: int = 1) -> ModelInfo:
    return ModelInfo(id="toy", revision=None, fingerprint="f00d", n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=8)


def toy_scores(composite, raw=None, n_kv_heads: int = 1) -> HeadScores:
    """Scores whose composite is given; ``raw`` is the mean effect of the only probe, measured on two pairs."""
    composite = torch.tensor(composite, dtype=torch.float32)
    receivers = {}
    if raw is not None:
        raw = torch.tensor(raw, dtype=torch.float32)
        effect = HeadEffects(
            per_pair=torch.stack([raw - 0.25, raw + 0.25]),
            component="z",
            mode="direct",
            direction="noise",
            positions="all",
            clean_metric=torch.ones(2),
            corrupt_metric=torch.zeros(2),
            kept=torch.ones(2, dtype=torch.bool),
            answered=torch.ones(2, dtype=torch.bool),
            n_heads=composite.shape[1],
            n_kv_heads=n_kv_heads,
        )
        receivers = {"retrieval": {"niah/value": effect}}
    return HeadScores(model=toy_info(*composite.shape, n_kv_heads), receivers=receivers, composite=composite, probes=[PROBE])


@st.composite
def infos(draw) -> ModelInfo:
    n_kv_heads = draw(st.integers(1, 3))
    return ModelInfo(
        id=draw(st.text(max_size=8)),
        revision=draw(st.none() | st.text(max_size=8)),
        fingerprint=draw(st.text("0123456789abcdef", min_size=1, max_size=8)),
        n_layers=draw(st.integers(1, 4)),
        n_heads=n_kv_heads * draw(st.integers(1, 3)),
        n_kv_heads=n_kv_heads,
        head_dim=draw(st.integers(1, 256)),
    )


@st.composite
def masks(draw, space: str | None = None) -> HeadMask:
    """Any valid mask: any shape and pattern, with and without scores, ratio and probes, any text in the free fields."""
    info = draw(infos())
    space = space or draw(st.sampled_from(["query", "kv"]))
    columns = info.n_heads if space == "query" else info.n_kv_heads

    def grid(cell, columns):
        return st.lists(st.lists(cell, min_size=columns, max_size=columns), min_size=info.n_layers, max_size=info.n_layers)

    score = st.just(0.0) | st.floats(allow_nan=False, allow_infinity=False, width=32)
    scores = draw(st.none() | grid(score, info.n_heads))
    return HeadMask.of(
        torch.tensor(draw(grid(st.booleans(), columns))),
        info,
        rule=draw(st.text(max_size=8)),
        tie_break=draw(st.text(max_size=8)),
        space=space,
        ratio=draw(st.sampled_from([None, "7:1", "2.5:1"])),
        scores=None if scores is None else torch.tensor(scores, dtype=torch.float32),
        probes=draw(
            st.lists(
                st.fixed_dictionaries({**{key: st.just(value) for key, value in PROBE.items()}, "name": st.text(max_size=8), "seed": st.integers()}), max_size=2
            )
        ),
    )
