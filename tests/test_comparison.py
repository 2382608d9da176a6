"""The similarity job: the files it leaves and that they say what the parts say."""

import pandas as pd
import pytest
import torch

from hydralens.comparison import compare
from hydralens.errors import InputError
from hydralens.figures import saving
from hydralens.models.lens import wrap_model
from hydralens.similarity import block_structure, head_blocks, head_similarity, layer_blocks, layer_similarity
from tests.similarity.test_measure import WordTokenizer, texts
from tests.tiny import tiny_hf


@pytest.fixture(scope="module")
def model():
    return wrap_model(tiny_hf("llama"), WordTokenizer(), id="tiny")


def test_matrices_tests_and_figures_are_written(model, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "BROWSERS", ())
    found = compare(model, texts(), seed=2)
    written = found.save(tmp_path)
    names = {"layer_similarity", "layer_similarity_update", "layer_similarity_cka", "head_similarity", "head_similarity_cka"}
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.csv" for name in names} | {"blocks.csv", "figures"}
    assert {path.stem for path in written} == names | {"block_similarity", "head_clusters"}
    for name, alone in (("layer_similarity", layer_similarity(model, texts())), ("head_similarity_cka", head_similarity(model, texts(), "cka"))):
        frame = pd.read_csv(tmp_path / f"{name}.csv", index_col=0)
        assert list(frame.index) == list(frame.columns) == alone.labels
        torch.testing.assert_close(torch.from_numpy(frame.to_numpy()).float(), alone.matrix, atol=1e-5, rtol=1e-5)


def test_every_test_is_one_row(model):
    found = compare(model, texts(), seed=2)
    frame = found.blocks.set_index(["kind", "metric", "against"])
    assert len(frame) == 3 * 2 + 3 * 2 and frame.index.is_unique
    ordered, beyond = layer_blocks(found.layers["cka"], seed=2)
    for blocks in (ordered, beyond):
        row = frame.loc[("layer", "cka", blocks.against)]
        assert (row["explained"], row["p"], row["n_draws"]) == (blocks.explained, blocks.p, 999) and row["starts"] == " ".join(map(str, blocks.starts))
    groups = head_blocks(found.heads["write"], model.info.group, seed=2)
    assert frame.loc[("kv group", "write", groups.against), "gain"] == groups.gain
    assert found.structure == block_structure(found.layers["output"], found.heads["write"], seed=2)
    assert found.structure.magnitudes.explained == frame.loc[("head", "|write|", found.structure.heads.against), "explained"]


def test_wrong_prompts_are_one_line(model):
    with pytest.raises(InputError, match="at least one prompt"):
        compare(model, [])
