"""The one place where text becomes tokens: a pair of prompts is encoded in context, checked and packed into a ``Probe``."""

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import torch

from hydralens.errors import InputError
from hydralens.models.lens import LensModel
from hydralens.probes.base import PAD_LABEL, Probe


@dataclass(frozen=True)
class Example:
    """One counterfactual pair as text.

    Attributes:
        clean_prompt: the prompt that ``answer`` continues.
        corrupt_prompt: its twin of equal token count, which ``foil`` continues.
        answer, foil: the continuations exactly as written, so usually with a leading space.
        needle: the part of ``clean_prompt`` that holds the answer (its first occurrence); ``None`` takes everything from the first difference to the last.
    """

    clean_prompt: str
    corrupt_prompt: str
    answer: str
    foil: str
    needle: str | None = None


@dataclass(frozen=True)
class Encoded:
    """A text with its tokens and the characters ``[start, end)`` of each."""

    text: str
    ids: list[int]
    starts: list[int]
    ends: list[int]

    def columns(self, start: int, end: int) -> tuple[int, int]:
        """Tokens ``[first, last)`` that hold the characters ``[start, end)``."""
        first = bisect_right(self.ends, start)
        return first, max(first, bisect_left(self.starts, end))

    def words(self, stop: int) -> list[tuple[str, int]]:
        """The words before character ``stop``, each with the number of tokens from the word before it to its end."""
        words = list(re.finditer(r"\S+", self.text[:stop]))
        through = [bisect_right(self.ends, word.end()) for word in words]
        return [(word[0], last - first) for word, first, last in zip(words, [0, *through], through, strict=False)]


