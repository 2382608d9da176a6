import pytest
import torch

from hydralens.detectors.duo import duo_attention, read_duo_attention
from hydralens.errors import InputError
from hydralens.models.forward import trace
from hydralens.models.lens import wrap_model
from hydralens.patching.restriction import restricted_attention
from hydralens.probes import niah
from tests.patching.test_activation import random_probe
from tests.planted import planted_model
from tests.tiny import tiny_hf
from tests.toy_masks import toy_info

WINDOW, SINKS = 4, 2


def slow_training(model, prompts, order, steps, lr, l1):
    """Plain autograd through ``trace`` with z mixed by hand, the schedule and Adam written out."""
    anatomy = model.anatomy
    shape = (anatomy.n_layers, anatomy.n_heads)
    full, narrow = (restricted_attention(anatomy, torch.full(shape, keep), WINDOW, SINKS) for keep in (True, False))
    gates, first, second = torch.ones(anatomy.n_layers, anatomy.n_kv_heads), 0, 0
    for step, index in enumerate(order[:steps]):
        tokens, read = prompts[index]
        a = gates.clone().requires_grad_()

        def mixed(layer, q, k, v, a=a):
            gate = a[layer].repeat_interleave(anatomy.group)[:, None]
            return gate * full(layer, q, k, v) + (1 - gate) * narrow(layer, q, k, v)

        target = anatomy.final_norm(trace(anatomy, tokens[None], read).final[0]).detach()
        hidden = anatomy.final_norm(trace(anatomy, tokens[None], read, attention=mixed).final[0])
        loss = ((hidden - target) ** 2).mean() + l1 * a.abs().sum() / a.numel()
        gradient = torch.autograd.grad(loss, a)[0]
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        rate = lr * min(1, max((step + 1) / (steps // 5), 0.1), max((steps - step) / (steps // 5), 0.1))
        update = (first / (1 - 0.9 ** (step + 1))) / ((second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
        gates = (gates - rate * update).clamp(0, 1)
    return gates


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_training_equals_a_plain_loop(family):
    model, probe, steps = wrap_model(tiny_hf(family)), random_probe(n_pairs=3, n_pos=30), 10
    generator = torch.Generator().manual_seed(7)
    order = [index for _ in range(4) for index in reversed(torch.randperm(3, generator=generator).tolist())]
    prompts = [(probe.clean[pair], probe.read_positions[pair]) for pair in range(3)]
    scores = duo_attention(model, [probe], steps=steps, lr=0.05, l1=0.3, window=WINDOW, sinks=SINKS, seed=7)
    expected = slow_training(model, prompts, order, steps, 0.05, 0.3)
    assert expected.std() > 0.01  # gates went different ways
    torch.testing.assert_close(scores.composite, expected.repeat_interleave(model.info.group, -1), atol=1e-4, rtol=1e-4)
    assert all(not parameter.grad for parameter in model.hf.parameters() if parameter.grad is not None)


def test_training_keeps_the_planted_head_and_closes_the_others():
    """The planted prediction is a small part of the hidden state (about 1 in 260), so the price of a gate is set as low."""
    model = planted_model()
    far = niah(model, "niah_single_2", "value", 2, 128, depth=0.1)
    scores = duo_attention(model, [far], steps=60, l1=0.003)
    gates = scores.composite[:, ::2]
    assert torch.equal(scores.composite, gates.repeat_interleave(2, -1))
    others = torch.ones_like(gates, dtype=torch.bool)
    others[1, 1] = False
    assert gates[1, 1] > 0.9 and gates[others].max() < 0.1
    assert scores.probes[0]["name"] == "niah_single_2/value" and scores.method == "duo_attention"


def test_published_gates_become_query_head_scores(tmp_path):
    path = tmp_path / "full_attention_heads.tsv"
    path.write_text("-9.5e-05\t5.0e-01\n1.002e+00\t4.25e-01\n", encoding="utf-8")
    scores = read_duo_attention(path, toy_info(2, 4, 2))
    expected = torch.tensor([[0, 0, 0.5, 0.5], [1, 1, 0.425, 0.425]])
    torch.testing.assert_close(scores.composite, expected)
    assert scores.top(2) == [(1, 0), (1, 1)]
    scores.save(tmp_path / "scores")
    torch.testing.assert_close(type(scores).load(tmp_path / "scores").composite, expected)
    for text, message in (
        ("0\t1\n", "has 1 lines, the model has n_layers 2"),
        ("0\t1\n0\n", "line 2 has 1 columns, the model has n_kv_heads 2"),
        ("0\t1\n0\tone\n", "line 2, column 2: 'one' is not a finite number"),
        ("0\t1\n0\tnan\n", "line 2, column 2: 'nan' is not a finite number"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=message):
            read_duo_attention(path, toy_info(2, 4, 2))
    with pytest.raises(InputError, match="nowhere.tsv"):
        read_duo_attention(tmp_path / "nowhere.tsv", toy_info(2, 4, 2))


def test_training_needs_probes_and_steps():
    model = wrap_model(tiny_hf("llama"))
    with pytest.raises(InputError, match="no probes"):
        duo_attention(model, [])
    with pytest.raises(InputError, match="steps is 0; give a positive number"):
        duo_attention(model, [random_probe()], steps=0)
