import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hydralens.errors import InputError
from hydralens.probes import Example, make_probe
from hydralens.probes.build import encode
from tests.probes.tokenizers import KINDS, model_with, tokenizer

FOUND = Example(
    "The number for Paris is 4821. The number for Paris is", "The number for Paris is 7305. The number for Paris is", " 4821", " 7305", "for Paris is 4821"
)


def probe_of(*examples: Example, kind: str = "digits", **options):
    return make_probe(model_with(kind), "own", "retrieval", "value", list(examples), **options)


def refusal(*examples: Example, kind: str = "digits") -> str:
    with pytest.raises(InputError) as error:
        probe_of(*examples, kind=kind)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_forced_rows_and_read_positions_agree_with_a_naive_tokenisation(kind):
    tok = tokenizer(kind)
    probe = probe_of(FOUND, kind=kind)
    texts = [prompt + FOUND.answer for prompt in (FOUND.clean_prompt, FOUND.corrupt_prompt)]
    clean, corrupt = ((["<s>"] if kind == "bos" else []) + tok.tokenize(text) for text in texts)
    assert tok.convert_ids_to_tokens(probe.clean[0]) == clean[:-1] and tok.convert_ids_to_tokens(probe.corrupt[0]) == corrupt[:-1]
    following = torch.tensor(tok.convert_tokens_to_ids(clean))[probe.read_positions[0] + 1]
    assert following.tolist() == probe.answer[0].tolist()
    assert tok.decode(probe.answer[0].tolist()).strip() == "4821" and tok.decode(probe.foil[0].tolist()).strip() == "7305"
    assert tok.decode(probe.clean[0, slice(*probe.needle_span[0].tolist())].tolist()).strip() == FOUND.needle


def test_the_space_that_numbers_share_belongs_to_the_prompt():
    tok = tokenizer("digits")
    assert tok.tokenize(FOUND.answer) == ["Ġ", "4", "8", "2", "1"]
    probe = probe_of(FOUND)
    assert tok.convert_ids_to_tokens(probe.answer[0]) == ["4", "8", "2", "1"]
    assert tok.convert_ids_to_tokens(probe.clean[0, probe.read_positions[0, 0]].item()) == "Ġ"
    assert tokenizer("numbers").decode(probe_of(FOUND, kind="numbers").answer[0, :1].tolist()).startswith(" ")  # here the space is part of the number


def test_shared_words_of_two_answers_belong_to_the_prompt():
    probe = probe_of(Example("Paris: sad lion. Paris:", "Paris: sad tiger. Paris:", " sad lion", " sad tiger"))
    assert tokenizer("digits").decode(probe.answer[0].tolist()) == " lion" and tokenizer("digits").decode(probe.clean[0].tolist()).endswith("Paris: sad")


def test_special_tokens_are_those_the_tokenizer_puts_in_front():
    rows = probe_of(FOUND, kind="bos").clean
    assert rows[0, 0] == 0 and (rows == 0).sum() == 1 and not (rows == 1).any()
    written = Example("<s>Paris</s> 1<|im_end|> is", "<s>Paris</s> 2<|im_end|> is", " 1", " 2")
    rows = probe_of(written, kind="bos").clean
    assert (rows < 3).sum() == 1 and tokenizer("bos").decode(rows[0].tolist(), skip_special_tokens=True) == written.clean_prompt + " "


def test_a_needle_that_is_not_given_is_what_differs():
    probe = probe_of(Example("a lion and a tower near a lion", "a tiger and a temple near a lion", " drum", " bell"))
    first, stop = probe.needle_span[0].tolist()
    assert tokenizer("digits").decode(probe.clean[0, first:stop].tolist()) == " lion and a tower"


def test_shorter_prompts_and_answers_are_padded():
    longer = Example("Long ago it was " + FOUND.clean_prompt, "Long ago it was " + FOUND.corrupt_prompt, " 48219", " 73054", FOUND.needle)
    probe = probe_of(FOUND, longer, n_tokens=80)
    alone = [probe_of(FOUND), probe_of(longer)]
    assert probe.clean.shape == (2, 80) and probe.n_tokens == alone[1].n_tokens
    for pair, single in enumerate(alone):
        real = probe.attention_mask[pair].bool()
        shift, scored = int((~real).sum()), probe.scored[pair]
        assert probe.clean[pair][real].equal(single.clean[0]) and probe.corrupt[pair][real].equal(single.corrupt[0])
        assert (probe.read_positions[pair][scored] - shift).equal(single.read_positions[0]) and (probe.needle_span[pair] - shift).equal(single.needle_span[0])
        assert probe.answer[pair][scored].equal(single.answer[0]) and probe.foil[pair][scored].equal(single.foil[0])


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (Example("the lion is", "the qwxzv is", " sad", " dry"), ["'lion' has 1 tokens", "'qwxzv' has"]),
        (Example("the lion qwxzv is", "the qwxzv lion is", " sad", " dry"), ["'lion' has 1 tokens", "'qwxzv' has"]),  # totals agree, columns in between do not
        (Example("the lion is", "the old lion is", " sad", " dry"), ["'lion is' and 'old lion is'"]),
        (Example("the lion is", "the tiger is", " sad", " qwxzv"), ["' sad' has 1 tokens", "' qwxzv' "]),
        (Example("the lion is", "the tiger is", " sad", " sad"), ["' sad' and foil ' sad' have the same tokens"]),
        (Example("the lion is", "the tiger is", " sad", " sad lion"), ["same tokens as far as the shorter one goes"]),
        (Example("the lion is", "the lion is", " sad", " dry"), ["clean and corrupt prompt have the same tokens"]),
        (Example("a lion is li", "a tiger is li", "on", "ttle"), ["joins answer 'on' to the end of the prompt"]),
        (Example("", "", "sad lion", "dry lion"), ["clean and corrupt prompt have the same tokens"]),
        (Example("the lion is", "the tiger is", " sad", " dry", "lions"), ["needle 'lions' is not in the clean prompt"]),
        (Example("the lion is", "the tiger is", " sad", " dry", ""), ["needle '' is not in the clean prompt"]),
    ],
)
def test_a_broken_pair_is_refused_with_its_words(example, words):
    line = refusal(FOUND, example)
    assert line.startswith("probe own/value, pair 1: ") and all(word in line for word in words)


def test_no_pairs_and_no_fast_tokenizer_are_refused():
    assert refusal() == "probe own has no pairs; ask for at least one"
    with pytest.raises(InputError, match="fast tokenizer .* not NoneType"):
        encode(None, "text")


def test_a_tokenizer_that_cannot_split_a_special_token_is_refused_by_its_name():
    class Stubborn(PreTrainedTokenizerFast):
        def __call__(self, text, split_special_tokens, **options):
            return super().__call__(text, **options)

    stubborn = Stubborn(tokenizer_object=tokenizer("digits").backend_tokenizer, eos_token="</s>")
    assert encode(stubborn, "a b").text == "a b"
    with pytest.raises(InputError, match="special token '</s>'; remove it"):
        encode(stubborn, "a </s> b")
