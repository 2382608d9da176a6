"""Rows of equal length for training: text as it comes, and prompts whose answers have to be retrieved."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import islice
from random import Random

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from hydralens.errors import InputError
from hydralens.probes.build import encode
from hydralens.probes.text import prose
from hydralens.probes.words import CITIES, NOUNS, PAIRED_KEYS, draw_code, draw_number
from hydralens.transfer.corpus import Corpus, edges

# What a needle says, and how it is asked for and answered. No wording of the probes is among them: what is evaluated is not what was trained.
# A value stands after a space and before a space or a mark, which tokenizers hardly ever join to words; a token that holds any of an answer counts as answer.
TEMPLATES = (
    ("A note gives {value} as the {kind} belonging to {key}.", "According to the note, the {kind} belonging to {key} was {value}."),
    ("| {key} | {kind} | {value} |", "Row {key}, column {kind}: {value}."),
    ("Whoever asks about {key} should be given the {kind} {value}.", "Somebody asks about {key}. Which {kind} do they get? {value}."),
    ("Please remember {value}, the {kind} assigned to {key}.", "Which {kind} was assigned to {key}? It was {value}."),
    ("In the register, {key} is entered under {value}.", "The register enters {key} under {value}."),
    ("{key} answers to the {kind} {value} and to no other.", "To which {kind} does {key} answer? To {value}."),
    ("The desk sent {value} when somebody wanted the {kind} of {key}.", "Somebody wanted the {kind} of {key}, so the desk sent {value}."),
    ("set {kind}[{key}] to {value} ;", "get {kind}[{key}] gives {value} ;"),
)
VALUES: dict[str, Callable[[Random, int], str]] = {
    "number": draw_number,
    "word": lambda rng, _: rng.choice(NOUNS),
    "code": lambda rng, _: draw_code(rng),
}
MOST_NEEDLES = 6
REAL_SHARE = 0.5  # of haystacks that are text of the corpus; the others are filler
LEAST_HAYSTACK = 0.25  # of a row, or there are fewer needles
COPY_SHARE = 0.08  # of synthetic rows that are a list of tokens over and over
SHORTEST = 128  # tokens in which a needle and its question have room
_BEFORE = "is"  # a word before a sentence that is tokenised as one in the middle of a text

Ids = Int64[np.ndarray, "pos"]


@dataclass(frozen=True, eq=False)
class Row:
    """One row of training tokens.

    Attributes:
        tokens: the ids.
        weights: how much the prediction OF each token counts: 0 for the first of each document, which nothing comes before.
        starts: where in the row documents start; the first is 0.
    """

    tokens: Int[Tensor, "pos"]
    weights: Float[Tensor, "pos"]
    starts: Int[Tensor, "document"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows side by side, as one row of packed documents.

    Attributes:
        tokens, weights: as in ``Row``.
        cu_seqlens: where documents start, and the end of the last one.
        position_ids: of each token in its document.
    """

    tokens: Int[Tensor, "1 pos"]
    weights: Float[Tensor, "1 pos"]
    cu_seqlens: Int[Tensor, "document_1"]
    position_ids: Int[Tensor, "1 pos"]

    def to(self, device: str | torch.device) -> "Batch":
        return Batch(*(getattr(self, each.name).to(device, non_blocking=True) for each in fields(self)))


