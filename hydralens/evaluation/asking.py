"""What is asked: needles in haystacks of chosen lengths and depths, and reasoning over what the prompt says."""

from collections.abc import Sequence

import pandas as pd
from scipy.stats import binomtest

from hydralens.evaluation.answers import answered
from hydralens.models.lens import LensModel
from hydralens.probes.base import Probe
from hydralens.probes.needles import niah
from hydralens.probes.tasks import reasoning

SEED = 555_000  # added to the seed: no prompt of the scoring is asked again


def retrieval_prompts(model: LensModel, task: str, length: int, *, depths: Sequence[float], n_prompts: int, seed: int = 0) -> dict[float, Probe]:
    """The prompts of one of RULER's needle tasks at one length, depth by depth: an even share each, the first depths one more where it does not come out.

    Args:
        model: gives the tokenizer.
        task: a key of ``hydralens.probes.needles.SHAPES``.
        length: tokens of a prompt with its answer.
        depths: where the needle lies, 0 to 1.
        n_prompts: of all depths together.

    Raises:
        InputError: an unknown task, a depth outside 0..1, or no room for needle and question.
    """
    each, more = divmod(n_prompts, len(depths))
    return {
        depth: niah(model, task, "value", each + (index < more), length, seed + SEED + index, depth=depth)
        for index, depth in enumerate(depths)
        if each + (index < more)
    }


def ask_retrieval(
    model: LensModel, task: str, length: int, *, depths: Sequence[float], n_prompts: int, seed: int = 0, batch_tokens: int | None = None, verbose: bool = False
) -> pd.DataFrame:
    """One of RULER's needle tasks at one length; see ``retrieval_prompts`` for the arguments.

    Returns:
        One row a depth: columns task, length, depth, n, accuracy, ci_low, ci_high (Wilson, 95 %).

    Raises:
        InputError: as ``retrieval_prompts``.
    """
    rows = []
    for depth, probe in retrieval_prompts(model, task, length, depths=depths, n_prompts=n_prompts, seed=seed).items():
        right = answered(model, probe, batch_tokens=batch_tokens, verbose=verbose)
        rows.append({"task": task, "length": length, "depth": depth} | share(int(right.sum()), len(right)))
    return pd.DataFrame(rows)


def ask_reasoning(model: LensModel, task: str, *, n_prompts: int, seed: int = 0, batch_tokens: int | None = None, verbose: bool = False) -> pd.DataFrame:
    """One of the reasoning probes, as accuracy of the whole answer: a frame of one row like ``ask_retrieval``'s, with the longest prompt as its length.

    Raises:
        InputError: an unknown task.
    """
    (probe,) = reasoning(model, n_prompts, seed + SEED, tasks=[task])
    right = answered(model, probe, batch_tokens=batch_tokens, verbose=verbose)
    return pd.DataFrame([{"task": task, "length": probe.n_tokens, "depth": float("nan")} | share(int(right.sum()), n_prompts)])


def share(right: int, n: int) -> dict[str, float]:
    """``right`` of ``n`` with its Wilson interval."""
    low, high = binomtest(right, n).proportion_ci(method="wilson")
    return {"n": n, "accuracy": right / n, "ci_low": low, "ci_high": high}
