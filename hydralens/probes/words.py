"""The words and numbers that needles are made of, drawn so that counterfactuals keep the token count."""
# ruff: noqa: SIM905 - the word lists read better as running text

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from hydralens.errors import InputError
from hydralens.probes.build import count

CITIES = """
Paris London Berlin Madrid Rome Vienna Dublin Athens Moscow Tokyo Cairo Delhi Sydney Toronto Chicago Boston Dallas Denver Seattle Houston Atlanta Miami
Phoenix Detroit Montreal Vancouver Lisbon Prague Warsaw Oslo Stockholm Copenhagen Brussels Amsterdam Geneva Milan Venice Florence Barcelona Munich Hamburg
Frankfurt Istanbul Baghdad Mumbai Bangkok Manila Seoul Beijing Shanghai Singapore Melbourne Havana Nairobi
""".split()

NOUNS = """
castle apple piano rocket candle bottle hammer pencil helmet mirror basket carpet magnet needle pepper rabbit saddle ticket turtle violin wallet anchor
banana button camera dragon engine guitar jacket kettle ladder lemon medal onion orange pocket ribbon salmon shield spider sugar sword tiger tomato tower
trumpet turkey uniform vessel whale zebra diamond emerald falcon giant honey ivory jungle lion monkey nickel olive pearl queen robot silver temple umbrella
volcano wizard arrow bell crown drum eagle feather globe hawk jewel knife lamp mask nest oven planet rope statue throne vase wheel yacht
""".split()

ADJECTIVES = """
angry brave calm clever cold curious dark deep dry eager early fair famous fast fierce fine fresh gentle golden grand happy heavy hidden hollow honest
humble hungry icy jolly keen kind large late lazy light little lively lonely loud loyal lucky mad mild modern narrow neat noble odd pale plain polite
proud pure quick quiet rapid rare rich rough round royal sad safe secret sharp short shy silent simple slow small smart smooth soft solid sour steady
strange strong sweet swift tall tame thin tiny tough true vast warm weak wealthy wet wild wise wooden young
""".split()

ANIMALS = """
ant ape bat bear beaver bee beetle bison boar buffalo bull camel cat cobra cow crab crane crow deer dog dolphin donkey dove duck elephant elk finch fish
fly fox frog goat goose gorilla grouse hare heron hornet horse hound jackal jaguar kangaroo koala lamb lark leopard lizard lobster llama lynx magpie
mole moose mosquito moth mouse mule octopus otter owl ox panda panther parrot pelican penguin pig pigeon pony puma python quail ram rat raven
robin seal shark sheep shrimp skunk sloth snail snake sparrow squid squirrel stork swan toad trout viper vulture walrus wasp weasel wolf wombat worm wren
""".split()

PAIRED_KEYS = [f"{adjective} {animal}" for adjective in ADJECTIVES for animal in ANIMALS]

NAMES = """
Mary John Tom James Dan Mark Paul Anna Alice Peter David Sarah Laura Kate Emma Lucy Jack George Henry Robert Michael Daniel Martin Simon Adam Sam Max Lisa
Susan Helen Jane Ruth Rose Amy Maria Julia Eric Kevin Brian Scott Jason Ryan Steven Andrew
""".split()


def lengths(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token counts of a text's words, and of the whole before punctuation, which some tokenizers join to the word before it."""
    return tuple(count(tokenizer, part) for part in (*text.split(), f"{text}.", f"{text},"))


def same_length(tokenizer: Any, words: Iterable[str], needed: int, used_for: str) -> list[str]:
    """Those of ``words`` that have equally many tokens after a space: the shortest such group with ``needed`` members.

    Raises:
        InputError: no group is large enough.
    """
    known = {word: lengths(tokenizer, word) for word in words}
    sizes = Counter(known.values())
    fitting = [length for length in sorted(sizes) if sizes[length] >= needed]
    if not fitting:
        shown = ", ".join(f"{word!r} {length}" for word, (length, *_) in list(known.items())[:5])
        raise InputError(
            f"{used_for} needs {needed} words of equal token count and the tokenizer gives at most {max(sizes.values(), default=0)} "
            f"({shown} tokens); use another haystack or tokenizer"
        )
    return [word for word, length in known.items() if length == fitting[0]]


def draw_until(make: Callable[[], str], accept: Callable[[str], bool], what: str, tries: int = 2000) -> str:
    """The first ``make()`` that is accepted.

    Raises:
        InputError: none of ``tries`` draws is; the last one is named.
    """
    for _ in range(tries):
        drawn = make()
        if accept(drawn):
            return drawn
    raise InputError(f"found no {what} in {tries} draws (the last was {drawn!r}); try another seed or tokenizer")


def draw_number(rng: Random, digits: int) -> str:
    """A decimal number of exactly ``digits`` digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def draw_code(rng: Random) -> str:
    """Twelve hexadecimal digits in three groups, the long value of ``niah_single_3``; a decimal digit comes first, so that all codes begin alike."""
    digits = draw_number(rng, 1) + "".join(rng.choice("0123456789abcdef") for _ in range(11))
    return f"{digits[:4]}-{digits[4:8]}-{digits[8:]}"
