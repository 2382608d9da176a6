"""Layer and head similarity against float64 loops, and what must not change them."""

import gc
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from hydralens.errors import InputError
from hydralens.models.forward import trace
from hydralens.models.lens import wrap_model
from hydralens.patching.activation import activation_patch
from hydralens.probes.base import Probe
from hydralens.scores import scores_of
from hydralens.similarity import cka, debiased_cka, head_similarity, layer_similarity, measure, similarities
from hydralens.similarity.cosine import F
from tests.figures.examples import HEADS, LAYERS, effects, info
from tests.similarity.reference import naive_cka, naive_cosine
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
    torch.testing.assert_close(found.matrix, naive_cosine(vectors).float(), atol=1e-5, rtol=0)
    assert found.labels == ["L0", "L1", "L2", "L3"] and found.kind == "layer"
    assert found.n_tokens == len(vectors) == 5 + 8 + 11


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("metric", ["write", "z"])
def test_heads_equal_reprojection_of_one_head_at_a_time(family, metric):
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
                        items.append(alone[head] if metric == "z" else layer.o(alone.flatten()) - layer.o(torch.zeros_like(alone.flatten())))
                vectors.append(torch.stack(items))
    found = head_similarity(model, texts(2), metric)
    torch.testing.assert_close(found.matrix, naive_cosine(vectors).float(), atol=1e-5, rtol=0)
    assert found.labels[anatomy.n_heads + 1] == "L1H1"


@pytest.mark.parametrize("compare", [layer_similarity, head_similarity])
def test_the_matrix_is_symmetric_with_ones_on_the_diagonal(compare):
    matrix = compare(wrap_model(tiny_hf("qwen3"), WordTokenizer()), texts()).matrix
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


def test_a_head_that_writes_nothing_has_nothing_to_compare():
    hf = tiny_hf("llama")
    with torch.no_grad():
        hf.model.layers[1].self_attn.o_proj.weight[:, 8:16] = 0  # L1H1
    matrix = head_similarity(wrap_model(hf, WordTokenizer()), texts()).matrix
    assert matrix[5].isnan().all() and matrix[:, 5].isnan().all() and int(matrix.isnan().sum()) == 31


@pytest.mark.parametrize("compare", [layer_similarity, head_similarity])
def test_padding_the_order_of_prompts_and_block_size_change_nothing(compare, monkeypatch):
    model = wrap_model(tiny_hf("llama"), WordTokenizer())
    left = compare(model, [tiny_probe(pad_left=True)])
    right = compare(model, [tiny_probe(pad_left=False)])
    assert left.n_tokens == 15
    torch.testing.assert_close(left.matrix, right.matrix, atol=1e-6, rtol=0)
    whole = compare(model, texts())
    monkeypatch.setattr(measure, "VALUES_AT_ONCE", 1)
    torch.testing.assert_close(compare(model, texts()[::-1]).matrix, whole.matrix, atol=1e-6, rtol=0)


def test_no_block_holds_more_than_its_share(monkeypatch):
    model = wrap_model(tiny_hf("llama"), WordTokenizer())
    monkeypatch.setattr(measure, "VALUES_AT_ONCE", 3 * 16 * 32)  # three tokens of 4 layers x 4 heads x d_model 32
    sizes, normalize = [], F.normalize
    monkeypatch.setattr(F, "normalize", lambda x, dim: sizes.append(x.shape) or normalize(x, dim=dim))
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


def test_csv_is_square_and_labelled(tmp_path):
    found = head_similarity(wrap_model(tiny_hf("llama"), WordTokenizer()), texts(1))
    path = found.save_csv(tmp_path / "new" / "head_similarity.csv")
    frame = pd.read_csv(path, index_col=0)
    assert list(frame.index) == list(frame.columns) == found.labels
    assert frame.to_numpy() == pytest.approx(found.matrix.numpy(), abs=1e-5)
    assert path.read_text().splitlines()[0].startswith(",L0H0,L0H1,")


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([], {}, "at least one prompt"),
        (["1 2", ""], {}, "text 1 is empty"),
        (["1 2"], {"metric": "q"}, "metric 'q' is not one of write, z, cka, functional"),
        (["1 2", "3"], {"metric": "cka"}, "CKA needs at least 4 tokens"),
        (["1 2"], {"metric": "functional"}, "pass probes or HeadScores, not texts"),
    ],
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


