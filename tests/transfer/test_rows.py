import re
from collections import Counter
from functools import cache
from inspect import getsource
from itertools import islice
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.probes import needles, tasks
from hydralens.probes.text import prose
from hydralens.transfer import rows as module
from hydralens.transfer.corpus import Corpus, edges
from hydralens.transfer.rows import TEMPLATES, Batch, Rows
from tests.hybrid.examples import tiny_hybrid
from tests.planted import word_tokenizer
from tests.probes.tokenizers import tokenizer


def numbered(lengths, base=3):
    """Documents whose tokens are all different, as a part of a larger corpus."""
    ends = np.concatenate([[0], np.cumsum(lengths)]) + base
    return Corpus("numbers", "", None, np.arange(ends[-1] + 5, dtype=np.uint32), ends)


@cache
def town(kind):
    """Forty documents in the words of the probes."""
    words = word_tokenizer() if kind == "words" else tokenizer(kind)
    front, end = edges(words)
    texts = [f"The castle of {name} is quiet. It rained at dusk, and the baker went home. " * 3 for name in "ABCDEFGHJKLMNPQRSTUV"] * 2
    documents = [front + words(text, add_special_tokens=False)["input_ids"] + end for text in texts]
    return Corpus("town", "", words, np.concatenate(documents).astype(np.uint32), np.cumsum([0, *map(len, documents)]))


def slow_epoch(rows, epoch):
    """An epoch's tokens and the document of each, one after another."""
    order = np.random.default_rng([rows.seed, epoch]).permutation(rows.corpus.n_documents)
    return [(int(token), int(index)) for index in order for token in rows.corpus.document(index)]


documents = st.lists(st.integers(1, 30), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) >= 10)


@settings(max_examples=100, deadline=None)
@given(lengths=documents, length=st.integers(2, 10), seed=st.integers(0, 3))
def test_text_rows_are_the_slow_concatenation(lengths, length, seed):
    rows = Rows(numbered(lengths), length, seed)
    for epoch in (0, 1):
        slow = slow_epoch(rows, epoch)
        for place in range(rows.per_epoch):
            row, wanted = rows.row(epoch * rows.per_epoch + place), slow[place * length : (place + 1) * length]
            assert row.tokens.tolist() == [token for token, _ in wanted]
            begins = [i for i in range(length) if i == 0 or wanted[i][1] != wanted[i - 1][1]]
            assert row.starts.tolist() == begins
            assert row.weights.tolist() == [0.0 if i in begins else 1.0 for i in range(length)]


@settings(max_examples=60, deadline=None)
@given(lengths=documents, length=st.integers(2, 10), seed=st.integers(0, 3))
def test_an_epoch_has_every_token_once_but_for_those_that_fill_no_row(lengths, length, seed):
    rows = Rows(numbered(lengths), length, seed)
    epochs = [Counter(token for place in range(rows.per_epoch) for token in rows.row(epoch * rows.per_epoch + place).tokens.tolist()) for epoch in (0, 1)]
    for seen in epochs:
        assert set(seen.values()) == {1} and set(seen) <= set(range(3, 3 + sum(lengths)))
        assert sum(lengths) - seen.total() == sum(lengths) % length


def test_epochs_have_different_orders():
    rows = Rows(numbered([5] * 20), 5)
    first, second = ([int(rows.row(epoch * 20 + place).tokens[0]) for place in range(20)] for epoch in (0, 1))
    assert first != second and sorted(first) == sorted(second)


@settings(max_examples=60, deadline=None)
@given(lengths=documents, parts=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 3), step=st.integers(0, 20))
def test_the_global_batch_is_the_same_for_any_number_of_ranks(lengths, parts, seed, step):
    corpus = numbered(lengths)
    whole = Rows(corpus, 7, seed).batch(step, 8)
    each = [Rows(corpus, 7, seed).batch(step, 8, rank, parts) for rank in range(parts)]
    for name in ("tokens", "weights", "position_ids"):
        assert torch.equal(torch.cat([getattr(batch, name) for batch in each], 1), getattr(whole, name))
    n_tokens = 8 // parts * 7
    starts = [start + rank * n_tokens for rank, batch in enumerate(each) for start in batch.cu_seqlens[:-1].tolist()]
    assert [*starts, 56] == whole.cu_seqlens.tolist()


@settings(max_examples=60, deadline=None)
@given(lengths=documents, seed=st.integers(0, 3), step=st.integers(0, 20))
def test_no_document_of_a_batch_crosses_rows_or_documents(lengths, seed, step):
    batch = Rows(numbered(lengths), 7, seed).batch(step, 4)
    of = np.repeat(np.arange(len(lengths)), lengths)
    ends = batch.cu_seqlens.tolist()
    assert ends[0] == 0 and ends[-1] == 28 and ends == sorted(set(ends)) and set(range(0, 29, 7)) <= set(ends)
    for first, last in zip(ends[:-1], ends[1:], strict=True):
        tokens = batch.tokens[0, first:last]
        assert torch.equal(tokens, torch.arange(tokens[0], tokens[0] + last - first))
        assert len(set(of[(tokens - 3).tolist()])) == 1
        assert batch.weights[0, first] == 0 and (batch.weights[0, first + 1 : last] == 1).all()
        assert batch.position_ids[0, first:last].tolist() == list(range(last - first))


