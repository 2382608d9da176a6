from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers

from hydralens.models.lens import wrap_model
from hydralens.probes import niah, solve
from tests.probes.tokenizers import model_with, tokenizer
from tests.tiny import SHAPE


@pytest.fixture(scope="module")
def model():
    tok = tokenizer("digits")
    torch.manual_seed(0)
    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, "vocab_size": len(tok), "max_position_embeddings": 512}))
    return wrap_model(hf.requires_grad_(False), tok)


def test_against_transformers_one_prompt_at_a_time(model):
    probe = niah(model, "niah_multikey_1", "value", 3, 150)
    assert not probe.scored.all()  # numbers and words: answers of different lengths
    for pair in range(3):  # make the model's own choice the answer: of the first two tokens in pair 0, the first in pair 1, none in pair 2
        n_right = 2 - pair
        for place in range(n_right):
            logits = model.hf(probe.clean[pair][probe.attention_mask[pair].bool()][None]).logits[0]
            column = int(probe.read_positions[pair, place]) - int((1 - probe.attention_mask[pair]).sum())
            if probe.scored[pair, place]:
                probe.answer[pair, place] = logits[column].argmax()
    solved = solve(model, probe)
    assert solved.correct_first.tolist() == [True, True, False]
    for pair in range(3):
        logits = model.hf(probe.clean[pair][probe.attention_mask[pair].bool()][None]).logits[0]
        columns = probe.read_positions[pair][probe.scored[pair]] - (1 - probe.attention_mask[pair]).sum()
        answer = probe.answer[pair][probe.scored[pair]]
        assert bool(solved.correct_all[pair]) == bool((logits[columns].argmax(-1) == answer).all())
        best = logits[columns[0]].sort(descending=True).values
        margin = best[0] - best[1] if solved.correct_first[pair] else logits[columns[0], answer[0]] - best[0]
        assert solved.margin[pair] == pytest.approx(float(margin), abs=1e-4) and (solved.margin[pair] > 0) == solved.correct_first[pair]


def test_padding_never_changes_an_answer(model):
    wide, padded = niah(model, "kv_recall", "swap", 2, 150), niah(model, "kv_recall", "swap", 2, 150)
    padded = replace(padded, **{row: torch.nn.functional.pad(getattr(padded, row), (5, 0)) for row in ("clean", "corrupt", "attention_mask")})
    padded = replace(padded, read_positions=padded.read_positions + 5 * padded.scored, needle_span=padded.needle_span + 5)
    assert solve(model, padded).margin.equal(solve(model, wide).margin)


def test_what_is_said():
    probe = niah(model_with("digits"), "niah_single_1", "key", 4, 100)

    def read_logits(tokens, attention_mask, read_positions):
        """Right at the first token of all pairs but one, at the others of every second pair."""
        pair = int((probe.clean == tokens).all(1).nonzero()[0])
        logits = torch.zeros(1, probe.answer.shape[1], len(probe.tokenizer))
        for place, token in enumerate(probe.answer[pair]):
            if token >= 0 and (pair != 3 if place == 0 else pair % 2 == 0):
                logits[0, place, token] = 2
            elif token >= 0:
                logits[0, place, probe.foil[pair, place] if probe.foil[pair, place] != token else token - 1] = 1
        return logits

    solved = solve(SimpleNamespace(read_logits=read_logits), probe)
    assert str(solved) == "niah_single_1/key: the model answers 3 of 4 pairs (first token), 2 of 4 (whole answer)"
    assert (solved.accuracy_first, solved.accuracy_all, solved.n_pairs) == (0.75, 0.5, 4) and solved.margin.tolist() == [2, 2, 2, -1]
