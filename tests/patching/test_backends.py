from itertools import product

import pytest
import torch

pytest.importorskip("transformer_lens")
pytest.importorskip("nnsight")

from hydralens.errors import InputError  # noqa: E402
from hydralens.models import load_model  # noqa: E402
from hydralens.models.lens import wrap_model  # noqa: E402
from hydralens.patching.activation import MODES, activation_patch  # noqa: E402
from hydralens.patching.backends import BACKENDS  # noqa: E402
from hydralens.patching.pairs import COMPONENTS, DIRECTIONS  # noqa: E402
from hydralens.patching.path import edge_maps, path_patch  # noqa: E402
from hydralens.probes.tasks import ioi  # noqa: E402
from tests.patching.examples import random_probe  # noqa: E402
from tests.tiny import FAMILIES, tiny_hf  # noqa: E402

OTHERS = BACKENDS[1:]


def same(ours, theirs, atol=1e-5, rtol=1e-5):
    torch.testing.assert_close(theirs.per_pair, ours.per_pair, atol=atol, rtol=rtol, equal_nan=True)
    torch.testing.assert_close(theirs.clean_metric, ours.clean_metric, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(theirs.corrupt_metric, ours.corrupt_metric, atol=1e-4, rtol=1e-4)
    assert torch.equal(theirs.answered, ours.answered) and torch.equal(theirs.kept, ours.kept)
    assert ours.split()[1] == theirs.split()[1]


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_activation_patching_agrees(family, backend):
    model, probe = wrap_model(tiny_hf(family, dtype=torch.float64)), random_probe(n_pairs=1)
    heads = [(0, 1), (2, 0)]
    for index, (component, mode) in enumerate(product(COMPONENTS, MODES)):
        asked = component, mode, DIRECTIONS[index // 2 % 2], ("answer", "all", "needle", "suffix")[index % 4]
        same(activation_patch(model, probe, *asked, heads=heads), activation_patch(model, probe, *asked, heads=heads, backend=backend))


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_path_patching_agrees(family, backend):
    model, probe = wrap_model(tiny_hf(family, dtype=torch.float64)), random_probe(n_pairs=1)
    senders = [(0, 0), (1, 2), (2, 1)]
    for receiver_input, settings in (
        ("q", {}),
        ("q", {"second_pass": "direct", "freeze_mlps": True, "direction": "denoise", "positions": "all"}),
        ("k", {"freeze_mlps": True}),
        ("v", {"direction": "denoise"}),
        ("v", {"second_pass": "direct", "positions": "needle"}),
        ("v", {"positions": "needle"}),
        ("z->logits", {}),
        ("z->logits", {"freeze_mlps": True, "direction": "denoise"}),
    ):
        receivers = None if receiver_input == "z->logits" else [(1, 1), (3, 0)]
        ours, theirs = (path_patch(model, probe, receivers, receiver_input, senders=senders, backend=name, **settings) for name in ("hooks", backend))
        assert theirs.per_pair.isfinite().sum() == len(senders)
        same(ours, theirs)


@pytest.mark.parametrize("backend", OTHERS)
def test_edge_maps_agree(backend):
    model, probe, receivers = wrap_model(tiny_hf("qwen3", dtype=torch.float64)), random_probe(n_pairs=1), [(1, 0), (3, 1)]
    ours, theirs = (edge_maps(model, probe, receivers, "k", senders=[(0, 5), (2, 3)], backend=name) for name in ("hooks", backend))
    for receiver in receivers:
        same(ours[receiver], theirs[receiver])
    assert ours[1, 0].per_pair[0, 2, 3].isnan() and ours[3, 1].per_pair[0, 2, 3].isfinite()


@pytest.mark.parametrize("backend", OTHERS)
def test_prefiltered_heads_are_verified_by_the_backend(backend):
    model, probe = wrap_model(tiny_hf("llama", dtype=torch.float64)), random_probe(n_pairs=1)
    ours, theirs = (activation_patch(model, probe, mode="total", prefilter="atp", verify=3, backend=name) for name in ("hooks", backend))
    assert theirs.per_pair.isfinite().sum() == 3 and torch.equal(ours.estimate, theirs.estimate)
    same(ours, theirs)


@pytest.mark.parametrize("backend", OTHERS)
def test_float32_padding_read_out_and_a_metric_of_ones_own(backend):
    model = wrap_model(tiny_hf("qwen3"))
    plain, padded = random_probe(seed=3), random_probe(seed=3, pad=(3, 2))
    heads = [(1, 3), (2, 6)]
    same(
        activation_patch(model, plain, mode="total", positions="all", heads=heads),
        activation_patch(model, padded, mode="total", positions="all", heads=heads, backend=backend),
        atol=1e-4,
    )
    same(*(activation_patch(model, plain, readout="first", heads=heads, backend=name) for name in ("hooks", backend)), atol=1e-4)

    def metric(logits, answer, foil):
        return logits.log_softmax(-1)[:, -1, answer[-1]]

    same(*(activation_patch(model, plain, metric=metric, heads=heads, backend=name) for name in ("hooks", backend)), atol=1e-4)


@pytest.mark.parametrize("backend", OTHERS)
def test_the_users_model_is_as_it_was(backend):
    hf = tiny_hf("gemma2")
    model, probe = wrap_model(hf), random_probe(n_pairs=1)

    def state():
        return [(name, id(module), sorted(module.__dict__), len(module._forward_hooks) + len(module._forward_pre_hooks)) for name, module in hf.named_modules()]

    before, logits = state(), hf(input_ids=probe.clean).logits
    activation_patch(model, probe, "k", "direct", heads=[(1, 0)], backend=backend)
    path_patch(model, probe, [(2, 0)], senders=[(0, 0)], backend=backend)
    assert state() == before and torch.equal(hf(input_ids=probe.clean).logits, logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "pyvene"}, "backend 'pyvene' is not one of hooks, transformer_lens, nnsight"),
        ({"receivers": [(3, 0)], "backend": "pyvene"}, "backend 'pyvene' is not one of hooks, transformer_lens, nnsight"),
        ({"component": "mlp"}, "component 'mlp' is not one of z, q, k, v"),
        ({"readout": "last"}, "readout 'last' is not one of span, first"),
        ({"receivers": [(3, 0)], "readout": "last"}, "readout 'last' is not one of span, first"),
        ({"component": "k", "heads": [(0, 2)]}, "L0H2 does not exist"),
        ({"receivers": [(3, 0)], "receiver_input": "k_ungrouped"}, "with backend nnsight receiver_input 'k_ungrouped' is not one of q, k, v, z->logits"),
        ({"receivers": [(2, 1)], "senders": [(2, 0)]}, "no sender lies before layer 2"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, message):
    model, probe = wrap_model(tiny_hf("llama")), random_probe(n_pairs=1)
    patch = path_patch if "receivers" in arguments else activation_patch
    with pytest.raises(InputError, match=message) as error:
        patch(**{"backend": "nnsight"} | arguments, model=model, probe=probe)
    assert "\n" not in str(error.value)


@pytest.mark.embedded
def test_three_routes_agree_on_the_embedded_model():
    model = load_model("embedded", device="cpu", dtype="float32")
    probe = ioi(model, n_pairs=1)
    asked = (("z", "direct", "noise", "answer"), [(23, 2), (29, 1)]), (("k", "total", "denoise", "all"), [(24, 1), (29, 0)])
    for intervention, heads in asked:
        ours = activation_patch(model, probe, *intervention, heads=heads)
        assert ours.per_pair.nan_to_num().abs().max() > 0.1  # something to agree about
        for backend in OTHERS:
            same(ours, activation_patch(model, probe, *intervention, heads=heads, backend=backend), atol=1e-4, rtol=1e-4)
    senders, receivers = [(18, 6), (21, 8)], [(23, 2), (24, 4)]
    ours = path_patch(model, probe, receivers, senders=senders, positions="all")
    assert ours.per_pair.nan_to_num().abs().max() > 0.01
    for backend in OTHERS:
        same(ours, path_patch(model, probe, receivers, senders=senders, positions="all", backend=backend), atol=1e-4, rtol=1e-4)
