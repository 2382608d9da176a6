"""A retrieval model written by hand: whatever followed two words before follows them again.

The residual stream has blocks of one token vector each: the token, the one before it, the one two before it, and the prediction.

* L0H0 and L0H1 attend one and two positions back, by the fast rotary frequencies, and write what they see into blocks 1 and 2.
* L1H2 looks for the positions whose two predecessors (blocks 1 and 2) are the query's own token and predecessor (blocks 0 and 1), by the
  slow frequencies, which hardly turn over a prompt, and copies the token it finds there into the prediction.

Nothing else has a weight, so L1H2 is the one head with a direct effect on an answer, and no mask keeps retrieval without it.
"""

import inspect
import re
from functools import cache
from pathlib import Path
from zlib import crc32

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hydralens.models.lens import LensModel, wrap_model
from hydralens.probes import needles, tasks, text, words

RETRIEVER = (1, 2)
LAYERS, HEADS, KV_HEADS, D_HEAD, D_TOKEN, THETA = 3, 4, 2, 256, 64, 1e9
FAST, SLOW = 16, 2 * D_TOKEN  # rotary frequencies that tell positions apart, and the last ones, which hardly turn


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word and per digit: every word that a probe can be made of."""
    known = re.findall(r"[A-Za-z]+|[^\w\s]", "".join(map(inspect.getsource, (needles, tasks, text, words))))
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(["<unk>", *"0123456789", "×", *known]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def unit_vector(word: str) -> torch.Tensor:
    """The word's own, whatever else is in the vocabulary, which holds every word of four source files."""
    return torch.nn.functional.normalize(torch.randn(D_TOKEN, generator=torch.Generator().manual_seed(crc32(word.encode()))), dim=-1)


@torch.no_grad()
def planted_hf(vocabulary: list[str]) -> transformers.LlamaForCausalLM:
    d_model = 4 * D_TOKEN + HEADS  # the last dimension is 1 in every token
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=d_model, intermediate_size=8, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=D_HEAD, rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False, max_position_embeddings=2048,
    )  # fmt: skip
    hf = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in hf.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    vectors = torch.stack([unit_vector(word) for word in vocabulary])
    blocks = [slice(start, start + D_TOKEN) for start in range(0, 4 * D_TOKEN, D_TOKEN)]
    token, before, two_before, prediction = blocks
    hf.model.embed_tokens.weight[:, token] = vectors
    hf.model.embed_tokens.weight[:, -1] = 1
    hf.lm_head.weight[:, prediction] = 6 * vectors
    eye, half = torch.eye(D_TOKEN), D_HEAD // 2

    def heads(layer: int, head: int):
        attention = hf.model.layers[layer].self_attn
        kv = head // (HEADS // KV_HEADS)
        query, key = slice(head * D_HEAD, (head + 1) * D_HEAD), slice(kv * D_HEAD, (kv + 1) * D_HEAD)
        return attention.q_proj.weight[query], attention.k_proj.weight[key], attention.v_proj.weight[key], attention.o_proj.weight[:, query]

    frequencies = THETA ** (-torch.arange(FAST) / half)
    for head, (back, block) in enumerate(((1, before), (2, two_before))):
        q, k, v, o = heads(0, head)
        # Dimensions i and i + half turn together; a query turned back by `back` positions meets the key there head on.
        q[:FAST, -1], q[half : half + FAST, -1] = 3 * torch.cos(back * frequencies), -3 * torch.sin(back * frequencies)
        k[:FAST, -1] = 3
        v[:D_TOKEN, token] = eye
        o[block, :D_TOKEN] = eye
    q, k, v, o = heads(*RETRIEVER)
    for place, (asked, found) in enumerate(((token, before), (before, two_before))):
        slow = torch.arange(D_HEAD // 2 - D_TOKEN, D_HEAD // 2) + place * half
        q[slow, asked], k[slow, found] = 4 * eye, 4 * eye
    v[:D_TOKEN, token] = eye
    o[prediction, :D_TOKEN] = eye
    return hf


@cache
def planted_model() -> LensModel:
    tokenizer = word_tokenizer()
    return wrap_model(planted_hf(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))), tokenizer, id="planted")


def save_planted(folder: Path) -> Path:
    """The same as a directory that ``load_model`` opens."""
    model = planted_model()
    model.hf.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder
