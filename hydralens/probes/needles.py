"""Needle-in-a-haystack probes (RULER's shapes, Hsieh et al. 2024) and key-value recall, as counterfactual pairs of a chosen length."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from hydralens.errors import InputError
from hydralens.models.lens import LensModel
from hydralens.probes.base import Probe
from hydralens.probes.build import Example, encode, make_probe
from hydralens.probes.text import OwnText, prose, repeated
from hydralens.probes.words import CITIES, NOUNS, PAIRED_KEYS, draw_code, draw_number, draw_until, lengths, same_length

CORRUPTIONS = ("value", "key", "swap")
NEEDLE = "The special magic {kind} for {key} is {value}."


@dataclass(frozen=True)
class Shape:
    """What the haystack is made of and what is asked of it.

    Attributes:
        filler: ``"repeat"``, ``"prose"`` (both give way to the user's own text) or ``"needles"``: nothing but other needles.
        kinds: kinds of value, taken in turn pair by pair: ``"number"``, ``"word"``, ``"code"``.
        others: needles with other keys that are not asked for.
        same_key: needles with the asked key whose values the prompt already lists, so that one is left to tell.
        asked_before: needles with other keys that the prompt asks for and answers first.
        needle: a needle's wording.
        question: follows the haystack; the answer continues it.
        separator: between sentences.
    """

    filler: str
    kinds: tuple[str, ...]
    others: int = 0
    same_key: int = 0
    asked_before: int = 0
    needle: str = NEEDLE
    question: str = "\n\nQuestion: What is the special magic {kind} for {key} mentioned in the text above?\nAnswer: The special magic {kind} for {key} is"
    separator: str = " "


SHAPES = {
    "niah_single_1": Shape("repeat", ("number",)),
    "niah_single_2": Shape("prose", ("number",)),
    "niah_single_3": Shape("prose", ("code",)),
    "niah_multikey_1": Shape("prose", ("number", "word"), others=3),
    "niah_multikey_2": Shape("needles", ("number",)),
    "niah_multivalue": Shape(
        "prose",
        ("number",),
        others=1,
        same_key=2,
        needle="One of the special magic {kind}s for {key} is {value}.",
        question="\n\nQuestion: What are all the special magic {kind}s for {key} mentioned in the text above?\n"
        "Answer: The special magic {kind}s for {key} are {listed} and",
    ),
    "niah_multiquery": Shape(
        "prose",
        ("number", "word"),
        others=1,
        asked_before=2,
        question="\n\nQuestion: What are the special magic {kind}s for {asked} and {key} mentioned in the text above?\n"
        "Answer: {answered} The special magic {kind} for {key} is",
    ),
    "niah_multikey_3": Shape("needles", ("code",)),
    "kv_recall": Shape("needles", ("number",), needle="{{ key: {key}, value: {value} }}", question="\n\n{{ key: {key}, value:", separator="\n"),
}


SUB_PROBES = tuple(name for name in SHAPES if name != "niah_multikey_3")  # too hard for small models to find heads with; evaluation asks it


@dataclass(frozen=True)
class _Needle:
    key: str
    value: str
    depth: float


@dataclass(frozen=True)
class _Plan:
    """A pair without its filler; ``needles[0]`` is the one asked for and ``counterfactual`` the needles of the corrupt prompt."""

    form: Shape
    kind: str
    needles: list[_Needle]
    counterfactual: list[_Needle]
    foil: str
    question: str

    def sentence(self, needle: _Needle) -> str:
        return self.form.needle.format(kind=self.kind, key=needle.key, value=needle.value)

    def prompt(self, needles: list[_Needle], filler: list[tuple[str, int]]) -> str:
        """The needles laid between the filler's sentences (given with their token counts) at their depths, then the question."""
        starts = list(accumulate((length for _, length in filler), initial=0))
        placed = [((start, 1, 0.0), sentence) for start, (sentence, _) in zip(starts, filler, strict=False)]
        for needle in needles:
            nearest = min(starts, key=lambda start: abs(start - needle.depth * starts[-1]))
            placed.append(((nearest, 0, needle.depth), self.sentence(needle)))
        return self.form.separator.join(sentence for _, sentence in sorted(placed)) + self.question

    def example(self, filler: list[tuple[str, int]]) -> Example:
        clean, corrupt = self.prompt(self.needles, filler), self.prompt(self.counterfactual, filler)
        return Example(clean, corrupt, f" {self.needles[0].value}", f" {self.foil}", self.sentence(self.needles[0]))

    def n_tokens(self, tokenizer: Any, filler: list[tuple[str, int]]) -> int:
        """Tokens of the clean prompt and all of the answer but its last token."""
        return len(encode(tokenizer, self.prompt(self.needles, filler) + f" {self.needles[0].value}").ids) - 1

    def count(self, tokenizer: Any, sentence: str) -> int:
        """Tokens that one more sentence adds."""
        return len(encode(tokenizer, f".{self.form.separator}{sentence}").ids) - len(encode(tokenizer, ".").ids)


def retrieval(
    model: LensModel,
    n_pairs: int = 8,
    n_tokens: int = 512,
    seed: int = 0,
    shapes: Sequence[str] | None = None,
    corruptions: Sequence[str] = CORRUPTIONS,
    depth: float | None = None,
    haystack: str | Path | list[str] | None = None,
) -> list[Probe]:
    """Every shape with every corruption, one probe each: the sub-probes of long-context retrieval (HydraHead).

    See ``niah`` for the arguments; ``shapes`` defaults to ``SUB_PROBES``.

    Raises:
        InputError: an unknown shape or corruption, or no room for needle and question in ``n_tokens``.
    """
    names = SUB_PROBES if shapes is None else shapes
    return [niah(model, shape, corruption, n_pairs, n_tokens, seed, depth, haystack) for shape in names for corruption in corruptions]


def kv_recall(model: LensModel, corruption: str = "value", n_pairs: int = 8, n_tokens: int = 512, seed: int = 0, depth: float | None = None) -> Probe:
    """A list of records and one of them begun again; see ``niah``."""
    return niah(model, "kv_recall", corruption, n_pairs, n_tokens, seed, depth)


def niah(
    model: LensModel,
    shape: str = "niah_single_2",
    corruption: str = "value",
    n_pairs: int = 8,
    n_tokens: int = 512,
    seed: int = 0,
    depth: float | None = None,
    haystack: str | Path | list[str] | None = None,
) -> Probe:
    """One needle-in-a-haystack probe.

    The corruptions, each of which leaves question and filler alone:

    - ``value``: the needle holds another value, the foil.
    - ``key``: the needle is about another key, so that the question has no needle; the foil is another needle's value where there is one, else an absent one.
    - ``swap``: the needle and another one exchange keys; the foil is the other's value. Single-needle shapes get that second needle for this corruption only.

    All values of a prompt are of one kind and, as far as they could be confused, begin with different characters.
    The clean prompts of a seed are the same for every corruption (but for that second needle).

    Args:
        model: gives the tokenizer.
        shape: a key of ``SHAPES``.
        corruption: ``"value"``, ``"key"`` or ``"swap"``.
        n_pairs: pairs.
        n_tokens: tokens of the prompt with the forced part of the answer; filler is cropped to fit, and what is left is padding.
        seed: equal seeds give equal tokens.
        depth: share of the filler before the needle, 0 to 1; ``None`` spreads the pairs evenly.
        haystack: filler of your own: text, a path to a text file or a list of paragraphs. Shapes made of needles only have no use for it.

    Raises:
        InputError: an unknown shape or corruption, a depth outside 0..1, or no room for needle and question in ``n_tokens``.
    """
    if shape not in SHAPES:
        raise InputError(f"no retrieval shape {shape!r}; choose from {', '.join(SHAPES)}")
    if corruption not in CORRUPTIONS:
        raise InputError(f"no corruption {corruption!r}; choose from {', '.join(CORRUPTIONS)}")
    if depth is not None and not 0 <= depth <= 1:
        raise InputError(f"depth={depth} is not in 0..1, the share of the text before the needle")
    form, own = SHAPES[shape], None if haystack is None else OwnText(haystack)
    used_words = frozenset(re.findall(r"\w+", own.text.lower())) if own else frozenset()

    draws = [_Draw(model.tokenizer, Random(f"{seed}/{shape}/{pair}"), form, form.kinds[pair % len(form.kinds)], used_words) for pair in range(n_pairs)]
    spread = [(pair + draw.rng.random()) / n_pairs for pair, draw in enumerate(draws)]
    depths = spread if depth is None else [depth] * n_pairs
    plans = [_plan(form, draw, corruption, at) for draw, at in zip(draws, depths, strict=True)]
    bare = [plan.n_tokens(model.tokenizer, []) for plan in plans]
    if max(bare, default=0) > n_tokens:
        raise InputError(f"n_tokens={n_tokens} has no room for needle and question of {shape}/{corruption}; ask for at least {max(bare)}")

    made = repeated if form.filler == "repeat" else prose
    examples = []
    for pair, (plan, draw) in enumerate(zip(plans, draws, strict=True)):
        filler = _more_needles(plan, draw) if form.filler == "needles" else (own or made)(Random(f"{seed}/{shape}/{pair}/filler"))
        examples.append(plan.example(_fit(model.tokenizer, plan, filler, n_tokens - bare[pair], n_tokens)))
    return make_probe(model, shape, "retrieval", corruption, examples, seed, n_tokens)


class _Draw:
    """One pair's keys and values: words that could be confused have equal token counts and different beginnings."""

    def __init__(self, tokenizer: Any, rng: Random, form: Shape, kind: str, used_words: frozenset[str]):
        self.tokenizer, self.rng, self.kind = tokenizer, rng, kind
        self.used_words = used_words
        self.digits = rng.randint(4, 7)
        needed = 3 + form.others + form.same_key + form.asked_before
        self.key_pool = PAIRED_KEYS if form.filler == "needles" else self._unused(CITIES, needed)
        self.value_pool = self._unused(NOUNS, needed) if kind == "word" else []
        self.drawn: set[str] = set()
        self.rivals: list[str] = []

    def key(self, like: str | None = None) -> str:
        """A new key, of as many tokens as ``like``."""
        return self._new(lambda: self.rng.choice(self.key_pool), like, lambda key: True, "key")

    def rival(self) -> str:
        """The answer (the first call) or a value that may stand in its place: as many tokens, another first character than the earlier ones."""
        value = self._new(self._make_value, next(iter(self.rivals), None), self._unlike_rivals, "value")
        self.rivals.append(value)
        return value

    def value(self) -> str:
        """Another new value, whose first character is no rival's."""
        return self._new(self._make_value, None, self._unlike_rivals, "value")

    def filler(self) -> tuple[str, str]:
        """Key and value of a needle that the haystack is made of: unlike all drawn so far, though such needles may repeat each other."""
        key = draw_until(lambda: self.rng.choice(self.key_pool), lambda key: key not in self.drawn, "new key")
        return key, draw_until(self._make_value, self._unlike_rivals, "new value")

    def _make_value(self) -> str:
        match self.kind:
            case "number":
                return draw_number(self.rng, self.digits)
            case "code":
                return draw_code(self.rng)
            case _:
                return self.rng.choice(self.value_pool)

    def _unlike_rivals(self, value: str) -> bool:
        return value not in self.used_words and all(value[0] != rival[0] for rival in self.rivals)

    def _new(self, make: Callable[[], str], like: str | None, accept: Callable[[str], bool], what: str) -> str:
        wanted = lengths(self.tokenizer, like) if like else None
        named = f"{what} with the token count of {like!r}" if like else f"new {what}"
        new = draw_until(make, lambda text: text not in self.drawn and accept(text) and (wanted is None or lengths(self.tokenizer, text) == wanted), named)
        self.drawn.add(new)
        return new

    def _unused(self, pool: list[str], needed: int) -> list[str]:
        free = [word for word in pool if word.lower() not in self.used_words]
        return same_length(self.tokenizer, free, needed, f"a prompt (of {len(pool)} words the haystack leaves {len(free)} unused)")


def _plan(form: Shape, draw: _Draw, corruption: str, depth: float) -> _Plan:
    asked = draw.key()
    absent, partner = draw.key(like=asked), draw.key(like=asked)
    answer, fresh, rival = draw.rival(), draw.rival(), draw.rival()

    def at() -> float:
        return draw.rng.random()

    others = [_Needle(partner, rival, at())] + [_Needle(draw.key(), draw.value(), at()) for _ in range(form.others - 1)]
    listed = sorted((_Needle(asked, draw.value(), at()) for _ in range(form.same_key)), key=lambda needle: needle.depth)
    answered = sorted((_Needle(draw.key(), draw.value(), at()) for _ in range(form.asked_before)), key=lambda needle: needle.depth)
    if not form.others and corruption != "swap":
        others = []
    needle = _Needle(asked, answer, depth)

    rest = listed + answered
    match corruption:
        case "value":
            foil, counterfactual = fresh, [replace(needle, value=fresh), *others, *rest]
        case "key":
            foil, counterfactual = others[0].value if others else fresh, [replace(needle, key=absent), *others, *rest]
        case _:
            foil, counterfactual = rival, [replace(needle, key=partner), replace(others[0], key=asked), *others[1:], *rest]

    question = form.question.format(
        kind=draw.kind,
        key=asked,
        listed=", ".join(other.value for other in listed),
        asked=", ".join(other.key for other in answered),
        answered=" ".join(NEEDLE.format(kind=draw.kind, key=other.key, value=other.value) for other in answered),
    )
    return _Plan(form, draw.kind, [needle, *others, *rest], counterfactual, foil, question)


def _more_needles(plan: _Plan, draw: _Draw) -> Iterator[str]:
    while True:
        key, value = draw.filler()
        yield plan.sentence(_Needle(key, value, depth=0))


def _fit(tokenizer: Any, plan: _Plan, filler: Iterator[str], room: int, n_tokens: int) -> list[tuple[str, int]]:
    """Sentences with their token counts that bring the prompt to ``n_tokens``, or just under it.

    The sentence that no longer fits is cropped from its front and comes first, as in a text that was cut out of a longer one; a needle is left out whole.
    """
    sentences: list[tuple[str, int]] = []
    for sentence in filler:
        length = plan.count(tokenizer, sentence)
        if length > room:
            break
        sentences.append((sentence, length))
        room -= length
    words = [] if plan.form.filler == "needles" else sentence.split()
    lengths = range(len(words) + 1)
    kept = bisect_right(lengths, room, key=lambda kept: plan.count(tokenizer, " ".join(words[-kept:])) if kept else 0) - 1
    if kept > 0:
        cropped = " ".join(words[-kept:])
        sentences.insert(0, (cropped, plan.count(tokenizer, cropped)))
    # At the start of the text, and where tokens reach over the joints, counts do not quite add up.
    while plan.n_tokens(tokenizer, sentences) > n_tokens:
        rest = "" if plan.form.filler == "needles" else sentences[0][0].partition(" ")[2]
        sentences[:1] = [(rest, plan.count(tokenizer, rest))] if rest else []
    return sentences