def test_shapes_and_types_of_a_batch():
    batch = Rows(town("digits"), 128, share=0.5).batch(3, 4)
    assert batch.tokens.shape == batch.weights.shape == batch.position_ids.shape == (1, 512)
    assert batch.tokens.dtype == batch.cu_seqlens.dtype == batch.position_ids.dtype == torch.int64 and batch.weights.dtype == torch.float32
    moved = batch.to("cpu")
    assert isinstance(moved, Batch) and torch.equal(moved.tokens, batch.tokens) and torch.equal(moved.cu_seqlens, batch.cu_seqlens)


@torch.no_grad()
def test_a_batch_is_what_a_hybrid_takes():
    hybrid, _ = tiny_hybrid("llama", dtype=torch.float64)
    batch = Rows(numbered([5, 9, 30, 2, 40]), 20, seed=1).batch(0, 4)
    packed = hybrid(batch.tokens, cu_seqlens=batch.cu_seqlens, position_ids=batch.position_ids).logits
    alone = [hybrid(document).logits for document in batch.tokens.split(batch.cu_seqlens.diff().tolist(), 1)]
    assert len(alone) > 4
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=5e-6, rtol=0)


def test_training_that_resumes_gets_the_same_batches():
    """Nothing that was asked for before decides what comes next, synthetic rows included."""
    settings = {"corpus": town("digits"), "length": 130, "seed": 5, "share": 0.4}
    through = Rows(**settings)
    batches = [through.batch(step, 4) for step in range(12)]
    resumed = Rows(**settings)
    for step in (11, 7, 8):
        again = resumed.batch(step, 4)
        assert torch.equal(again.tokens, batches[step].tokens) and torch.equal(again.weights, batches[step].weights)
    assert not torch.equal(batches[0].tokens, Rows(**settings | {"seed": 6}).batch(0, 4).tokens)


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1), seed=st.integers(0, 5))
def test_synthetic_rows_keep_their_share_and_leave_no_text_out(share, seed):
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "_text", lambda self, index: asked.append(index))
        patch.setattr(Rows, "_needles", lambda self, rng: asked.append(None))
        patch.setattr(Rows, "_copies", lambda self, rng: asked.append(None))
        rows = Rows(numbered([500]), 200, seed, share)
        for index in range(300):
            rows.row(index)
            assert abs(asked.count(None) - share * (index + 1)) <= 1
    text = [index for index in asked if index is not None]
    assert text == list(range(len(text)))


def weighted(row, tokenizer, weight=10.0):
    """The runs of tokens that have the weight, decoded."""
    runs = np.split(np.arange(len(row.tokens)), np.flatnonzero(np.diff(row.weights == weight)) + 1)
    return [tokenizer.decode(row.tokens[run]).strip() for run in runs if row.weights[run[0]] == weight]


def template_of(text):
    """The first template whose fixed words the text has, with the values of its needles by key, and those of its answers."""
    for needle, question in TEMPLATES:
        said, asked = (dict(re.findall(_pattern(template), text)) for template in (needle, question))
        flipped = needle.index("{value}") < needle.index("{key}")
        said = {key: value for value, key in said.items()} if flipped else said
        flipped = question.index("{value}") < question.index("{key}")
        asked = {key: value for value, key in asked.items()} if flipped else asked
        if said and asked:
            return said, asked
    raise AssertionError(f"no template in {text!r}")


def _pattern(template):
    slots = {"kind": "(?:number|word|code)", "key": "([a-zA-Z]+(?: [a-z]+)?)", "value": r"([\w-]+)"}
    return re.sub(r"\\{(\w+)\\}", lambda slot: slots[slot[1]], re.escape(template))


@pytest.mark.parametrize("kind", ["digits", "numbers", "bos", "metaspace"])
@pytest.mark.parametrize("length", [128, 300])
def test_the_weights_sit_on_the_answers_and_every_answer_was_in_a_needle(kind, length):
    rows = Rows(town(kind), length, share=1.0)
    for seed in range(60):
        row = rows._needles(Random(seed))
        text = rows.corpus.tokenizer.decode(row.tokens, skip_special_tokens=True)
        said, asked = template_of(text)
        assert asked == said and 1 <= len(said) <= 6 and len(set(said.values())) == len(said)
        answers = weighted(row, rows.corpus.tokenizer)
        if kind == "metaspace":  # this toy has tokens of a word and its full stop
            answers = [answer.rstrip(".") for answer in answers]
        assert answers == list(asked.values())
        assert len(row.tokens) == length and row.starts.tolist() == [0] and row.weights[0] == 0
        assert set(row.weights[1:].tolist()) == {1.0, 10.0}


