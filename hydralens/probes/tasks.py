"""Reasoning probes: short tasks whose answer follows from the prompt alone, no knowledge needed.

| task | asks | corruption |
|---|---|---|
| variable_tracking | the number a variable stands for, through two others | swap: the two chains' numbers change places |
| ioi | who receives, of two people (Wang et al. 2022) | swap: giver and receiver change places |
| induction | the next word of a list given a second time | swap: that word and a later one change places in the first list |
| comparison | which of two people has more | swap: their numbers change places |
| addition | a sum of two three-digit numbers, with and without carry | value: another first number |
| multiplication | a two-digit times a one-digit number | value: another two-digit number |
"""

from collections.abc import Callable, Sequence
from operator import add, mul
from random import Random
from typing import Any

from hydralens.errors import InputError
from hydralens.models.lens import LensModel
from hydralens.probes.base import Probe
from hydralens.probes.build import Example, count, make_probe
from hydralens.probes.words import NAMES, NOUNS, draw_number, draw_until, same_length


def reasoning(model: LensModel, n_pairs: int = 8, seed: int = 0, tasks: Sequence[str] | None = None) -> list[Probe]:
    """One probe per task; ``tasks`` defaults to all of ``TASKS``.

    Raises:
        InputError: an unknown task, or a tokenizer whose words or numbers give no pairs of equal token count.
    """
    names = list(TASKS) if tasks is None else tasks
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise InputError(f"no reasoning task {unknown[0]!r}; choose from {', '.join(TASKS)}")
    return [TASKS[name](model, n_pairs, seed) for name in names]


def variable_tracking(model: LensModel, n_pairs: int = 8, seed: int = 0) -> Probe:
    """Two interleaved chains of three variables (RULER's variable tracking, asked backwards).

    The answer begins with the hops, as that of a model that reasons aloud; its number is scored.
    """

    def example(rng: Random, pair: int) -> Example:
        names = rng.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 6)  # without I and O, which read as words or digits
        numbers = _two_numbers(model.tokenizer, rng, 4)
        clean, corrupt = (_chains(names, order) for order in (numbers, numbers[::-1]))
        return Example(clean, corrupt, f" {numbers[0]}", f" {numbers[1]}", f"The value of {names[0]} is {numbers[0]}.")

    return _probe(model, "variable_tracking", "swap", n_pairs, seed, example)


def ioi(model: LensModel, n_pairs: int = 8, seed: int = 0) -> Probe:
    """Indirect object identification; the receiver is named first in one half of the pairs and second in the other."""
    names = same_length(model.tokenizer, NAMES, 4, "ioi")
    events = [
        ("went to the shop", "gave a bottle of milk to"),
        ("had lunch at the restaurant", "passed the salt to"),
        ("met at the station", "handed the tickets to"),
        ("worked in the garden", "gave a flower to"),
        ("sat in the library", "lent a book to"),
        ("were at the office", "gave the keys to"),
    ]

    def example(rng: Random, pair: int) -> Example:
        receiver = rng.choice(names)
        giver = draw_until(lambda: rng.choice(names), lambda name: name[0] != receiver[0], "second name")
        first, second = (receiver, giver) if pair % 2 == 0 else (giver, receiver)
        what, handing = rng.choice(events)
        scene = f"When {first} and {second} {what},"
        return Example(f"{scene} {giver} {handing}", f"{scene} {receiver} {handing}", f" {receiver}", f" {giver}", f"{first} and {second}")

    return _probe(model, "ioi", "swap", n_pairs, seed, example)