def encode(tokenizer: Any, text: str) -> Encoded:
    """Tokens of ``text`` with the special tokens the tokenizer puts in front of it; those it appends are left off, because the answer follows.

    Special tokens that are written in ``text`` are text like any other.

    Raises:
        InputError: the tokenizer is missing or gives no offsets, or makes a special token of written text all the same.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"probes need a fast tokenizer (one with character offsets), not {type(tokenizer).__name__}; load the model with one")
    encoded = tokenizer(text, split_special_tokens=True, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    ids, offsets, added = encoded["input_ids"], encoded["offset_mapping"], encoded["special_tokens_mask"]
    while added and added[-1]:
        ids, offsets, added = ids[:-1], offsets[:-1], added[:-1]
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    written = [token for token, was_added in zip(ids, added, strict=True) if token in special and not was_added]
    if written:
        raise InputError(f"the text holds the special token {tokenizer.convert_ids_to_tokens(written[0])!r}; remove it from the text")
    return Encoded(text, ids, [start for start, _ in offsets], [end for _, end in offsets])


def count(tokenizer: Any, text: str) -> int:
    """Tokens that ``text`` adds to a text it follows after a space."""
    return len(encode(tokenizer, f"is {text}").ids) - len(encode(tokenizer, "is").ids)


@dataclass(frozen=True)
class _Pair:
    clean: list[int]
    corrupt: list[int]
    answer: list[int]
    foil: list[int]
    needle: tuple[int, int]


def make_probe(model: LensModel, name: str, capability: str, corruption: str, examples: list[Example], seed: int = 0, n_tokens: int | None = None) -> Probe:
    """Encode and check counterfactual pairs; every probe of the project goes through here, and so can your own.

    Answers are compared in context: leading tokens that answer and foil share (the bare space before a number, say) become part of the prompt, so that the
    first scored token decides. Shorter prompts are padded on the left.

    Args:
        model: gives the tokenizer.
        name, capability, corruption, seed: recorded in the probe.
        examples: the pairs.
        n_tokens: width to pad to; the longest prompt's by default.

    Raises:
        InputError: a pair breaks the contract of ``Probe``; the message names the pair and the words.
    """
    if not examples:
        raise InputError(f"probe {name} has no pairs; ask for at least one")
    pairs = []
    for index, example in enumerate(examples):
        try:
            pairs.append(_encode_pair(model.tokenizer, example))
        except InputError as error:
            raise InputError(f"probe {name}/{corruption}, pair {index}: {error}") from None
    width = max([len(pair.clean) for pair in pairs] + [n_tokens or 0])
    length = max(len(pair.answer) for pair in pairs)
    pad = next(token for token in (model.tokenizer.pad_token_id, model.tokenizer.eos_token_id, 0) if token is not None)
    left = [width - len(pair.clean) for pair in pairs]
    return Probe(
        name=name,
        capability=capability,
        corruption=corruption,
        seed=seed,
        clean=torch.tensor([[pad] * shift + pair.clean for shift, pair in zip(left, pairs, strict=True)]),
        corrupt=torch.tensor([[pad] * shift + pair.corrupt for shift, pair in zip(left, pairs, strict=True)]),
        attention_mask=torch.tensor([[0] * shift + [1] * (width - shift) for shift in left]),
        answer=torch.tensor([pair.answer + [PAD_LABEL] * (length - len(pair.answer)) for pair in pairs]),
        foil=torch.tensor([pair.foil + [PAD_LABEL] * (length - len(pair.foil)) for pair in pairs]),
        # The forced answer ends every row, so the columns that predict it are the row's last ones.
        read_positions=torch.tensor([list(range(width - len(pair.answer), width)) + [PAD_LABEL] * (length - len(pair.answer)) for pair in pairs]),
        needle_span=torch.tensor([[shift + pair.needle[0], shift + pair.needle[1]] for shift, pair in zip(left, pairs, strict=True)]),
        tokenizer=model.tokenizer,
    )


def _encode_pair(tokenizer: Any, example: Example) -> _Pair:
    clean = encode(tokenizer, example.clean_prompt + example.answer)
    foil = encode(tokenizer, example.clean_prompt + example.foil)
    corrupt = encode(tokenizer, example.corrupt_prompt + example.answer)
    if clean.ids == corrupt.ids:
        raise InputError("clean and corrupt prompt have the same tokens; change the words that decide the answer")
    _check_alignment(clean, corrupt, len(example.clean_prompt), len(example.corrupt_prompt))

    shared = next((column for column, (a, b) in enumerate(zip(clean.ids, foil.ids, strict=False)) if a != b), min(len(clean.ids), len(foil.ids)))
    if shared == min(len(clean.ids), len(foil.ids)):
        raise InputError(f"answer {example.answer!r} and foil {example.foil!r} have the same tokens as far as the shorter one goes; choose answers that differ")
    answer, other = clean.ids[shared:], foil.ids[shared:]
    if len(answer) != len(other):
        raise InputError(
            f"answer {example.answer!r} has {len(answer)} tokens and foil {example.foil!r} {len(other)} after the shared ones; choose answers of equal count"
        )
    if example.clean_prompt[clean.starts[shared] :].strip() or shared == 0:
        raise InputError(f"the tokenizer joins answer {example.answer!r} to the end of the prompt; end the prompt before a space and begin the answer with it")
    if corrupt.ids[shared:] != answer:
        raise InputError(f"answer {example.answer!r} has other tokens after the corrupt prompt than after the clean one; end both prompts with the same words")
    return _Pair(clean.ids[:-1], corrupt.ids[:-1], answer, other, _needle_columns(example, clean, corrupt))


def _needle_columns(example: Example, clean: Encoded, corrupt: Encoded) -> tuple[int, int]:
    if example.needle is None:
        differ = [column for column, (a, b) in enumerate(zip(clean.ids, corrupt.ids, strict=True)) if a != b]
        return differ[0], differ[-1] + 1
    start = example.clean_prompt.find(example.needle)
    if start < 0 or not example.needle:
        raise InputError(f"the needle {example.needle!r} is not in the clean prompt; give it exactly as it is written there")
    return clean.columns(start, start + len(example.needle))


def _check_alignment(clean: Encoded, corrupt: Encoded, clean_end: int, corrupt_end: int) -> None:
    """Equal token counts, and no shift in between: words that stand for each other must have equally many tokens."""
    a, b = clean.words(clean_end), corrupt.words(corrupt_end)
    if len(a) == len(b):
        unequal = [(x, y) for x, y in zip(a, b, strict=True) if x[1] != y[1]]
        if unequal:
            (word, tokens), (other, other_tokens) = unequal[0]
            raise InputError(f"{word!r} has {tokens} tokens and its counterfactual {other!r} has {other_tokens}; choose words of equal token count")
    elif len(clean.ids) != len(corrupt.ids):
        start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        changed = " ".join(word for word, _ in a[start : start + 5]), " ".join(word for word, _ in b[start : start + 5])
        raise InputError(
            f"the clean prompt has {len(clean.ids)} tokens and the corrupt one {len(corrupt.ids)}; "
            f"they part at {changed[0]!r} and {changed[1]!r}: change only words of equal token count"
        )
    if len(clean.ids) != len(corrupt.ids):
        raise InputError(f"the clean prompt has {len(clean.ids)} tokens and the corrupt one {len(corrupt.ids)}; change only words of equal token count")
