"""What is asked: needles in haystacks of chosen lengths and depths, and reasoning over what the prompt says."""

from collections.abc import Sequence

import pandas as pd
from scipy.stats import binomtest

from hydralens.evaluation.answers import answered
from hydralens.models.lens import LensModel
from hydralens.probes.needles import niah
from hydralens.probes.tasks import reasoning

SEED = 555_000  # added to the seed: no prompt of the scoring is asked again


def ask_retrieval(
    model: LensModel, task: str, length: int, *, depths: Sequence[float], n_prompts: int, seed: int = 0, batch_tokens: int | None = None, verbose: bool = False
) -> pd.DataFrame:
    """One of RULER's needle tasks at one length.

    Args:
        task: a key of ``hydralens.probes.needles.SHAPES``.
        length: tokens of the prompt with its answer.
        depths: where the needle lies, 0 to 1; each has its share of the ``n_prompts`` prompts.

    Returns:
        One row a depth: columns task, length, depth, n, accuracy, ci_low, ci_high (Wilson, 95 %).

    Raises:
        InputError: an unknown task, or no room for needle and question.
    """
    each = max(1, n_prompts // len(depths))
    rows = []
    for index, depth in enumerate(depths):
        probe = niah(model, task, "value", each, length, seed + SEED + index, depth=depth)
        right = answered(model, probe, batch_tokens=batch_tokens, verbose=verbose)
        rows.append({"task": task, "length": length, "depth": depth} | share(int(right.sum()), each))
    return pd.DataFrame(rows)


def ask_reasoning(model: LensModel, task: str, *, n_prompts: int, seed: int = 0, batch_tokens: int | None = None, verbose: bool = False) -> pd.DataFrame:
    """One of the reasoning probes, as accuracy of the whole answer: a frame of one row like ``ask_retrieval``'s, with the longest prompt as its length.

    Raises:
        InputError: an unknown task.
    """
    (probe,) = reasoning(model, n_prompts, seed + SEED, tasks=[task])
    right = answered(model, probe, batch_tokens=batch_tokens, verbose=verbose)
    return pd.DataFrame([{"task": task, "length": int(probe.attention_mask.sum(1).max()), "depth": float("nan")} | share(int(right.sum()), n_prompts)])


def share(right: int, n: int) -> dict[str, float]:
    """``right`` of ``n`` with its Wilson interval."""
    low, high = binomtest(right, n).proportion_ci(method="wilson")
    return {"n": n, "accuracy": right / n, "ci_low": low, "ci_high": high}
