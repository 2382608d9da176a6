import gzip
import json
import sys
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.models.lens import wrap_model
from hydralens.transfer import corpus as made
from hydralens.transfer.corpus import edges, from_files, from_hub, open_corpus, sampled
from tests.planted import planted_hf, word_tokenizer
from tests.probes.tokenizers import tokenizer

TEXTS = ["The castle is quiet. It rained at dusk.", "A letter for the baker.\n\nNothing else, not even 42.", "The end"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRALENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpora"


def write(folder, suffix, texts=TEXTS, column="text"):
    folder.mkdir(exist_ok=True)
    file = folder / f"data{suffix}"
    rows = [{"id": index, column: text} for index, text in enumerate(texts)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if suffix in (".txt", ".md"):
        for index, text in enumerate(texts):
            (folder / f"{index}{suffix}").write_text(text, encoding="utf-8")
        return folder
    if suffix == ".jsonl":
        file.write_text(lines)
    elif suffix == ".jsonl.gz":
        file.write_bytes(gzip.compress(lines.encode()))
    else:
        pytest.importorskip("pyarrow")
        pd.DataFrame(rows).to_parquet(file)
    return file


def decoded(corpus, words):
    return [words.decode(corpus.document(index), skip_special_tokens=True) for index in range(corpus.n_documents)]


@pytest.mark.parametrize("suffix", [".txt", ".md", ".jsonl", ".jsonl.gz", ".parquet"])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, suffix):
    words = tokenizer("digits")
    corpus = from_files(write(tmp_path / "data", suffix), words)
    assert decoded(corpus, words) == TEXTS
    assert corpus.tokens.dtype == np.uint32 and corpus.n_tokens == len(corpus.tokens) == corpus.documents[-1]


@pytest.mark.parametrize(("kind", "front"), [("digits", []), ("bos", [0])])
def test_documents_begin_as_the_tokenizer_wants_and_end_with_the_end_token(tmp_path, kind, front):
    words = tokenizer(kind)
    assert edges(words) == (front, [1])
    corpus = from_files(write(tmp_path / "data", ".jsonl"), words)
    for index, text in enumerate(TEXTS):
        assert corpus.document(index).tolist() == [*front, *words(text, add_special_tokens=False)["input_ids"], 1]


def test_a_tokenizer_without_special_tokens_adds_none(tmp_path):
    words = word_tokenizer()
    corpus = from_files(write(tmp_path / "data", ".jsonl"), words)
    assert corpus.document(2).tolist() == words("The end")["input_ids"]


def test_a_special_token_in_a_text_is_text(tmp_path):
    words = tokenizer("digits")
    corpus = from_files(write(tmp_path / "data", ".jsonl", ["before </s> after"]), words)
    (document,) = [corpus.document(0).tolist()]
    assert document.count(words.eos_token_id) == 1 and words.decode(document[:-1]) == "before </s> after"


def test_the_second_call_reads_what_the_first_one_made(tmp_path, cache, monkeypatch):
    words, source = tokenizer("digits"), write(tmp_path / "data", ".txt")
    first = from_files(source, words)
    about = json.loads((cache / first.sha256 / "corpus.json").read_text())
    assert about["source"] == str(source) and about["n_documents"] == 3 and about["n_tokens"] == first.n_tokens and about["sha256"] == first.sha256
    with monkeypatch.context() as patch:
        patch.setattr(made, "_write_tokens", None)
        words("a text that sets the tokenizer's own state", truncation=True, max_length=3)
        assert np.array_equal(from_files(source, words).tokens, first.tokens)
    (source / "0.txt").write_text(TEXTS[0] + "!")
    assert from_files(source, words).sha256 != first.sha256
    assert from_files(source, tokenizer("numbers")).sha256 != first.sha256
    assert len(list(cache.iterdir())) == 3


def test_nothing_is_left_of_a_corpus_that_failed(tmp_path, cache):
    source = write(tmp_path / "data", ".jsonl")
    source.write_text(source.read_text() + "{")
    with pytest.raises(InputError, match="data.jsonl line 4: is not JSON"):
        from_files(source, tokenizer("digits"))
    assert list(cache.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made.np, "save", full)
    with pytest.raises(InputError, match="No space left on device; set HYDRALENS_CACHE"):
        from_files(write(tmp_path / "data", ".txt"), tokenizer("digits"))
    assert list(cache.iterdir()) == []


@settings(max_examples=30, deadline=None)
@given(text=st.text(alphabet="ab \n.", max_size=60), size=st.integers(1, 9))
def test_pieces_are_the_text(text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "PIECE", size)
        pieces = list(made._pieces(text))
    assert "".join(piece for piece, _, _ in pieces) == text
    assert all(len(piece) <= size for piece, _, _ in pieces)
    assert [first for _, first, _ in pieces] == [index == 0 for index in range(len(pieces))]
    assert [last for _, _, last in pieces] == [index == len(pieces) - 1 for index in range(len(pieces))]


def test_a_long_document_has_the_tokens_it_has_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(made, "PIECE", 50)
    monkeypatch.setattr(made, "PIECES", 3)
    words, text = tokenizer("bos"), " ".join(TEXTS * 30)
    corpus = from_files(write(tmp_path / "data", ".jsonl", [text, "short", text]), words)
    whole = [0, *words(text, add_special_tokens=False)["input_ids"], 1]
    assert corpus.document(0).tolist() == corpus.document(2).tolist() == whole


def test_one_endless_line_is_a_document(tmp_path):
    words, text = tokenizer("digits"), "endless" * 20_000
    corpus = from_files(write(tmp_path / "data", ".txt", [text]), words)
    assert corpus.n_documents == 1 and decoded(corpus, words) == [text]


def test_blank_documents_and_empty_fields_are_left_out(tmp_path):
    corpus = from_files(write(tmp_path / "data", ".jsonl", ["one", "", None, " \n", "two"]), tokenizer("digits"))
    assert decoded(corpus, corpus.tokenizer) == ["one", "two"]


def test_another_column(tmp_path):
    for suffix in (".jsonl", ".parquet"):
        source = write(tmp_path / suffix[1:], suffix, column="content")
        assert decoded(from_files(source, tokenizer("digits"), column="content"), tokenizer("digits")) == TEXTS
        with pytest.raises(InputError, match=r"data\.\w+( line 1)?: has no column 'text'; give column= one of id, content"):
            from_files(source, tokenizer("digits"))
        with pytest.raises(InputError, match="column 'id' holds a int, not text"):
            from_files(source, tokenizer("digits"), column="id")


def bad(folder):
    """Sources that hold nothing to read, each with a part of what is said of it."""
    folder.mkdir()

    def file(name, content):
        path = folder / name
        path.write_bytes(content)
        return path

    (folder / "nothing").mkdir()
    return [
        (folder / "absent", "no file or directory"),
        (folder / "nothing", "holds no file of a known kind; give .txt, .md"),
        (file("empty.txt", b""), "has no text"),
        (file("blank.jsonl", b"\n\n"), "has no text"),
        (file("image.png", b"\x89PNG"), "is no file of a known kind"),
        (file("binary.txt", b"ab\xff\xfe"), "binary.txt: is not UTF-8 text"),
        (file("zeros.txt", b"ab\0\0"), "zeros.txt: is a binary file"),
        (file("binary.jsonl", b"\xff\xfe\x00"), "binary.jsonl: cannot be read after line 0"),
        (file("list.jsonl", b"[1]\n"), "list.jsonl line 1: is a list, not an object"),
        (file("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 1000)[:-20]), "cut.jsonl.gz: cannot be read after line"),
        (file("plain.jsonl.gz", b'{"text": "a"}\n'), "plain.jsonl.gz: cannot be read after line 0"),
        (file("cut.parquet", b"PAR1abc"), "cut.parquet: is not a readable parquet file"),
    ]


def test_bad_files_are_one_line_each(tmp_path):
    pytest.importorskip("pyarrow")
    for source, said in bad(tmp_path / "bad"):
        with pytest.raises(InputError) as refused:
            from_files(source, tokenizer("digits"))
        assert said in str(refused.value) and "\n" not in str(refused.value), source


def test_parquet_without_its_package_names_it(tmp_path, monkeypatch):
    source = write(tmp_path / "data", ".parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="pip install pyarrow"):
        from_files(source, tokenizer("digits"))


def test_a_slow_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="fast tokenizer, not SimpleNamespace"):
        open_corpus(from_folder(tmp_path), SimpleNamespace(is_fast=False))


def from_folder(tmp_path):
    corpus = from_files(write(tmp_path / "data", ".jsonl"), tokenizer("digits"))
    return tmp_path / "cache" / "corpora" / corpus.sha256


def test_a_corpus_of_another_tokenizer_cut_short_or_absent(tmp_path):
    folder = from_folder(tmp_path)
    with pytest.raises(InputError, match="another tokenizer"):
        open_corpus(folder, tokenizer("numbers"))
    with pytest.raises(InputError, match="is not a corpus"):
        open_corpus(tmp_path, tokenizer("digits"))
    whole = (folder / "tokens.bin").read_bytes()
    for left, said in ((len(whole) - 4, "of .* tokens are there"), (len(whole) - 2, "damaged"), (0, "damaged")):
        (folder / "tokens.bin").write_bytes(whole[:left])
        with pytest.raises(InputError, match=said):
            open_corpus(folder, tokenizer("digits"))
    (folder / "tokens.bin").write_bytes(whole)
    assert open_corpus(folder, tokenizer("digits")).n_documents == 3
    (folder / "documents.npy").write_bytes((folder / "documents.npy").read_bytes()[:-8])
    with pytest.raises(InputError, match="damaged"):
        open_corpus(folder, tokenizer("digits"))


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), share=st.floats(0.01, 0.99))
def test_held_out_text_is_the_last_and_nothing_is_lost_or_shared(lengths, share):
    ends = np.concatenate([[0], np.cumsum(lengths)]) + 7  # itself a part of a larger corpus
    whole = made.Corpus("", "", None, np.arange(ends[-1] + 5, dtype=np.uint32), ends)
    if not 0 < round(whole.n_tokens * (1 - share)) < whole.n_tokens:
        with pytest.raises(InputError, match="leaves nothing on one side"):
            whole.held_out(share)
        return
    train, held = whole.held_out(share)
    assert train.n_tokens and held.n_tokens
    assert list(chain(*(part.document(index) for part in (train, held) for index in range(part.n_documents)))) == list(range(7, ends[-1]))
    assert train.n_documents + held.n_documents == max(len(lengths), 2)
    assert abs(held.n_tokens - share * whole.n_tokens) <= max(lengths)


def hub(monkeypatch, rows):
    asked = []

    def load_dataset(*given, **more):
        asked.append((given, more))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_a_hub_dataset_is_streamed_no_further_than_needed(monkeypatch):
    words = tokenizer("digits")
    monkeypatch.setattr(made, "PIECES", 2)
    taken = []
    rows = ({"text": taken.append(index) or f"document number {index}"} for index in range(1000))
    asked = hub(monkeypatch, rows)
    corpus = from_hub("some/set", words, 30, subset="en", revision="abc")
    assert asked == [(("some/set", "en"), {"split": "train", "revision": "abc", "streaming": True})]
    assert 30 <= corpus.n_tokens < 30 + len(corpus.document(corpus.n_documents - 1))
    assert decoded(corpus, words) == [f"document number {index}" for index in range(corpus.n_documents)]
    assert len(taken) <= corpus.n_documents + 2
    from_hub("some/set", words, 30, subset="en", revision="abc")
    assert len(asked) == 1


def test_the_document_that_reaches_the_limit_is_whole(monkeypatch):
    monkeypatch.setattr(made, "PIECE", 10)
    hub(monkeypatch, [{"text": text} for text in TEXTS])
    assert decoded(from_hub("some/set", tokenizer("digits"), 3), tokenizer("digits")) == TEXTS[:1]


def test_the_real_package_streams(tmp_path):
    pytest.importorskip("datasets")
    folder = write(tmp_path / "data", ".jsonl").parent
    corpus = from_hub(str(folder), tokenizer("digits"), 10_000)
    assert decoded(corpus, corpus.tokenizer) == TEXTS


def test_what_can_go_wrong_with_a_hub_dataset(monkeypatch):
    hub(monkeypatch, [{"messages": []}])
    with pytest.raises(InputError, match="has no column 'text'; give column= one of messages"):
        from_hub("some/set", tokenizer("digits"), 30)

    def broken():
        yield {"text": "one"}
        raise ConnectionError("gone\naway")

    hub(monkeypatch, broken())
    with pytest.raises(InputError, match=r"'some/set' cannot be read \(ConnectionError: gone\)"):
        from_hub("some/set", tokenizer("digits"), 30)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        from_hub("some/set", tokenizer("digits"), 30)


@pytest.fixture(scope="module")
def teacher():
    words = word_tokenizer()
    words.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    hf = planted_hf(words.convert_ids_to_tokens(range(len(words))))
    with torch.no_grad():
        hf.lm_head.weight[words.eos_token_id, -1] = 6.0  # ends in one of a few dozen tokens, where all others are alike
    return wrap_model(hf, words, id="teacher")


def test_text_sampled_from_the_teacher(teacher):
    state = torch.get_rng_state()
    corpus = sampled(teacher, 200, seed=3, longest=40, batch=4)
    assert torch.equal(torch.get_rng_state(), state)
    documents = [corpus.document(index).tolist() for index in range(corpus.n_documents)]
    end = teacher.tokenizer.eos_token_id
    assert 200 <= corpus.n_tokens < 200 + len(documents[-1])
    assert all(end not in ids[:-1] and 1 < len(ids) <= 40 for ids in documents)
    assert all((ids[-1] == end) or len(ids) == 40 for ids in documents) and any(ids[-1] == end for ids in documents)
    assert len(set(map(tuple, documents))) == len(documents)


def test_sampling_is_of_the_seed_and_of_nothing_the_user_set(teacher, cache):
    def tokens(seed):
        corpus = sampled(teacher, 60, seed=seed, longest=20, batch=4)
        for file in (cache / corpus.sha256).iterdir():
            file.unlink()
        (cache / corpus.sha256).rmdir()
        return corpus.tokens.tolist()

    first = tokens(0)
    teacher.hf.generation_config.update(top_k=1, temperature=0.1, repetition_penalty=2.0)
    assert tokens(0) == first != tokens(1)


def test_a_teacher_without_a_token_to_begin_with(teacher):
    bare = word_tokenizer()
    with pytest.raises(InputError, match="no beginning-of-text and no end-of-text token"):
        sampled(SimpleNamespace(info=teacher.info, tokenizer=bare, device=teacher.device, hf=teacher.hf), 10)