@dataclass(frozen=True, eq=False)
class Rows:
    """Endlessly many rows; row ``i`` depends on nothing but the corpus, these settings and ``i``, so that any rank can make it at any time.

    Text rows run through the corpus epoch by epoch, each in another order of its documents, which are cut where a row ends; a document goes on in the next
    row as if it began there. The tokens at an epoch's end that fill no row are left out. Synthetic rows are spread evenly between the text rows.

    Attributes:
        corpus: the text.
        length: tokens a row.
        seed: of the order and of the synthetic rows.
        share: of synthetic rows: needles in a haystack, all asked for, with one of ``TEMPLATES``; a few are lists of tokens over and over.
        answer_weight: what a token of an answer counts; other tokens count 1.

    Raises:
        InputError: the corpus does not fill a row, the share is no share, or rows are too short for needles.
    """

    corpus: Corpus
    length: int
    seed: int = 0
    share: float = 0.0
    answer_weight: float = 10.0
    _order: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InputError(f"share={self.share} of synthetic rows is not in 0..1; give 0.2 for one row of five")
        least = SHORTEST if self.share else 2
        if self.length < least:
            raise InputError(f"length={self.length} is too short for {'synthetic ' if self.share else ''}rows; give at least {least} tokens")
        if self.corpus.n_tokens < self.length:
            raise InputError(f"{self.corpus.source} has {self.corpus.n_tokens} tokens, fewer than one row of {self.length}; give more text or shorter rows")

    @property
    def per_epoch(self) -> int:
        """Text rows that go through the corpus once."""
        return self.corpus.n_tokens // self.length

    def row(self, index: int) -> Row:
        before, after = (int(self._offset + i * self.share) for i in (index, index + 1))  # synthetic rows up to here
        if before == after:
            return self._text(index - before)
        rng = Random(f"{self.seed}/{index}")
        return self._copies(rng) if rng.random() < COPY_SHARE else self._needles(rng)

    def batch(self, step: int, n_rows: int, rank: int = 0, world: int = 1) -> Batch:
        """This rank's part of the ``n_rows`` rows of a step, which are the same for any number of ranks.

        Micro-batches are further parts: micro-batch ``m`` of ``k`` on this rank is part ``rank * k + m`` of ``world * k``.

        Raises:
            InputError: the rows cannot be shared out evenly.
        """
        if n_rows < 1 or n_rows % world:
            raise InputError(f"n_rows={n_rows} rows a step do not divide among {world} ranks (or micro-batches); give a multiple of {world}")
        first = step * n_rows + rank * (n_rows // world)
        rows = [self.row(index) for index in range(first, first + n_rows // world)]
        starts = torch.cat([row.starts + place * self.length for place, row in enumerate(rows)])
        ends = torch.cat([starts, torch.tensor([len(rows) * self.length])])
        positions = torch.arange(len(rows) * self.length) - starts.repeat_interleave(ends.diff())
        return Batch(torch.cat([row.tokens for row in rows])[None], torch.cat([row.weights for row in rows])[None], ends, positions[None])

    @cached_property
    def _offset(self) -> float:
        return Random(f"{self.seed}").random()

    def _text(self, index: int) -> Row:
        epoch, place = divmod(index, self.per_epoch)
        order, ends = self._epoch(epoch)
        which = int(np.searchsorted(ends, place * self.length, side="right"))
        parts, starts, filled = [], [], 0
        while filled < self.length:
            document = self.corpus.document(order[which])
            begin = place * self.length + filled - int(ends[which]) + len(document)
            parts.append(document[begin : begin + self.length - filled])
            starts.append(filled)
            filled += len(parts[-1])
            which += 1
        return _row(np.concatenate(parts), np.ones(self.length), starts)

    def _epoch(self, epoch: int) -> tuple[Int64[np.ndarray, "document"], Int64[np.ndarray, "document"]]:
        """The order of the documents, and where each then ends; the last epoch asked for is kept."""
        known = self._order.get(epoch)
        if known is None:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.corpus.n_documents)
            known = order, np.diff(self.corpus.documents)[order].cumsum()
            self._order.clear()
            self._order[epoch] = known
        return known

    def _needles(self, rng: Random) -> Row:
        """Needles of one wording and one kind of value between the sentences of a haystack, then a question and its answer for each, in another order."""
        needle, question = rng.choice(TEMPLATES)
        kind, digits, n_needles = rng.choice(list(VALUES)), rng.randint(4, 7), rng.randint(1, MOST_NEEDLES)
        keys = rng.sample(rng.choice((CITIES, PAIRED_KEYS)), n_needles)
        values: list[str] = []
        while len(values) < n_needles:
            value = VALUES[kind](rng, digits)
            values += [value] if value not in values else []
        joint = rng.choice(" \n")
        pairs = [
            (self._sentence(joint + needle, kind, key, value, 1.0), self._sentence("\n" + question, kind, key, value, self.answer_weight))
            for key, value in zip(keys, values, strict=True)
        ]
        while len(pairs) > 1 and self._room(pairs) < self.length * LEAST_HAYSTACK:
            pairs.pop()
        room = self._room(pairs)
        if room < 0:
            raise InputError(f"length={self.length} tokens have no room for a needle and its question with this tokenizer; give {self.length - room} or more")

        haystack = self._real(rng, room) if rng.random() < REAL_SHARE else self._filler(rng, room)
        gaps = [0, *(np.flatnonzero(self._ends_sentence[haystack]) + 1).tolist()]
        before, *after = (_plain(part) for part in np.split(haystack, sorted(rng.choices(gaps, k=len(pairs)))))
        front, end = self._edges
        pieces = [_plain(front), before]
        for (said, _), part in zip(pairs, after, strict=True):
            pieces += [said, part]
        pieces += [asked for _, asked in rng.sample(pairs, len(pairs))] + [_plain(end)]
        return _row(np.concatenate([piece.ids for piece in pieces]), np.concatenate([piece.weights for piece in pieces]), [0])

    def _room(self, pairs: list[tuple["_Piece", "_Piece"]]) -> int:
        """Tokens that are left for the haystack."""
        return self.length - sum(map(len, self._edges)) - sum(len(piece.ids) for pair in pairs for piece in pair)

    def _sentence(self, template: str, kind: str, key: str, value: str, weight: float) -> "_Piece":
        """A sentence that follows other text; the value's tokens have the given weight."""
        before, after = (part.format(kind=kind, key=key) for part in template.split("{value}"))
        encoded = encode(self.corpus.tokenizer, _BEFORE + before + value + after)
        weights = np.ones(len(encoded.ids))
        weights[slice(*encoded.columns(len(_BEFORE + before), len(_BEFORE + before + value)))] = weight
        own = slice(*encoded.columns(len(_BEFORE), len(encoded.text)))
        return _Piece(np.array(encoded.ids[own], np.int64), weights[own])

    def _filler(self, rng: Random, n_tokens: int) -> Ids:
        sentences = "".join(f" {sentence}" for sentence in islice(prose(rng), n_tokens // 6 + 1))  # none has fewer than six words
        encoded = encode(self.corpus.tokenizer, _BEFORE + sentences)
        first, _ = encoded.columns(len(_BEFORE), len(encoded.text))
        return np.array(encoded.ids[first : first + n_tokens], np.int64)

    def _real(self, rng: Random, n_tokens: int) -> Ids:
        """Text of the corpus from anywhere on, without what marks its documents, which is two tokens of three at most."""
        first, total = int(self.corpus.documents[0]), self.corpus.n_tokens
        found = self.corpus.tokens[first + (rng.randrange(total) + np.arange(3 * n_tokens)) % total].astype(np.int64)
        return found[~np.isin(found, np.concatenate(self._edges))][:n_tokens]

    def _copies(self, rng: Random) -> Row:
        """Tokens of the corpus in an order that nothing but their first round tells, round after round."""
        period = rng.randint(SHORTEST // 8, self.length // 2)
        shuffled = rng.sample(self._real(rng, period).tolist(), period)
        front, _ = self._edges
        tokens = np.concatenate([front, np.resize(shuffled, self.length - len(front))])
        return _row(tokens, np.ones(self.length), [0])

    @cached_property
    def _edges(self) -> tuple[list[int], list[int]]:
        return edges(self.corpus.tokenizer)

    @cached_property
    def _ends_sentence(self) -> Bool[np.ndarray, "vocab"]:
        tokenizer = self.corpus.tokenizer
        n_vocab = max(tokenizer.get_vocab().values()) + 1  # more than its length where ids are left out
        return np.array([text.endswith((".", "!", "?", "\n")) for text in tokenizer.batch_decode([[token] for token in range(n_vocab)])])


@dataclass(frozen=True, eq=False)
class _Piece:
    ids: Ids
    weights: Float[np.ndarray, "pos"]


def _plain(ids: Ids | list[int]) -> _Piece:
    return _Piece(np.array(ids, np.int64), np.ones(len(ids)))


def _row(ids: Ids, weights: Float[np.ndarray, "pos"], starts: list[int]) -> Row:
    weights[starts] = 0
    return Row(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(weights.astype(np.float32)), torch.tensor(starts))
