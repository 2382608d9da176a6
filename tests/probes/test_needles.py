import re
from collections import Counter
from itertools import islice
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.probes import kv_recall, niah, retrieval
from hydralens.probes.needles import CORRUPTIONS, SHAPES, SUB_PROBES
from hydralens.probes.text import REPEATED, prose
from hydralens.probes.words import ADJECTIVES, ANIMALS, CITIES, NAMES, NOUNS
from tests.probes.tokenizers import KINDS, model_with, tokenizer

ROWS = ("clean", "corrupt", "attention_mask", "answer", "foil", "read_positions", "needle_span")


def text_of(probe, pair: int, which: str = "clean") -> str:
    """The prompt with its forced answer, special tokens left out."""
    row = getattr(probe, which)[pair][probe.attention_mask[pair].bool()]
    return probe.tokenizer.decode(row.tolist(), skip_special_tokens=True)


def answer_of(probe, pair: int, which: str = "answer") -> str:
    return probe.tokenizer.decode(getattr(probe, which)[pair][probe.scored[pair]].tolist()).strip()


def values_for(key: str, text: str) -> list[str]:
    """What the haystack, up to the question, says about ``key``."""
    haystack = re.split(r"\n\n(?=Question|\{)", text)[0]
    return re.findall(rf"(?:for|key:) {key}(?: is|, value:) ([\w-]+)", haystack)


def asked_key(text: str) -> str:
    return re.findall(r"(?:magic \w+ for|magic numbers for|key:) ([A-Za-z ]+?)(?: is| are|, value:)", text)[-1]


