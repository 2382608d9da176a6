import pytest
import torch

from hydralens.detectors import rows as rows_module
from hydralens.detectors.rows import score_rows
from hydralens.models.lens import wrap_model
from tests.detectors.reference import hf_logits, hf_rows
from tests.tiny import FAMILIES, tiny_hf


def collected(model, tokens, columns):
    """All rows, by a score that keeps them."""
    kept = {}

    def keep(rows, v, index, which):
        assert v.shape == (model.info.n_kv_heads, len(tokens), model.info.head_dim)
        kept.setdefault(index, []).append(rows)
        return rows.sum(-1)

    scores, final = score_rows(model.anatomy, tokens, columns, keep)
    return torch.stack([torch.cat(kept[index]) for index in range(model.info.n_layers)]), scores, final


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_transformers_own_attention(family):
    hf = tiny_hf(family)
    model = wrap_model(hf)
    tokens = torch.randint(3, 97, (25,), generator=torch.Generator().manual_seed(1))
    columns = torch.tensor([0, 3, 7, 23, 24])  # before, at and after the sliding windows of 6
    rows, scores, final = collected(model, tokens, columns)
    torch.testing.assert_close(rows, hf_rows(hf, tokens, columns), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores, torch.ones_like(scores))
    torch.testing.assert_close(model.anatomy.logits(final), hf_logits(hf, tokens, columns), atol=1e-4, rtol=1e-4)
    assert (rows[:, 1, :, 4:] == 0).all()


def test_blocks_of_rows_change_nothing(monkeypatch):
    model = wrap_model(tiny_hf("gemma2"))
    tokens = torch.randint(3, 97, (25,), generator=torch.Generator().manual_seed(1))
    whole = collected(model, tokens, torch.arange(25))[0]
    monkeypatch.setattr(rows_module, "SCORES_AT_ONCE", 3 * 25 * model.info.n_heads)
    torch.testing.assert_close(collected(model, tokens, torch.arange(25))[0], whole, atol=1e-6, rtol=1e-6)
