import pytest
import torch

from hydralens.detectors.repeats import REPEATS, echo, induction, repeated_tokens
from hydralens.errors import InputError
from hydralens.models.lens import wrap_model
from tests.detectors.reference import hf_rows
from tests.planted import planted_model
from tests.tiny import FAMILIES, tiny_hf

N = 8


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("detector", "after"), [(echo, 0), (induction, 1)])
def test_scores_equal_their_definition(family, detector, after):
    hf = tiny_hf(family)
    model = wrap_model(hf)
    scores = detector(model, n_sequences=2, n_tokens=N, seed=3)
    per_sequence = scores.measured["retrieval"]["repeated_tokens/none"].per_pair
    for sequence, tokens in enumerate(repeated_tokens(model, 2, N, 3)):
        attention = hf_rows(hf, tokens, torch.arange(len(tokens)))
        rows = []
        for column in range(1 + N, len(tokens)):
            earlier = [position for position in range(1, column) if tokens[position] == tokens[column]]
            rows.append(sum(attention[:, column, :, position + after] for position in earlier))
        torch.testing.assert_close(per_sequence[sequence], torch.stack(rows).mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.composite, per_sequence.mean(0))
    assert scores.method == detector.__name__
    assert scores.probes[0]["n_tokens"] == 1 + REPEATS * N and scores.probes[0]["n_pairs"] == 2


def test_tokens_are_distinct_repeated_seeded_and_ordinary():
    model = planted_model()
    tokens = repeated_tokens(model, 3, 50, seed=5)
    assert tokens.shape == (3, 1 + REPEATS * 50)
    for row in tokens:
        said = row[1:].reshape(REPEATS, 50)
        assert (said == said[0]).all() and len(set(said[0].tolist())) == 50
        assert not set(row.tolist()) & set(model.tokenizer.all_special_ids) and row[0] not in said[0]
    assert torch.equal(tokens, repeated_tokens(model, 3, 50, seed=5))
    assert not torch.equal(tokens, repeated_tokens(model, 3, 50, seed=6))


def test_the_planted_head_is_the_induction_head():
    """It copies what followed its query's two tokens: on repeated tokens it puts all attention on the successors, and none on the tokens themselves."""
    model = planted_model()
    by_induction, by_echo = induction(model, n_sequences=2, n_tokens=60), echo(model, n_sequences=2, n_tokens=60)
    assert by_induction.top(1) == [(1, 2)] and by_induction.composite[1, 2] > 0.9
    assert by_echo.composite[1, 2] < 0.05


def test_wrong_numbers_are_refused():
    model = wrap_model(tiny_hf("llama"))
    with pytest.raises(InputError, match="n_tokens is 97, but the vocabulary has 97 ordinary tokens"):
        induction(model, n_tokens=97)
    with pytest.raises(InputError, match="n_sequences is 0 and n_tokens 200; give positive numbers"):
        echo(model, n_sequences=0)
