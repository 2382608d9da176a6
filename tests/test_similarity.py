"""Layer and head similarity against float64 loops, and what must not change them."""

import pandas as pd
import pytest
import torch

import hydralens.similarity as similarity
from hydralens.errors import InputError
from hydralens.models.forward import trace
from hydralens.models.lens import wrap_model
from hydralens.probes.base import Probe
from hydralens.similarity import Similarity, head_similarity, layer_similarity
from tests.tiny import FAMILIES, tiny_hf


class WordTokenizer:
    """One token a word: its number."""

    def __call__(self, text: str) -> dict:
        return {"input_ids": [int(word) for word in text.split()]}


def texts(n: int = 3, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [" ".join(map(str, torch.randint(97, (5 + 3 * i,), generator=generator).tolist())) for i in range(n)]


def tiny_probe(pad_left: bool) -> Probe:
    """Two pairs of 6 and 9 tokens, padded to 9 on one side."""
    generator = torch.Generator().manual_seed(1)
    clean, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for row, length in enumerate((6, 9)):
        place = slice(9 - length, 9) if pad_left else slice(0, length)
        clean[row, place] = torch.randint(1, 97, (length,), generator=generator)
        mask[row, place] = 1
    last = torch.tensor([[8], [8]]) if pad_left else torch.tensor([[5], [8]])
    return Probe("toy", "retrieval", "value", 0, clean, clean, mask, torch.tensor([[1], [2]]), torch.tensor([[3], [4]]), last, torch.tensor([[0, 1], [0, 1]]))


def naive(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Mean over tokens of the cosine of every pair, float64; ``vectors`` has one ``[item, width]`` per token."""
    total = torch.zeros(len(vectors[0]), len(vectors[0]), dtype=torch.float64)
    for items in vectors:
        for i, a in enumerate(items.double()):
            for j, b in enumerate(items.double()):
                total[i, j] += (a @ b) / (a.norm() * b.norm())
    return total / len(vectors)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_equal_hidden_states_of_transformers(family):
    hf = tiny_hf(family)
    found = layer_similarity(wrap_model(hf, WordTokenizer()), texts())
    outputs = [[] for _ in range(4)]
    for block, kept in zip(hf.model.layers if family != "gpt2" else hf.transformer.h, outputs, strict=True):
        block.register_forward_hook(lambda module, args, out, kept=kept: kept.append(out[0] if isinstance(out, tuple) else out))
    vectors = []
    with torch.no_grad():
        for text in texts():
            hf(input_ids=torch.tensor([WordTokenizer()(text)["input_ids"]]))
    for run in zip(*outputs, strict=True):
        vectors += list(torch.stack([out.reshape(-1, out.shape[-1]) for out in run], 1))
    torch.testing.assert_close(found.matrix, naive(vectors).float(), atol=1e-5, rtol=0)
    assert found.labels == ["L0", "L1", "L2", "L3"] and found.kind == "layer"
    assert found.n_tokens == len(vectors) == 5 + 8 + 11


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("of", ["write", "z"])
def test_heads_equal_reprojection_of_one_head_at_a_time(family, of):
    model = wrap_model(tiny_hf(family), WordTokenizer())
    anatomy = model.anatomy
    vectors = []
    with torch.no_grad():
        for text in texts(2):
            tokens = torch.tensor([WordTokenizer()(text)["input_ids"]])
            run = trace(anatomy, tokens, torch.arange(tokens.shape[1]), keep=("z",))
            for token in range(tokens.shape[1]):
                items = []
                for layer, z in zip(anatomy.layers, run.z, strict=True):
                    for head in range(anatomy.n_heads):
                        alone = torch.zeros_like(z[0, token])
                        alone[head] = z[0, token, head]
                        items.append(alone[head] if of == "z" else layer.o(alone.flatten()) - layer.o(torch.zeros_like(alone.flatten())))
                vectors.append(torch.stack(items))
    found = head_similarity(model, texts(2), of=of)
    torch.testing.assert_close(found.matrix, naive(vectors).float(), atol=1e-5, rtol=0)
    assert found.labels[anatomy.n_heads + 1] == "L1H1"


@pytest.mark.parametrize("measure", [layer_similarity, head_similarity])
def test_the_matrix_is_symmetric_with_ones_on_the_diagonal(measure):
    matrix = measure(wrap_model(tiny_hf("qwen3"), WordTokenizer()), texts()).matrix
    torch.testing.assert_close(matrix, matrix.T, atol=1e-6, rtol=0)
    torch.testing.assert_close(matrix.diagonal(), torch.ones(len(matrix)), atol=1e-5, rtol=0)
    assert matrix.abs().max() <= 1 + 1e-5


def test_the_scale_of_a_head_does_not_matter_and_its_sign_does():
    """Scaling a head's slice of the output projection keeps every cosine of that head; negating it flips them."""
    hf = tiny_hf("llama")
    before = head_similarity(wrap_model(hf, WordTokenizer()), texts()).matrix
    last = hf.model.layers[-1].self_attn.o_proj.weight  # the last layer: no later head sees the change
    with torch.no_grad():
        last[:, :8] *= 3
        last[:, 8:16] *= -1
    after = head_similarity(wrap_model(hf, WordTokenizer()), texts()).matrix
    sign = torch.ones(16)
    sign[13] = -1
    torch.testing.assert_close(after, before * sign * sign[:, None], atol=1e-5, rtol=0)


@pytest.mark.parametrize("measure", [layer_similarity, head_similarity])
def test_padding_the_order_of_prompts_and_block_size_change_nothing(measure, monkeypatch):
    model = wrap_model(tiny_hf("llama"), WordTokenizer())
    left = measure(model, [tiny_probe(pad_left=True)])
    right = measure(model, [tiny_probe(pad_left=False)])
    assert left.n_tokens == 15
    torch.testing.assert_close(left.matrix, right.matrix, atol=1e-6, rtol=0)
    whole = measure(model, texts())
    monkeypatch.setattr(similarity, "VALUES_AT_ONCE", 1)
    torch.testing.assert_close(measure(model, texts()[::-1]).matrix, whole.matrix, atol=1e-6, rtol=0)


def test_no_block_holds_more_than_its_share(monkeypatch):
    model = wrap_model(tiny_hf("llama"), WordTokenizer())
    monkeypatch.setattr(similarity, "VALUES_AT_ONCE", 3 * 16 * 32)  # three tokens of 4 layers x 4 heads x d_model 32
    sizes, normalize = [], similarity.F.normalize
    monkeypatch.setattr(similarity.F, "normalize", lambda x, dim: sizes.append(x.shape) or normalize(x, dim=dim))
    head_similarity(model, texts(2))
    assert sizes == [(3, 16, 32), (2, 16, 32), (3, 16, 32), (3, 16, 32), (2, 16, 32)]


def test_long_prompts_are_compared_at_evenly_spaced_tokens():
    model = wrap_model(tiny_hf("llama"), WordTokenizer())
    assert layer_similarity(model, texts(1) + texts(2)[1:], tokens_per_prompt=6).n_tokens == 5 + 6


def test_bfloat16_models_give_float32():
    model = wrap_model(tiny_hf("llama", dtype=torch.bfloat16), WordTokenizer())
    for found in (layer_similarity(model, texts()), head_similarity(model, texts())):
        assert found.matrix.dtype == torch.float32
        torch.testing.assert_close(found.matrix.diagonal(), torch.ones(len(found.labels)), atol=1e-4, rtol=0)


def test_within_and_between_layers_by_hand():
    matrix = torch.tensor([[1, 0.5, 0.1, 0.2], [0.5, 1, 0.3, 0.4], [0.1, 0.3, 1, -0.5], [0.2, 0.4, -0.5, 1]])
    found = Similarity(matrix, ["L0H0", "L0H1", "L1H0", "L1H1"], "head", "cosine", 1)
    assert found.mean_within_layer == pytest.approx(0.0, abs=1e-7)
    assert found.mean_between_layers == pytest.approx(0.25)
    layers = Similarity(matrix, ["L0", "L1", "L2", "L10"], "layer", "cosine", 1)
    assert layers.layers.tolist() == [0, 1, 2, 10]
    assert layers.mean_within_layer != layers.mean_within_layer


def test_csv_is_square_and_labelled(tmp_path):
    found = head_similarity(wrap_model(tiny_hf("llama"), WordTokenizer()), texts(1))
    path = found.save_csv(tmp_path / "new" / "head_similarity.csv")
    frame = pd.read_csv(path, index_col=0)
    assert list(frame.index) == list(frame.columns) == found.labels
    assert frame.to_numpy() == pytest.approx(found.matrix.numpy(), abs=1e-5)
    assert path.read_text().splitlines()[0].startswith(",L0H0,L0H1,")


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [([], {}, "at least one prompt"), (["1 2", ""], {}, "text 1 is empty"), (["1 2"], {"of": "q"}, "of='q' is unknown")],
)
def test_wrong_input_is_one_line(prompts, options, said):
    with pytest.raises(InputError, match=said) as error:
        head_similarity(wrap_model(tiny_hf("llama"), WordTokenizer()), prompts, **options)
    assert "\n" not in str(error.value)


def test_texts_need_a_tokenizer_and_probes_do_not():
    model = wrap_model(tiny_hf("llama"))
    with pytest.raises(InputError, match="needs a tokenizer"):
        layer_similarity(model, ["1 2 3"])
    assert layer_similarity(model, tiny_probe(pad_left=False)).n_tokens == 15
