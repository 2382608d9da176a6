"""Small tokenizers trained in memory, one for each way real ones can trip a probe."""

from functools import cache
from itertools import islice
from random import Random
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hydralens.probes.text import prose
from hydralens.probes.words import ADJECTIVES, ANIMALS, CITIES, NAMES, NOUNS

KINDS = ("digits", "numbers", "bos", "metaspace")
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with one token a digit (``digits``), with numbers of several digits a token (``numbers``), or between BOS and EOS (``bos``);
    ``metaspace`` marks spaces as SentencePiece does."""
    rng = Random(0)
    asked = "Question: What is the special magic number for code word mentioned in the text above? Answer: has more stamps coins books is Words"
    corpus = list(islice(prose(rng), 2000)) + [f"{asked} {word}" for word in CITIES + NOUNS + NAMES + ADJECTIVES + ANIMALS for _ in range(8)]
    made = Tokenizer(models.BPE(unk_token=None))
    if kind == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Digits(individual_digits=True)])
        made.decoder = decoders.Metaspace()
        alphabet = [chr(code) for code in range(33, 127)] + ["\n", "▁", "×"]
    else:
        split = [] if kind == "numbers" else [pre_tokenizers.Digits(individual_digits=True)]
        made.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "numbers":
        corpus += [f"is {rng.randrange(10**digits)}" for digits in (2, 3, 4) for _ in range(4000)]
    made.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=3000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False))
    if kind == "bos":
        made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|im_end|>"])


def model_with(kind: str) -> SimpleNamespace:
    """All that building a probe asks of a model."""
    return SimpleNamespace(tokenizer=tokenizer(kind))
