"""Filler for haystacks: made prose, the sentences RULER repeats, or the user's own text."""

import re
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from random import Random

from hydralens.errors import InputError

REPEATED = ["The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again."]  # RULER's "noise" haystack

# Words of needles (words.py) must not occur here, nor digits: a test holds the two apart.
_SLOTS = {
    "who": "the baker,the captain,the teacher,the gardener,the carpenter,the doctor,the farmer,a neighbour,the librarian,an old sailor,the postman,"
    "my grandmother,the painter,the mayor,a visitor,the blacksmith,the clerk,the shepherd,a student,the innkeeper,the tailor,her cousin",
    "place": "the harbour,the market,the village,the valley,the old mill,the church,the station,the garden,the square,the school,the river,the workshop,"
    "the kitchen,the hillside,the bakery,the library,the orchard,the bridge,the shore,the town hall,the forest,the inn",
    "thing": "a letter,the newspaper,a wooden chair,the map,a warm coat,the boat,a loaf of bread,the old clock,a box of tools,the window,a bundle of papers,"
    "the gate,a cup of tea,the photograph,a blanket,the fence,a pair of shoes,the kitchen table,a jar of jam,the diary",
    "was": "quiet,crowded,empty,familiar,pleasant,damp,bright,dusty,peaceful,busy,cheerful,gloomy,spotless,untidy,welcoming,draughty",
    "did": "repaired,painted,borrowed,found,carried,described,sold,cleaned,examined,remembered,measured,admired,wrapped,forgot,noticed,collected",
    "when": "in the morning,after lunch,at dusk,before the storm,during the winter,on market day,late in the evening,last autumn,every Sunday,"
    "at the end of the week,in early spring,shortly before noon,that afternoon,when the rain stopped,once a month",
    "how": "slowly,carefully,without a word,with great patience,in a hurry,as usual,with a smile,against all advice,rather badly,almost by accident",
    "topic": "the weather,the harvest,the new road,old friends,the price of wool,the coming election,a long journey,the repairs,the school play,"
    "the rising tide,a recipe for soup,the history of the valley,the broken pump,the evening train",
}

_TEMPLATES = """
{when}, {who} {did} {thing} near {place}.
{who} walked to {place} and talked about {topic}.
Nobody at {place} could explain why {who} {did} {thing} {how}.
The path behind {place} was {was} {when}.
{who} {did} {thing}, and {who} {did} {thing} as well.
It is said that {who} once {did} {thing} {how}.
People in {place} often spoke about {topic}.
While {who} waited at {place}, the others {did} {thing}.
{when}, {place} looked {was} and smelled of rain.
{who} worked {how}, for there was plenty to do at {place}.
A conversation about {topic} went on {when}.
From {place} one could hear how {who} {did} {thing}.
{who} had never been to {place}, although it was not far away.
There was some talk about {topic}, but {who} went home {how}.
If {place} is {was}, the work goes well.
{who} kept {thing} in a corner of {place}.
The lights in {place} went out {when}.
Later {who} {did} {thing} and said nothing about {topic}.
Most visitors found {place} {was}, but {who} disagreed.
{who} wrote about {topic} and read it aloud {when}.
Because {place} was {was}, {who} stayed a little longer.
{who} {did} {thing} {how}.
The way from {place} to {place} takes most of the day.
It rained {when}, so {who} stayed inside and {did} {thing}.
Without {thing}, {who} would not have reached {place}.
Both {who} and {who} were interested in {topic}.
The air around {place} was {was}, and a light wind blew.
{who} asked about {topic} but got no reply.
On the wall of {place} hung {thing}.
Everyone agreed that {topic} had been discussed long enough.
""".strip().splitlines()

_WORDS = {slot: words.split(",") for slot, words in _SLOTS.items()}


def prose(rng: Random) -> Iterator[str]:
    """Endless varied sentences about a small town: no digits, and none of the words that needles are made of."""
    while True:
        sentence = re.sub(r"\{(\w+)\}", lambda slot: rng.choice(_WORDS[slot[1]]), rng.choice(_TEMPLATES))
        yield sentence[0].upper() + sentence[1:]


def repeated(rng: Random) -> Iterator[str]:
    """RULER's five filler sentences over and over."""
    return cycle(REPEATED)


class OwnText:
    """The user's text as filler: its sentences in order from a random one on, starting over at the end.

    Args:
        haystack: the text, a path to a UTF-8 text file, or a list of paragraphs.

    Raises:
        InputError: the file cannot be read, or there is no text.
    """

    def __init__(self, haystack: str | Path | list[str]):
        if isinstance(haystack, Path) or (isinstance(haystack, str) and len(haystack.encode()) < 256 and "\n" not in haystack and Path(haystack).is_file()):
            try:
                haystack = Path(haystack).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"haystack {haystack} cannot be read as UTF-8 text: {error}") from error
        self.text = haystack if isinstance(haystack, str) else "\n".join(haystack)
        self.sentences = [sentence.strip() for sentence in re.split(r"(?<=[.!?])\s+|\n+", self.text) if sentence.strip()]
        if not self.sentences:
            raise InputError("the haystack has no text; pass text, a path to a text file or a list of paragraphs")

    def __call__(self, rng: Random) -> Iterator[str]:
        start = rng.randrange(len(self.sentences))
        return cycle(self.sentences[start:] + self.sentences[:start])