def same(a, b) -> bool:
    return all(getattr(a, row).equal(getattr(b, row)) for row in ROWS)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from(list(SHAPES)),
    corruption=st.sampled_from(CORRUPTIONS),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    n_tokens=st.integers(190, 500),
)
def test_every_probe_keeps_its_contract(shape, corruption, kind, seed, n_tokens):
    probe = niah(model_with(kind), shape, corruption, n_pairs=2, n_tokens=n_tokens, seed=seed)
    assert (probe.name, probe.capability, probe.corruption, probe.seed) == (shape, "retrieval", corruption, seed)
    assert probe.clean.shape == (2, n_tokens) and same(probe, niah(model_with(kind), shape, corruption, 2, n_tokens, seed))
    for pair in range(2):
        real, (start, stop) = probe.attention_mask[pair].bool(), probe.needle_span[pair].tolist()
        clean, corrupt = text_of(probe, pair), text_of(probe, pair, "corrupt")
        answer, foil, key = answer_of(probe, pair), answer_of(probe, pair, "foil"), asked_key(clean)
        needle = probe.tokenizer.decode(probe.clean[pair, start:stop].tolist())
        differ = (probe.clean[pair] != probe.corrupt[pair]).nonzero().flatten()

        assert answer in needle and key in needle and needle.strip() in clean
        assert answer[0] != foil[0] and asked_key(corrupt) == key
        assert values_for(key, clean).count(answer) == 1 and clean.split(needle)[1].count("\n\n") == 1
        assert probe.clean[pair, probe.read_positions[pair, 0] + 1 :].tolist() == probe.answer[pair][probe.scored[pair]][:-1].tolist()
        assert sum(token in tokenizer(kind).all_special_ids for token in probe.clean[pair][real].tolist()) == (kind == "bos")

        listed = clean.split("\n\n")[-1]
        told = [value for value in values_for(key, corrupt) if value not in listed.removesuffix(answer[:-1])]
        if corruption == "value":
            assert start <= differ.min() and differ.max() < stop
            assert told == [foil] and foil not in clean
        elif corruption == "key":
            assert start <= differ.min() and differ.max() < stop
            assert told == [] and answer in corrupt
            assert (foil in corrupt) == (shape not in ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_2", "niah_multikey_3", "kv_recall"))
        else:
            assert Counter(probe.clean[pair].tolist()) == Counter(probe.corrupt[pair].tolist())
            assert told == [foil] and answer in corrupt and not ((start <= differ) & (differ < stop)).all()


def test_what_a_shape_holds():
    probes = {probe.name: probe for probe in retrieval(model_with("digits"), 2, 300, corruptions=["value"])}
    needles = {name: len(re.findall(r"special magic \w+ for \w+(?: \w+)? is [\w-]+\.", text_of(probe, 0).split("\n\n")[0])) for name, probe in probes.items()}
    assert {name: needles[name] for name in list(needles)[:4]} == {"niah_single_1": 1, "niah_single_2": 1, "niah_single_3": 1, "niah_multikey_1": 4}
    assert needles["niah_multiquery"] == 4 and needles["niah_multikey_2"] > 10
    assert set(re.split(r"(?<=\.) ", text_of(probes["niah_single_1"], 0).split("\n\n")[0])[1:]) - set(REPEATED) == {
        sentence for sentence in re.findall(r"The special[^.]*\.", text_of(probes["niah_single_1"], 0))
    }
    assert re.fullmatch(r"[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}", answer_of(probes["niah_single_3"], 0))
    assert answer_of(probes["niah_multikey_1"], 0).isdigit() and answer_of(probes["niah_multikey_1"], 1).isalpha()  # numbers and words in turn
    text = text_of(probes["niah_multivalue"], 0)
    values = values_for(asked_key(text), text)
    listed = re.findall(r"\d{4,}", text.split("are ")[-1].split(" and")[0])
    assert len(values) == 3 and listed == [value for value in values if value != answer_of(probes["niah_multivalue"], 0)]
    assert text_of(probes["kv_recall"], 0).count("{ key:") > 10


def test_a_shape_is_the_same_whatever_else_is_built():
    together = retrieval(model_with("digits"), 3, 200, seed=4)
    assert [(probe.name, probe.corruption) for probe in together] == [(shape, corruption) for shape in SUB_PROBES for corruption in CORRUPTIONS]
    (alone,) = retrieval(model_with("digits"), 3, 200, seed=4, shapes=["niah_multiquery"], corruptions=["key"])
    assert same(alone, together[list(SHAPES).index("niah_multiquery") * 3 + 1])
    assert same(kv_recall(model_with("digits"), "swap", 3, 200, 4), together[-1])
    assert not same(alone, niah(model_with("digits"), "niah_multiquery", "key", 3, 200, seed=5))


@pytest.mark.parametrize("shape", ["niah_multikey_1", "niah_multikey_2", "niah_multivalue", "niah_multiquery", "kv_recall"])
def test_the_clean_prompts_of_a_seed_do_not_depend_on_the_corruption(shape):
    probes = [niah(model_with("digits"), shape, corruption, 2, 250) for corruption in CORRUPTIONS]
    texts = [text_of(probe, 0) for probe in probes]
    assert texts[0] == texts[1] and (
        shape in ("niah_multikey_2", "niah_multikey_3", "kv_recall") or texts[1] == texts[2]
    )  # there, a swap needs a second needle of its own


@pytest.mark.parametrize("kind", KINDS)
def test_prose_is_cropped_to_the_token(kind):
    probe = niah(model_with(kind), "niah_single_2", n_pairs=8, n_tokens=333)
    lengths = probe.attention_mask.sum(1)
    assert lengths.max() == probe.n_tokens <= 333 and lengths.min() >= 328
    assert (probe.attention_mask.diff() >= 0).all()  # padding on the left


def test_depth():
    model = model_with("digits")
    shallow, deep, spread = (niah(model, "niah_single_2", "value", 8, 400, depth=depth) for depth in (0.0, 1.0, None))
    padding = 400 - spread.attention_mask.sum(1)
    assert (shallow.needle_span[:, 0] == 400 - shallow.attention_mask.sum(1)).all()
    assert all("\n\nQuestion" in text_of(deep, pair).split(answer_of(deep, pair))[1][:12] for pair in range(8))
    assert [answer_of(shallow, pair) for pair in range(8)] == [answer_of(deep, pair) for pair in range(8)]  # the same needles at another place
    share = (spread.needle_span[:, 0] - padding) / (deep.needle_span[:, 0] - (400 - deep.attention_mask.sum(1)))
    assert (share.diff() > 0).all() and ((share - torch.arange(8) / 8 - 1 / 16).abs() < 1 / 8).all()


def test_the_least_number_of_tokens_is_named_and_enough():
    model = model_with("digits")
    with pytest.raises(InputError, match="n_tokens=20 has no room for needle and question of niah_multikey_1/swap; ask for at least ") as error:
        niah(model, "niah_multikey_1", "swap", 4, 20)
    least = int(str(error.value).split()[-1])
    assert niah(model, "niah_multikey_1", "swap", 4, least).clean.shape == (4, least)
    with pytest.raises(InputError, match=f"ask for at least {least}"):
        niah(model, "niah_multikey_1", "swap", 4, least - 1)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"shape": "niah_single_9"}, "no retrieval shape 'niah_single_9'; choose from niah_single_1, "),
        ({"corruption": "noise"}, "no corruption 'noise'; choose from value, key, swap"),
        ({"depth": 1.5}, "depth=1.5 is not in 0..1"),
        ({"n_pairs": 0}, "probe niah_single_2 has no pairs"),
        ({"haystack": " \n"}, "the haystack has no text"),
        ({"haystack": []}, "the haystack has no text"),
        ({"haystack": " ".join(CITIES)}, "the haystack leaves 0 unused"),
    ],
)
def test_wrong_arguments(options, line):
    with pytest.raises(InputError) as error:
        niah(model_with("digits"), **options)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_the_users_own_text_fills_the_haystack(tmp_path):
    own = "It was Lisbon in May.<|im_end|> A lion slept near 12345 stones. Nobody saw it!\n\nThe rest is silence</s> of a kind"
    probe = niah(model_with("bos"), "niah_single_1", "value", 6, 300, haystack=own)
    for pair in range(6):
        text = text_of(probe, pair)
        assert text.count("Nobody saw it!") > 3 and text.count("<|im_end|>") > 2 and "grass" not in text
        assert asked_key(text) != "Lisbon"
        order = [text.index(piece) for piece in ("A lion slept", "Nobody saw it!")]
        assert order[0] < order[1] or text.index("Nobody") < 80
    assert (probe.clean[probe.attention_mask.bool()] < 3).sum() == 6  # BOS alone
    assert len({text_of(probe, pair)[:20] for pair in range(6)}) > 1  # each pair starts elsewhere

    (tmp_path / "own.txt").write_text(own, encoding="utf-8")
    for other in (tmp_path / "own.txt", str(tmp_path / "own.txt"), own.split("\n\n")):
        assert same(niah(model_with("bos"), "niah_single_1", "value", 6, 300, haystack=other), probe)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa")
    for bad in (tmp_path / "bytes.txt", tmp_path / "absent.txt"):
        with pytest.raises(InputError, match="cannot be read as UTF-8 text"):
            niah(model_with("bos"), haystack=bad)


def test_a_text_without_sentences_is_cropped_too():
    probe = niah(model_with("digits"), "niah_single_2", "value", 2, 300, haystack="over and over " * 2000)
    assert probe.n_tokens >= 298 and "over and over" in text_of(probe, 0)


def test_the_made_text_holds_no_needles():
    text = " ".join(islice(prose(Random(0)), 4000)) + " ".join(REPEATED)
    words = set(re.findall(r"\w+", text.lower()))
    needles = {word.lower() for word in CITIES + NOUNS + ANIMALS}
    assert not words & needles and not re.search(r"\d", text) and not {"magic", "special", "question", "answer"} & words
    for pool in (CITIES, NOUNS, ANIMALS, ADJECTIVES, NAMES):
        assert len(set(pool)) == len(pool)
    assert not set(NOUNS) & set(ANIMALS) and len(set(islice(prose(Random(1)), 1000))) > 950