def test_synthetic_rows_begin_and_end_as_documents_do():
    for kind, front in (("digits", None), ("bos", 0)):
        rows = Rows(town(kind), 200, share=1.0)
        for seed in range(20):
            tokens = rows._needles(Random(seed)).tokens.tolist()
            assert tokens[-1] == 1 and tokens.count(1) == 1 and tokens.count(0) == (front is not None) and (front is None or tokens[0] == front)


def test_what_needle_rows_are_made_of():
    rows = Rows(town("digits"), 512, share=1.0)
    texts = [rows.corpus.tokenizer.decode(rows._needles(Random(seed)).tokens) for seed in range(300)]
    needles_in = Counter(len(template_of(text)[0]) for text in texts)
    assert set(needles_in) == set(range(1, 7))
    assert all(any(_fixed(question) in text for text in texts) for _, question in TEMPLATES)
    real = sum("the baker went home" in text for text in texts)
    assert 110 < real < 190  # half, five standard deviations either way
    depths = [text.index(next(iter(template_of(text)[0].values()))) / len(text) for text in texts if len(template_of(text)[0]) == 1]
    assert min(depths) < 0.2 and max(depths) > 0.6
    assert not any("special magic" in text or "key:" in text for text in texts)


def _fixed(template):
    return max(re.split(r"\{\w+\}", template), key=len)


def test_filler_reaches_as_far_as_is_asked():
    """It is made of one sentence for every six tokens."""
    assert min(len(sentence.split()) for sentence in islice(prose(Random(0)), 20_000)) >= 6
    for n_tokens in (0, 1, 5, 1000):
        assert len(Rows(town("words"), 128, share=1.0)._filler(Random(1), n_tokens)) == n_tokens


def test_copy_rows_repeat_what_nothing_else_tells():
    rows = Rows(town("bos"), 200, share=1.0)
    for seed in range(20):
        row = rows._copies(Random(seed))
        tokens = row.tokens[1:]
        period = Random(seed).randint(16, 100)
        assert row.tokens[0] == 0 and torch.equal(tokens[period:], tokens[:-period]) and not (tokens <= 1).any()
        assert row.weights.tolist() == [0.0] + [1.0] * 199


def test_a_few_synthetic_rows_are_copies():
    copies = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "_needles", lambda self, rng: copies.append(0))
        patch.setattr(Rows, "_copies", lambda self, rng: copies.append(1))
        rows = Rows(numbered([500]), 200, share=1.0)
        for index in range(2000):
            rows.row(index)
    assert 0.05 < np.mean(copies) < 0.11


def runs_of_words(text, n=4):
    words = re.findall(r"_|\w+|[^\w\s]", re.sub(r"\{+.*?\}+", " _ ", text).lower())
    return {tuple(words[start : start + n]) for start in range(len(words) - n + 1)}


def test_no_wording_of_the_probes_is_trained():
    trained = set().union(*(runs_of_words(text) for pair in TEMPLATES for text in pair))
    evaluated = runs_of_words(getsource(needles)) | runs_of_words(getsource(tasks))
    evaluated |= set().union(*(runs_of_words(text) for shape in needles.SHAPES.values() for text in (shape.needle, shape.question)))
    assert ("the", "special", "magic", "_") in evaluated
    assert trained and not trained & evaluated
    assert len(TEMPLATES) >= 6 and len({text for pair in TEMPLATES for text in pair}) == 2 * len(TEMPLATES)
    for text in (text for pair in TEMPLATES for text in pair):
        assert text.count("{value}") == 1 and "magic" not in text
        assert re.search(r"(^| )\{value\}([ .,]|$)", text)  # nothing for a tokenizer to join it to


def test_the_planted_models_words_give_rows_too():
    rows = Rows(town("words"), 160, share=0.5, answer_weight=3.0)
    batch = rows.batch(0, 8)
    assert batch.tokens.shape == (1, 1280) and set(batch.weights.unique().tolist()) == {0.0, 1.0, 3.0}


def test_wrong_settings_are_one_line_each():
    with pytest.raises(InputError, match="numbers has 9 tokens, fewer than one row of 10"):
        Rows(numbered([4, 5]), 10)
    with pytest.raises(InputError, match="share=1.5"):
        Rows(numbered([40]), 10, share=1.5)
    with pytest.raises(InputError, match="length=1 is too short for rows"):
        Rows(numbered([40]), 1)
    with pytest.raises(InputError, match="length=100 is too short for synthetic rows; give at least 128"):
        Rows(numbered([400]), 100, share=0.1)
    with pytest.raises(InputError, match="n_rows=6 rows a step do not divide among 4 ranks .* multiple of 4"):
        Rows(numbered([40]), 10).batch(0, 6, 0, 4)


def test_a_tokenizer_of_bytes_that_needs_longer_rows_says_so(monkeypatch):
    monkeypatch.setattr(module, "SHORTEST", 16)
    rows = Rows(town("digits"), 20, share=1.0)
    with pytest.raises(InputError, match=r"length=20 tokens have no room .* give (\d+) or more"):
        rows._needles(Random(0))