def vectors_of(model, prompts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Layers' inputs and outputs ``[token, layer, d_model]`` and heads' z ``[token, item, d_head]``."""
    inputs, outputs, z = [], [], []
    with torch.no_grad():
        for text in prompts:
            tokens = torch.tensor([WordTokenizer()(text)["input_ids"]])
            run = trace(model.anatomy, tokens, torch.arange(tokens.shape[1]), keep=("residual", "z"))
            inputs.append(torch.stack([x[0] for x in run.residual], 1))
            outputs.append(torch.stack([x[0] for x in (*run.residual[1:], run.final)], 1))
            z.append(torch.cat([x[0] for x in run.z], 1))
    return torch.cat(inputs), torch.cat(outputs), torch.cat(z)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_updates_and_cka_equal_the_slow_reference(family):
    model, prompts = wrap_model(tiny_hf(family), WordTokenizer()), texts(2)
    inputs, outputs, z = vectors_of(model, prompts)
    torch.testing.assert_close(layer_similarity(model, prompts, "update").matrix, naive_cosine(list(outputs - inputs)).float(), atol=1e-5, rtol=0)
    directions = outputs.double() / outputs.double().norm(dim=-1, keepdim=True)
    torch.testing.assert_close(layer_similarity(model, prompts, "cka").matrix, naive_cka(directions).float(), atol=1e-4, rtol=0)
    torch.testing.assert_close(head_similarity(model, prompts, "cka").matrix, naive_cka(z).float(), atol=1e-4, rtol=0)


def test_one_pass_gives_what_each_metric_gives_alone():
    model = wrap_model(tiny_hf("llama"), WordTokenizer())
    layers, heads = similarities(model, texts())
    assert list(layers) == ["output", "update", "cka"] and list(heads) == ["write", "z", "cka"]
    for metric, found in layers.items():
        alone = layer_similarity(model, texts(), metric)
        assert torch.equal(found.matrix, alone.matrix) and (found.metric, found.n_tokens, found.labels) == (alone.metric, 24, alone.labels)
    for metric, found in heads.items():
        assert torch.equal(found.matrix, head_similarity(model, texts(), metric).matrix)
    assert len({found.metric for found in (*layers.values(), *heads.values())}) == 6


def test_attention_sinks_do_not_decide_the_cka_of_layers():
    """Two tokens a hundred times as long as the others, the same in every layer, make all layers alike; at unit length they are two of many."""
    _, outputs, _ = vectors_of(wrap_model(tiny_hf("llama"), WordTokenizer()), texts())
    outputs[::12] = 100 * outputs[:1, :1]
    assert debiased_cka(outputs).min() > 0.99
    assert debiased_cka(F.normalize(outputs, dim=-1)).min() < 0.95


@pytest.mark.parametrize("metrics", [(("output", "update", "cka"), ()), ((), ("write", "z", "cka"))])
def test_memory_does_not_grow_with_the_number_of_prompts(metrics, monkeypatch):
    """The values of all tensors alive when a prompt is read: as many at the last prompts as at the first ones."""
    model = wrap_model(tiny_hf("llama"), WordTokenizer())
    monkeypatch.setattr(cka, "BATCH", 4)
    alive = []

    def counted(*args, **options):
        alive.append(sum(x.numel() for x in gc.get_objects() if type(x) is Tensor))
        return trace(*args, **options)

    monkeypatch.setattr(measure, "trace", counted)
    similarities(model, ["1 2 3 4 5 6 7 8"] * 12, *metrics)
    assert max(alive[6:]) <= max(alive[:6])


# --- functional ----------------------------------------------------------------------------------------------------


def three_probes():
    """L0H0 and L1H1 matter for the same probes, L2H2 for the others, L3H0 for those of L0H0, and L3H3 cannot be measured."""
    found = []
    for name, strong in (("a", 0.1), ("b", 0.5), ("c", 0.3)):
        effect = effects({(0, 0): strong, (1, 1): 2 * strong - 0.1, (2, 2): 1 - strong, (3, 0): strong}, name)
        effect.per_pair[:, 3, 3] = torch.nan
        found.append(effect)
    return scores_of(info(), "toy", found, [])


def tiny_like(scores):
    """A model of the scores' name and shape; of a model nothing else is asked where effects are given."""
    model = wrap_model(tiny_hf("llama"))
    return replace(model, info=scores.model, anatomy=replace(model.anatomy, n_layers=LAYERS, n_heads=HEADS))


def test_functional_similarity_correlates_effects_over_probes():
    scores = three_probes()
    heads = head_similarity(tiny_like(scores), scores, "functional")
    at = {label: index for index, label in enumerate(heads.labels)}
    assert float(heads.matrix[at["L0H0"], at["L1H1"]]) == pytest.approx(1)
    assert float(heads.matrix[at["L0H0"], at["L2H2"]]) == pytest.approx(-1)
    assert heads.matrix[at["L3H3"]].isnan().all() and heads.matrix[at["L0H1"]].isnan().all()  # unmeasured; the same on every probe
    assert heads.n_tokens == 0 and "over 3 probes" in heads.metric
    layers = layer_similarity(tiny_like(scores), scores, "functional")
    assert layers.labels == ["L0", "L1", "L2", "L3"] and layers.matrix[0].tolist() == pytest.approx([1, 1, -1, 1])


def test_functional_similarity_needs_three_probes_and_the_right_model():
    scores = three_probes()
    model = tiny_like(scores)
    few = replace(scores, measured={"retrieval": dict(list(scores.measured["retrieval"].items())[:2])})
    with pytest.raises(InputError, match="needs at least 3; there are 2"):
        head_similarity(model, few, "functional")
    with pytest.raises(InputError, match="the scores are of toy/model and the model is other"):
        layer_similarity(replace(model, info=info("other")), scores, "functional")


def test_functional_similarity_measures_direct_effects_of_probes():
    model = wrap_model(tiny_hf("llama"))
    probes = [replace(answered_probe(model, seed), name=f"toy{seed}") for seed in range(3)]
    found = head_similarity(model, probes, "functional")
    per_probe = torch.stack([activation_patch(model, probe).values.flatten() for probe in probes])
    expected = np.corrcoef(per_probe.numpy().astype(float), rowvar=False)
    torch.testing.assert_close(found.matrix, torch.tensor(expected).float(), atol=1e-4, rtol=0)


def answered_probe(model, seed: int) -> Probe:
    """One pair whose answer is what the model says."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(1, 97, (1, 9), generator=generator)
    corrupt = clean.clone()
    corrupt[0, 3:5] = torch.randint(1, 97, (2,), generator=generator)
    mask, read = torch.ones_like(clean), torch.tensor([[8]])
    best, second = (model.read_logits(x, mask, read)[0, 0].argsort(descending=True)[:2].tolist() for x in (clean, corrupt))
    foil = second[0] if second[0] != best[0] else second[1]
    return Probe("toy", "retrieval", "value", 0, clean, corrupt, mask, torch.tensor([[best[0]]]), torch.tensor([[foil]]), read, torch.tensor([[3, 5]]))