def induction(model: LensModel, n_pairs: int = 8, seed: int = 0, n_words: int = 16) -> Probe:
    """A list of random words, begun a second time."""
    pool = same_length(model.tokenizer, NOUNS, n_words, "induction")

    def example(rng: Random, pair: int) -> Example:
        words = rng.sample(pool, n_words)
        asked = rng.randrange(n_words // 4, n_words // 2)
        later = [place for place in range(asked + 1, n_words) if words[place][0] != words[asked][0]]
        other = rng.choice(later)
        swapped = list(words)
        swapped[asked], swapped[other] = words[other], words[asked]
        again = "\nWords: " + " ".join(words[:asked])
        clean, corrupt = ("Words: " + " ".join(order) + again for order in (words, swapped))
        return Example(clean, corrupt, f" {words[asked]}", f" {words[other]}", f"{words[asked - 1]} {words[asked]}")

    return _probe(model, "induction", "swap", n_pairs, seed, example)


def comparison(model: LensModel, n_pairs: int = 8, seed: int = 0) -> Probe:
    """Two people and how much each has, two worked examples before; who has more is named first in one half of the pairs."""
    names = same_length(model.tokenizer, NAMES, 8, "comparison")

    def statement(people: list[str], numbers: tuple[str, str], things: str) -> str:
        return f"{people[0]} has {numbers[0]} {things} and {people[1]} has {numbers[1]} {things}."

    def example(rng: Random, pair: int) -> Example:
        shots = ""
        for more, things in zip((0, 1), ("coins", "books"), strict=True):
            people, numbers = _two_people(rng, names), _more_and_less(model.tokenizer, rng)
            shots += f"{statement(people, numbers if more == 0 else numbers[::-1], things)} The one with more {things} is {people[more]}.\n"
        people, numbers = _two_people(rng, names), _more_and_less(model.tokenizer, rng)
        more = pair % 2
        clean = statement(people, numbers if more == 0 else numbers[::-1], "stamps")
        corrupt = statement(people, numbers if more == 1 else numbers[::-1], "stamps")
        asked = " The one with more stamps is"
        return Example(shots + clean + asked, shots + corrupt + asked, f" {people[more]}", f" {people[1 - more]}", clean)

    return _probe(model, "comparison", "swap", n_pairs, seed, example)


def addition(model: LensModel, n_pairs: int = 8, seed: int = 0) -> Probe:
    """Sums of three-digit numbers after four worked ones; without a carry in one half of the pairs, with one in the other."""

    def terms(rng: Random, with_carry: bool) -> tuple[int, int]:
        while True:
            a, b = rng.randrange(100, 900), rng.randrange(100, 500)
            carries = any(int(x) + int(y) > 9 for x, y in zip(str(a), str(b), strict=True))
            if a + b < 1000 and carries == with_carry:
                return a, b

    def example(rng: Random, pair: int) -> Example:
        worked = [terms(rng, with_carry) for with_carry in (False, True, False, True)]
        return _arithmetic(model.tokenizer, rng, "+", add, worked, terms(rng, pair % 2 == 1))

    return _probe(model, "addition", "value", n_pairs, seed, example)


def multiplication(model: LensModel, n_pairs: int = 8, seed: int = 0) -> Probe:
    """Two-digit times one-digit numbers with products of three digits, after four worked ones."""

    def terms(rng: Random) -> tuple[int, int]:
        b = rng.randrange(3, 10)  # with 2, every product of three digits begins with 1
        return rng.randrange(-(-100 // b), 100), b

    def example(rng: Random, pair: int) -> Example:
        return _arithmetic(model.tokenizer, rng, "×", mul, [terms(rng) for _ in range(4)], terms(rng))

    return _probe(model, "multiplication", "value", n_pairs, seed, example)


TASKS: dict[str, Callable[[LensModel, int, int], Probe]] = {
    "variable_tracking": variable_tracking,
    "ioi": ioi,
    "induction": induction,
    "comparison": comparison,
    "addition": addition,
    "multiplication": multiplication,
}


def _probe(model: LensModel, name: str, corruption: str, n_pairs: int, seed: int, example: Callable[[Random, int], Example]) -> Probe:
    examples = [example(Random(f"{seed}/{name}/{pair}"), pair) for pair in range(n_pairs)]
    return make_probe(model, name, "reasoning", corruption, examples, seed)


def _chains(names: list[str], numbers: tuple[str, str]) -> str:
    """A number, a variable that stands for it and one that stands for that; woven with another chain, and the last variable asked."""
    a, b, c, d, e, f = names
    stated = [(a, numbers[0]), (b, numbers[1])] + [(name, f"the value of {source}") for name, source in ((c, a), (d, b), (e, c), (f, d))]
    chains = " ".join(f"The value of {name} is {value}." for name, value in stated)
    hops = f"The value of {e} is the value of {c}. The value of {c} is the value of {a}. The value of {a} is"
    return f"{chains}\nQuestion: What is the value of {e}?\nAnswer: {hops}"


def _two_people(rng: Random, names: list[str]) -> list[str]:
    first = rng.choice(names)
    return [first, draw_until(lambda: rng.choice(names), lambda name: name[0] != first[0], "second name")]


def _two_numbers(tokenizer: Any, rng: Random, digits: int) -> tuple[str, str]:
    """Numbers of equal token count whose first digits differ."""
    first = draw_number(rng, digits)
    length = count(tokenizer, first)
    second = draw_until(
        lambda: draw_number(rng, digits), lambda text: text[0] != first[0] and count(tokenizer, text) == length, f"number of the {length} tokens of {first!r}"
    )
    return first, second


def _more_and_less(tokenizer: Any, rng: Random) -> tuple[str, str]:
    first, second = _two_numbers(tokenizer, rng, 2)
    return max(first, second), min(first, second)


def _arithmetic(tokenizer: Any, rng: Random, sign: str, operate: Callable[[int, int], int], worked: list[tuple[int, int]], asked: tuple[int, int]) -> Example:
    """The first operand is replaced so that the result begins with another digit and nothing changes its length."""
    a, b = asked
    result = str(operate(a, b))

    def fits(operand: str) -> bool:
        other = str(operate(int(operand), b))
        alike = len(other) == len(result) and count(tokenizer, other) == count(tokenizer, result) and count(tokenizer, operand) == count(tokenizer, str(a))
        return alike and other[0] != result[0]

    changed = draw_until(lambda: draw_number(rng, len(str(a))), fits, f"counterfactual for {a} in '{a} {sign} {b}'")
    shots = "".join(f"{x} {sign} {y} = {operate(x, y)}\n" for x, y in worked)
    return Example(f"{shots}{a} {sign} {b} =", f"{shots}{changed} {sign} {b} =", f" {result}", f" {operate(int(changed), b)}")
