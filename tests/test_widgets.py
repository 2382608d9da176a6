"""The head explorer: its numbers against the model's own, and the widget following its menus."""

import subprocess
import sys

import pytest
import torch

import hydralens as hl
from hydralens import widgets
from hydralens.errors import InputError
from hydralens.models.lens import wrap_model
from tests.patching.examples import random_probe
from tests.planted import RETRIEVER, planted_model
from tests.tiny import FAMILIES, tiny_hf


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_the_models_own(family):
    lens = wrap_model(tiny_hf(family))
    probe = random_probe(n_pairs=2, pad=(3, 1))
    view = widgets.view_prompt(lens, probe, 1)
    hf = tiny_hf(family)
    hf.set_attn_implementation("eager")
    tokens = view.pair.clean
    maps = torch.stack([attention[0] for attention in hf(tokens[None], output_attentions=True).attentions])
    torch.testing.assert_close(view.attention, maps[:, :, int(view.pair.read[0])], atol=1e-5, rtol=1e-4)
    assert len(view.words) == len(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_heads_write_sums_to_what_attention_adds(family):
    """All heads of all layers, through the norms, beside the residual stream's other parts: the logits of the run itself."""
    lens = wrap_model(tiny_hf(family))
    view = widgets.view_prompt(lens, random_probe(n_pairs=1), 0)
    layer, n_vocab = 1, lens.anatomy.unembed.weight.shape[0]
    heads = [widgets.written_tokens(lens, view, layer, head, k=n_vocab) for head in range(lens.info.n_heads)]
    total = sum(frame.drop_duplicates("token").set_index("token")["logit"].sort_index() for frame in heads)
    block = lens.anatomy.layers[layer]
    bias = block.o(torch.zeros(1, lens.info.n_heads * lens.info.head_dim))[0]
    part = view.written[layer] - bias
    part = part if block.post_attention_norm is None else widgets.carried(block.post_attention_norm, view.written[layer], part)
    expected = widgets.carried(lens.anatomy.final_norm, view.final, part) @ lens.anatomy.unembed.weight.T
    order = total.index.astype(int)
    torch.testing.assert_close(torch.tensor(total.to_numpy()), expected[torch.tensor(order)].detach(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_parts_of_a_vector_through_a_norm_sum_to_its_norm(family):
    norm = wrap_model(tiny_hf(family)).anatomy.final_norm
    x = torch.randn(norm.weight.shape[0])
    parts = torch.randn(3, len(x))
    parts[2] = x - parts[0] - parts[1]
    whole = norm(x) - (norm.bias if family == "gpt2" else 0)
    torch.testing.assert_close(sum(widgets.carried(norm, x, part) for part in parts), whole, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def explored():
    pytest.importorskip("ipywidgets", reason="needs pip install 'hydralens[notebooks]'")
    pytest.importorskip("anywidget", reason="needs pip install 'hydralens[notebooks]'")
    model = planted_model()
    probes = hl.probes.retrieval(model, 3, 100, shapes=("niah_single_2", "niah_multikey_1"), corruptions=("value",))
    scores = hl.score_heads(model, probes, method="direct")
    return model, probes, scores


def test_the_planted_head_is_chosen_first_and_seen_at_work(explored):
    model, probes, scores = explored
    title, figure, menus, prompt, tables = widgets.head_explorer(model, probes, scores).children
    layer, head, probe, pair = menus.children
    assert figure.layout.meta["finding"] in title.value and figure.layout.title.text is None
    assert (layer.value, head.value) == RETRIEVER and probe.value == probes[0].label
    assert "looks from the framed token at the needle (underlined) with 100% of its attention" in prompt.value
    effects, written = (table.value for table in tables.children)
    view = widgets.view_prompt(model, probes[0], 0)
    answer = model.tokenizer.decode([int(view.pair.answer[0])])
    assert widgets.written_tokens(model, view, *RETRIEVER)["token"][0] == answer and repr(answer).replace("'", "&#x27;") in written
    assert all(own.label in effects for own in probes)
    assert (figure.layout.shapes[0].x0, figure.layout.shapes[0].y0) == (RETRIEVER[1] - 0.5, RETRIEVER[0] - 0.5)
    before = prompt.value
    layer.value, head.value = 0, 3
    assert "<b>L0H3</b>" in prompt.value and figure.layout.shapes[0].x0 == 2.5
    probe.value = probes[1].label
    pair.value = 2
    assert prompt.value != before
    figure.data[0]._dispatch_on_click(type("Points", (), {"ys": [1], "xs": [2]})(), None)
    assert (layer.value, head.value) == RETRIEVER


def test_wrong_input_is_refused(explored):
    model, probes, scores = explored
    with pytest.raises(InputError, match="pair 7 is not there: .* has pairs 0..2"):
        widgets.view_prompt(model, probes[0], 7)
    with pytest.raises(InputError, match="L9H0 does not exist"):
        widgets.written_tokens(model, widgets.view_prompt(model, probes[0]), 9, 0)
    with pytest.raises(InputError, match="the scores are of planted and the model is"):
        widgets.head_explorer(wrap_model(tiny_hf("llama")), probes, scores)


def test_without_ipywidgets_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['anywidget'] = None\nimport hydralens as hl\n"
        "try:\n    hl.widgets.head_explorer(None, [], None)\nexcept hl.InputError as error:\n    print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "head_explorer needs ipywidgets and anywidget: pip install 'hydralens[notebooks]'"
