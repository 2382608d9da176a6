import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.probes import induction, reasoning
from hydralens.probes.tasks import TASKS
from tests.probes.test_needles import answer_of, same, text_of
from tests.probes.tokenizers import KINDS, model_with


def variable_tracking(text: str) -> str:
    stated = dict(re.findall(r"The value of (\w) is (?:the value of )?(\w+)\.", text.split("\nQuestion")[0]))
    value = re.search(r"What is the value of (\w)\?", text)[1]
    while not value.isdigit():
        value = stated[value]
    return value


def ioi(text: str) -> str:
    first, second, giver = re.match(r"When (\w+) and (\w+) [\w ]+, (\w+) ", text).groups()
    return second if giver == first else first


def induction_(text: str) -> str:
    once, again = (line.split()[1:] for line in text.splitlines())
    assert once[: len(again)] == again
    return once[len(again)]


def comparison(text: str) -> str:
    a, n, b, m = re.match(r"(\w+) has (\d+) \w+ and (\w+) has (\d+)", text.splitlines()[-1]).groups()
    return a if int(n) > int(m) else b


def addition(text: str) -> str:
    a, b = re.findall(r"(\d+) \+ (\d+) =", text)[-1]
    return str(int(a) + int(b))


def multiplication(text: str) -> str:
    a, b = re.findall(r"(\d+) × (\d+) =", text)[-1]
    return str(int(a) * int(b))


SOLVERS = dict(variable_tracking=variable_tracking, ioi=ioi, induction=induction_, comparison=comparison, addition=addition, multiplication=multiplication)


@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6))
def test_answers_follow_from_the_prompts_and_foils_from_their_twins(kind, seed):
    for probe in reasoning(model_with(kind), 3, seed):
        assert probe.capability == "reasoning" and same(probe, TASKS[probe.name](model_with(kind), 3, seed))
        for pair in range(3):
            prompts = []
            for which in ("clean", "corrupt"):
                row = getattr(probe, which)[pair, : probe.read_positions[pair, 0] + 1][probe.attention_mask[pair, : probe.read_positions[pair, 0] + 1].bool()]
                prompts.append(probe.tokenizer.decode(row.tolist(), skip_special_tokens=True))
            solver = SOLVERS[probe.name]
            assert solver(prompts[0]) == answer_of(probe, pair) and solver(prompts[1]) == answer_of(probe, pair, "foil")
            if probe.corruption == "swap" and probe.name != "ioi":
                assert Counter(probe.clean[pair].tolist()) == Counter(probe.corrupt[pair].tolist())
            start, stop = probe.needle_span[pair].tolist()
            differ = (probe.clean[pair] != probe.corrupt[pair]).nonzero().flatten().tolist()
            if probe.name == "ioi":
                assert len(differ) == 1 and " and " in probe.tokenizer.decode(probe.clean[pair, start:stop].tolist())
            else:
                assert any(start <= column < stop for column in differ)


def test_worked_examples_are_right():
    for task, sign in (("addition", "+"), ("multiplication", "×")):
        (probe,) = reasoning(model_with("digits"), 8, tasks=[task])
        for pair in range(8):
            worked = re.findall(rf"(\d+) \{sign} (\d+) = (\d+)\n", text_of(probe, pair))
            assert len(worked) == 4 and all(int(c) == (int(a) + int(b) if sign == "+" else int(a) * int(b)) for a, b, c in worked)
    (probe,) = reasoning(model_with("digits"), 8, tasks=["comparison"])
    for pair in range(8):
        lines = text_of(probe, pair).splitlines()
        assert [re.search(r"is (\w+)\.$", line)[1] for line in lines[:-1]] == [comparison(line) for line in lines[:-1]]


def test_every_task_varies_what_could_be_guessed():
    by_name = {probe.name: probe for probe in reasoning(model_with("digits"), 8)}
    first = [text_of(by_name["ioi"], pair).split()[1] == answer_of(by_name["ioi"], pair) for pair in range(8)]
    more_first = [text_of(by_name["comparison"], pair).splitlines()[-1].startswith(answer_of(by_name["comparison"], pair)) for pair in range(8)]
    carries = []
    for pair in range(8):
        a, b = re.findall(r"(\d+) \+ (\d+) =", text_of(by_name["addition"], pair))[-1]
        carries.append(any(int(x) + int(y) > 9 for x, y in zip(a, b, strict=True)))
    assert sum(first) == sum(more_first) == sum(carries) == 4


def test_wrong_arguments():
    with pytest.raises(InputError, match="no reasoning task 'chess'; choose from variable_tracking, ioi, "):
        reasoning(model_with("digits"), tasks=["ioi", "chess"])
    with pytest.raises(InputError, match="induction needs 500 words of equal token count and the tokenizer gives at most "):
        induction(model_with("digits"), n_words=500)
