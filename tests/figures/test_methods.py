"""Methods side by side: every number stands where it belongs, and the titles say what the numbers say."""

import itertools

import numpy as np
import pandas as pd
import pytest

from hydralens.errors import InputError
from hydralens.figures import detector_agreement, ratio_sweep


def agreement() -> pd.DataFrame:
    """restriction agrees with far at .2 and with near at .8."""
    overlap = {frozenset(("restriction", "near")): 0.8, frozenset(("restriction", "far")): 0.2, frozenset(("near", "far")): 0.5}
    rows = [
        {"a": a, "b": b, "k": 12, "top_k_overlap": overlap.get(frozenset((a, b)), 1.0), "spearman": -overlap.get(frozenset((a, b)), 1.0)}
        for a, b in itertools.product(("far", "restriction", "near"), repeat=2)
    ]
    return pd.DataFrame(rows)


def test_agreement_is_ordered_by_overlap_with_the_reference():
    fig = detector_agreement(agreement())
    (cells,) = fig.data
    assert list(cells.x) == list(cells.y) == ["restriction", "near", "far"]
    expected = [[np.nan, -0.8, -0.2], [0.8, np.nan, -0.5], [0.2, 0.5, np.nan]]
    np.testing.assert_allclose(np.asarray(cells.z, dtype=float), expected)
    assert fig.layout.meta["finding"] == "near shares most of its top 12 heads with restriction (80%), far least (20%)"


def sweep() -> pd.DataFrame:
    right = {"restriction": {"15:1": 0.8, "7:1": 1.0}, "rival": {"15:1": 0.5, "7:1": 1.0}, "random 0": {"15:1": 0.1, "7:1": 0.3}}
    rows = [
        {"ratio": ratio, "method": method, "task": task, "accuracy": value - lower}
        for method, own in right.items()
        for ratio, value in own.items()
        for task, lower in (("1 needle", 0.0), ("5 needles", 0.1))
    ]
    rows += [{"ratio": "", "method": "all heads", "task": "1 needle", "accuracy": 1.0}]
    return pd.DataFrame(rows).assign(accuracy_low=lambda frame: frame["accuracy"] - 0.05, accuracy_high=lambda frame: frame["accuracy"] + 0.02)


def test_the_sweep_goes_from_many_to_few_full_heads():
    fig = ratio_sweep(sweep())
    assert len(fig.data) == 6 and [annotation.text for annotation in fig.layout.annotations] == ["1 needle", "5 needles"]
    own = [trace for trace in fig.data if trace.name == "restriction"]
    assert [list(trace.x) for trace in own] == [["7:1", "15:1"]] * 2 and list(own[1].y) == pytest.approx([0.9, 0.7])
    assert list(own[0].error_y.array) == pytest.approx([0.02, 0.02]) and list(own[0].error_y.arrayminus) == pytest.approx([0.05, 0.05])
    assert fig.data[2].name == "restriction"  # on top of the others
    assert fig.layout.meta["finding"] == "At 15:1 restriction keeps 75% of the answers, the best other (rival) 45%"


def test_wrong_frames_are_refused():
    with pytest.raises(InputError, match="no method 'ours'"):
        detector_agreement(agreement(), "ours")
    with pytest.raises(InputError, match="no method 'ours'"):
        ratio_sweep(sweep(), "ours")
    for figure, frame in ((detector_agreement, agreement().drop(columns="k")), (ratio_sweep, sweep().drop(columns="task"))):
        with pytest.raises(InputError, match="k|task"):
            figure(frame)
