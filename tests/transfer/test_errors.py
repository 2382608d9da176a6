"""Head errors of a shared alignment as scores."""

import pandas as pd
import pytest

from hydralens.errors import InputError
from hydralens.models.lens import wrap_model
from hydralens.transfer.errors import conversion_gap
from tests.tiny import tiny_hf


def errors() -> pd.DataFrame:
    """Four layers of four heads; L2H1 is hard for a linear head."""
    frame = pd.DataFrame([{"layer": layer, "head": head, "full": 0.2, "linear": 0.3} for layer in range(4) for head in range(4)])
    frame.loc[(frame["layer"] == 2) & (frame["head"] == 1), "linear"] = 0.9
    return frame.sample(frac=1, random_state=0)


def test_the_gap_is_where_full_attention_is_worth_keeping(tmp_path):
    errors().to_csv(tmp_path / "a.csv", index=False)
    scores = conversion_gap(tmp_path / "a.csv", wrap_model(tiny_hf("llama")))
    assert scores.top(1) == [(2, 1)] and scores.method == "conversion_gap"
    assert float(scores.composite[2, 1]) == pytest.approx(0.7) and float(scores.composite[0, 0]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (errors().drop(columns="full"), "has no column 'full'"),
        (errors()[:-1], "has 15 heads, the model has 4 layers of 4"),
        (pd.concat([errors(), errors()[:1]]), "has 17 heads"),
    ],
)
def test_other_files_are_refused(frame, said, tmp_path):
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(InputError, match=said):
        conversion_gap(tmp_path / "a.csv", wrap_model(tiny_hf("llama")))
    with pytest.raises(InputError, match="cannot be read"):
        conversion_gap(tmp_path / "none.csv", wrap_model(tiny_hf("llama")))
