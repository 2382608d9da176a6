"""A corpus: documents as tokens on disk. Made once from files, a hub dataset or the teacher itself, then mapped into memory."""

import gzip
import hashlib
import json
import re
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt32
from tqdm.auto import tqdm
from transformers import GenerationConfig

from hydralens.errors import InputError
from hydralens.files import read_json, read_text, write_json
from hydralens.models.conversion import cache_folder
from hydralens.models.lens import LensModel

SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz", ".parquet")
PIECE, PIECES = 2**14, 256  # characters tokenised as one, and how many of these at once: a document of any length needs no more memory

Chunks = Iterator[tuple[list[int], bool]]  # tokens, and whether their document ends with them


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents, each begun with what the tokenizer puts in front of a text and ended by its end-of-text token where it has one.

    Attributes:
        source: what it was made from, for a person.
        sha256: what it was made from, to the byte; also the name of its folder.
        tokenizer: made the tokens.
        tokens: those of all documents one after another, mapped from the disk.
        documents: where in ``tokens`` each document starts, and the end of the last one.
    """

    source: str
    sha256: str
    tokenizer: Any
    tokens: UInt32[np.ndarray, "token"]
    documents: Int64[np.ndarray, "document_1"]

    @property
    def n_documents(self) -> int:
        return len(self.documents) - 1

    @property
    def n_tokens(self) -> int:
        return int(self.documents[-1] - self.documents[0])

    def document(self, index: int) -> UInt32[np.ndarray, "pos"]:
        return self.tokens[self.documents[index] : self.documents[index + 1]]

    def held_out(self, share: float) -> tuple["Corpus", "Corpus"]:
        """The corpus for training, and the last ``share`` of its tokens for evaluation.

        They part between two documents, as near to the share as can be; a single document is cut in two.

        Raises:
            InputError: the share is not between 0 and 1, or leaves one side without a token.
        """
        cut = int(self.documents[0]) + round(self.n_tokens * (1 - share))
        if not 0 < share < 1 or not self.documents[0] < cut < self.documents[-1]:
            raise InputError(f"held_out={share} of {self.n_tokens} tokens leaves nothing on one side; give a share between 0 and 1, such as 0.02")
        inner = self.documents[1:-1]
        cut = inner[np.abs(inner - cut).argmin()] if len(inner) else np.int64(cut)
        before, after = self.documents[self.documents < cut], self.documents[self.documents > cut]
        return replace(self, documents=np.append(before, cut)), replace(self, documents=np.insert(after, 0, cut))


def from_files(source: str | Path, tokenizer: Any, *, column: str = "text", verbose: bool = False) -> Corpus:
    """The corpus of a file or of a directory with all below it, in the order of the paths.

    A ``.txt`` or ``.md`` file is a document, and so is a line of ``.jsonl`` or ``.jsonl.gz`` and a row of ``.parquet``. Blank documents are left out;
    special tokens that are written in a text are text.

    Args:
        source: the file or directory.
        tokenizer: a fast one.
        column: which holds the text, in JSON lines and parquet.
        verbose: show progress.

    Raises:
        InputError: nothing to read there, not UTF-8, no such column, damaged, or no text; names file and line.
    """
    root = Path(source).expanduser()
    if not root.exists():
        raise InputError(f"no file or directory {str(source)!r}; give one with text")
    files = sorted(file for file in root.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES)) if root.is_dir() else [root]
    if not files or not files[0].name.endswith(SUFFIXES):
        raise InputError(f"{source} {'holds' if root.is_dir() else 'is'} no file of a known kind; give {', '.join(SUFFIXES)}")
    recipe = {"column": column, "files": [[file.name, _digest(file)] for file in files]}
    texts = (text for file in files for text in _texts(file, column))
    return _corpus(str(source), recipe, tokenizer, _tokenised(tokenizer, texts), None, verbose)


def from_hub(
    dataset: str,
    tokenizer: Any,
    max_tokens: int,
    *,
    subset: str | None = None,
    split: str = "train",
    revision: str | None = None,
    column: str = "text",
    verbose: bool = False,
) -> Corpus:
    """The corpus of a dataset's first documents, streamed: no more is fetched than is used.

    Args:
        dataset: hub id, or anything else that ``datasets.load_dataset`` opens.
        tokenizer: a fast one.
        max_tokens: the document that reaches it is the last.
        subset, split, revision: of the dataset. The corpus is kept under the revision as given: name a commit to be sure of what it is.
        column: which holds the text.
        verbose: show progress.

    Raises:
        InputError: the package ``datasets`` is missing, the dataset cannot be read, has no such column or no text.
    """
    where = {"dataset": dataset, "subset": subset, "split": split, "revision": revision}
    recipe = where | {"column": column, "max_tokens": max_tokens}
    chunks = _until(_tokenised(tokenizer, _streamed(column=column, **where)), max_tokens)
    return _corpus(f"{dataset} ({split})", recipe, tokenizer, chunks, max_tokens, verbose)


def sampled(model: LensModel, n_tokens: int, seed: int = 0, *, longest: int = 1024, batch: int = 64, verbose: bool = False) -> Corpus:
    """A corpus without data: the teacher's own text, sampled at temperature 1 from its beginning-of-text token (or end-of-text, where it has no other).

    Args:
        model: the teacher.
        n_tokens: the document that reaches it is the last.
        seed: equal seeds give equal text, on the same device and in the same dtype.
        longest: tokens after which a document breaks off.
        batch: documents sampled side by side.
        verbose: show progress.

    Raises:
        InputError: the model has no tokenizer, or that has neither of the two tokens.
    """
    recipe = {"model": model.info.fingerprint, "n_tokens": n_tokens, "seed": seed, "longest": longest, "batch": batch}
    return _corpus(f"sampled from {model.info.id}", recipe, model.tokenizer, _until(_samples(model, seed, longest, batch), n_tokens), n_tokens, verbose)


def open_corpus(folder: str | Path, tokenizer: Any) -> Corpus:
    """A corpus that is there already.

    Raises:
        InputError: the folder holds none, is cut short, or was made with another tokenizer.
    """
    folder = Path(folder)
    if not (folder / "corpus.json").is_file():
        raise InputError(f"{folder} is not a corpus: it has no corpus.json; make one from text first")
    about = read_json(folder / "corpus.json")
    if about["tokenizer"] != _fingerprint(tokenizer):
        raise InputError(f"{folder} was made with another tokenizer than this model's; make the corpus anew from {about['source']}")
    try:
        documents = np.load(folder / "documents.npy")
        tokens = np.memmap(folder / "tokens.bin", dtype=np.uint32, mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{folder} is damaged ({error}); delete it and make the corpus anew") from None
    if not len(tokens) == documents[-1] == about["n_tokens"] or len(documents) != about["n_documents"] + 1:
        raise InputError(f"{folder} is damaged: {len(tokens)} of {about['n_tokens']} tokens are there; delete it and make the corpus anew")
    return Corpus(about["source"], about["sha256"], tokenizer, tokens, documents)


def edges(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts in front of a text, and the one that ends a document; either may be none."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    front = encoded["input_ids"][: encoded["special_tokens_mask"].index(0)]
    return front, [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _corpus(source: str, recipe: dict, tokenizer: Any, chunks: Chunks, n_tokens: int | None, verbose: bool) -> Corpus:
    """The corpus of this recipe: opened if it is there, and else made of ``chunks``, whole or not at all."""
    fingerprint = _fingerprint(tokenizer)
    key = hashlib.sha256(json.dumps([recipe, fingerprint]).encode()).hexdigest()
    target = cache_folder() / "corpora" / key
    if not target.is_dir():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tokenising-") as temporary:
                folder = Path(temporary) / "corpus"
                folder.mkdir()
                documents = _write_tokens(folder, chunks, tqdm(desc=source, total=n_tokens, unit=" tokens", unit_scale=True, disable=not verbose))
                if len(documents) == 1:
                    raise InputError(f"{source} has no text; give a source with some")
                about = {"source": source, "tokenizer": fingerprint, "n_documents": len(documents) - 1, "n_tokens": int(documents[-1]), "sha256": key}
                write_json(folder / "corpus.json", about)
                _rename(folder, target)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"cannot write the corpus to {target}: {reason}; set HYDRALENS_CACHE to a writable folder with free space") from None
    return open_corpus(target, tokenizer)


def _write_tokens(folder: Path, chunks: Chunks, progress: tqdm) -> Int64[np.ndarray, "document_1"]:
    documents, total = array("q", [0]), 0
    with progress, (folder / "tokens.bin").open("wb") as file:
        for ids, ends in chunks:
            file.write(np.array(ids, np.uint32).tobytes())
            total += len(ids)
            progress.update(len(ids))
            if ends:
                documents.append(total)
    offsets = np.array(documents, np.int64)
    np.save(folder / "documents.npy", offsets)
    return offsets


def _rename(folder: Path, target: Path) -> None:
    """Give a finished folder its name, unless another process was quicker."""
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _tokenised(tokenizer: Any, texts: Iterable[str]) -> Chunks:
    front, end = edges(tokenizer)
    pieces = (piece for text in texts for piece in _pieces(text))
    while group := list(islice(pieces, PIECES)):
        encoded = tokenizer([text for text, _, _ in group], add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        for (_, first, last), ids in zip(group, encoded, strict=True):
            yield front * first + ids + end * last, last


def _pieces(text: str) -> Iterator[tuple[str, bool, bool]]:
    """The text cut before white space where there is any, each piece with whether it is the first and whether it is the last."""
    for match in re.finditer(rf".{{1,{PIECE}}}(?=\s|\Z)|.{{1,{PIECE}}}", text, re.DOTALL):
        yield match[0], match.start() == 0, match.end() == len(text)


def _until(chunks: Chunks, n_tokens: int) -> Chunks:
    total = 0
    for ids, ends in chunks:
        yield ids, ends
        total += len(ids)
        if ends and total >= n_tokens:
            return


def _texts(file: Path, column: str) -> Iterator[str]:
    """The documents of one file that are not blank."""
    if file.suffix in (".txt", ".md"):
        text = read_text(file)
        if "\0" in text:
            raise InputError(f"{file}: is a binary file (it holds a zero byte); give a text file")
        texts = iter([text])
    else:
        texts = _column(_parquet_rows(file, column) if file.suffix == ".parquet" else _json_rows(file), column)
    return (text for text in texts if text.strip())


def _column(rows: Iterable[tuple[str, dict]], column: str) -> Iterator[str]:
    """One column of rows that come with where they stand; an empty field is a blank text."""
    for where, row in rows:
        if column not in row:
            raise InputError(f"{where}: has no column {column!r}; give column= one of {', '.join(map(str, row)) or '(it has none)'}")
        text = "" if row[column] is None else row[column]
        if not isinstance(text, str):
            raise InputError(f"{where}: column {column!r} holds a {type(text).__name__}, not text; give column= one of {', '.join(map(str, row))}")
        yield text


def _json_rows(file: Path) -> Iterator[tuple[str, dict]]:
    opened = gzip.open if file.suffix == ".gz" else open
    number = 0
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise InputError(f"{file} line {number}: is a {type(row).__name__}, not an object; give one JSON object a line")
                    yield f"{file} line {number}", row
    except json.JSONDecodeError as error:
        raise InputError(f"{file} line {number}: is not JSON ({error.msg}); give one JSON object a line") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"{file}: cannot be read after line {number} ({error}); the file is cut off or damaged, get it anew") from None


def _parquet_rows(file: Path, column: str) -> Iterator[tuple[str, dict]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{file}: reading parquet needs the package pyarrow; pip install pyarrow, or give .jsonl") from None
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            for batch in table.iter_batches(columns=[column] if column in names else names[:0]):
                if column not in names:
                    yield str(file), dict.fromkeys(names)
                for row in batch.to_pylist():
                    yield str(file), row
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{file}: is not a readable parquet file ({_first_line(error)}); the file is cut off or damaged, get it anew") from None


def _streamed(dataset: str, subset: str | None, split: str, revision: str | None, column: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError(f"streaming {dataset!r} needs the package datasets; pip install datasets, or give a directory of text") from None
    try:
        rows = load_dataset(dataset, subset, split=split, revision=revision, streaming=True)
        for text in _column(((dataset, row) for row in rows), column):
            if text.strip():
                yield text
    except InputError:
        raise
    except Exception as error:  # network, hub and every reader of datasets have errors of their own
        raise InputError(f"dataset {dataset!r} cannot be read ({type(error).__name__}: {_first_line(error)}); check its name, subset and split") from None


@torch.no_grad()
def _samples(model: LensModel, seed: int, longest: int, batch: int) -> Chunks:
    tokenizer = model.tokenizer
    front, _ = edges(tokenizer)
    end = tokenizer.eos_token_id
    start = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is None:
        raise InputError(f"the tokenizer of {model.info.id} has no beginning-of-text and no end-of-text token to sample from; give text instead")
    # Everything that a model's own settings for chatting could bend is set back: what is wanted is its distribution.
    plain = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, repetition_penalty=1.0, no_repeat_ngram_size=0,
        max_new_tokens=longest, eos_token_id=end, pad_token_id=start,
    )  # fmt: skip
    prompt = torch.full((batch, 1), start, device=model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    number = 0
    while True:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed * 1_000_003 + number)
            rows = model.hf.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=plain)
        for ids in rows[:, 1:].tolist():
            ids = ids[: ids.index(end) + 1] if end in ids else ids
            if ids != [end]:
                yield front + ids, True
        number += 1


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}; give the path of a readable file") from None


def _fingerprint(tokenizer: Any) -> str:
    """Digest of everything that decides what tokens a text gets."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"a corpus needs a fast tokenizer, not {type(tokenizer).__name__}; load the model with one")
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    made |= {"truncation": None, "padding": None}  # set by whoever called it last
    return hashlib.sha256(json.dumps([made, tokenizer.eos_token_id], sort_keys=True).encode()).hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
