import pytest
import torch

from hydralens.detectors.attention import attention_mass_effects, copy_paste_effects, headkv_effects
from hydralens.models.lens import wrap_model
from tests.detectors.reference import answered_probe, hf_logits, hf_rows
from tests.tiny import FAMILIES, tiny_hf


def slow(hf, model, probe, pair, score):
    """``score(row, answer token, predicted token, tokens, needle) -> float`` of every head and step, mean over the steps."""
    tokens, read, answer = probe.clean[pair], probe.read_positions[pair], probe.answer[pair]
    rows, predicted = hf_rows(hf, tokens, read), hf_logits(hf, tokens, read).argmax(-1)
    start, stop = probe.needle_span[pair].tolist()
    expected = torch.zeros(model.info.n_layers, model.info.n_heads)
    for layer in range(model.info.n_layers):
        for head in range(model.info.n_heads):
            steps = [score(rows[layer, t, head], int(answer[t]), int(predicted[t]), tokens.tolist(), range(start, stop)) for t in range(len(read))]
            expected[layer, head] = sum(steps) / len(steps)
    return expected


def copy_paste_step(row, answer, predicted, tokens, needle):
    best = int(row.argmax())
    return float(best in needle and tokens[best] == answer == predicted)


def headkv_step(row, answer, predicted, tokens, needle):
    order = sorted(range(len(row)), key=lambda position: -float(row[position]))[: len(needle)]
    return sum(float(row[position]) for position in order if position in needle) / len(needle)


@pytest.mark.parametrize("family", FAMILIES)
def test_copy_paste_equals_its_definition(family):
    hf = tiny_hf(family)
    model = wrap_model(hf)
    with torch.no_grad():  # an unembedding in which only the prompt's tokens can win, so that there is something to copy
        hf.get_output_embeddings().weight[:3] = 0
        hf.get_output_embeddings().weight[7:] = 0
    probe = answered_probe(hf, n_pairs=6, n_answer=3, vocab=7)
    probe.needle_span[:] = torch.tensor([2, 20])
    effects = copy_paste_effects(model, probe)
    expected = torch.stack([slow(hf, model, probe, pair, copy_paste_step) for pair in range(6)])
    assert 0 < expected.mean() < 1
    torch.testing.assert_close(effects.per_pair, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_headkv_and_attention_mass_equal_their_definitions(family):
    hf = tiny_hf(family)
    model, probe = wrap_model(hf), answered_probe(hf, n_pairs=3, first=14)
    for effects, step in ((headkv_effects, headkv_step), (attention_mass_effects, None)):
        found = effects(model, probe)
        for pair in range(3):
            if step is not None:
                expected = slow(hf, model, probe, pair, step)
            else:
                expected = hf_rows(hf, probe.clean[pair], probe.read_positions[pair, :1])[:, 0, :, slice(*probe.needle_span[pair].tolist())].sum(-1)
            assert expected.max() > 0
            torch.testing.assert_close(found.per_pair[pair], expected, atol=1e-5, rtol=1e-5)
        assert found.kept.tolist() == found.answered.tolist() == [True, True, False]
        assert (found.component, found.mode, found.direction) == ("pattern", effects.__name__.removesuffix("_effects"), "none")
        logits = hf_logits(hf, probe.clean[0], probe.read_positions[0, :1])[0]
        best, second = logits.topk(2).values
        torch.testing.assert_close(found.clean_metric[0], best - second, atol=1e-4, rtol=1e-4)
