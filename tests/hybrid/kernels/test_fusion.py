"""The fusion in one pass beside its formula in float64, and inside a hybrid beside the modules it replaces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from hydralens.hybrid.kernels import fusion  # noqa: E402
from hydralens.hybrid.kernels.fusion import fuse  # noqa: E402
from tests.hybrid.examples import random_tokens, tiny_hybrid  # noqa: E402

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def reference(full, linear, place, gamma, full_gate, linear_gate):
    x = torch.cat([full, linear], 2)[:, :, place.long()]
    out = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * gamma
    gates = [torch.zeros_like(own[..., :1]) if gate is None else gate for own, gate in ((full, full_gate), (linear, linear_gate))]
    width = max(gate.shape[-1] for gate in gates)
    return out * 2 * torch.cat([gate.expand(*gate.shape[:3], width) for gate in gates], 2)[:, :, place.long()].sigmoid()


def inputs(device, batch, n_pos, n_full, n_linear, d_head, gamma, gates, dtype=torch.float32, strided=False):
    """With ``strided`` heads lie before positions in memory, as attention leaves them, and channels are part of a wider tensor."""

    def made(*shape):
        if not strided:
            return torch.randn(*shape, device=device, dtype=dtype)
        return torch.randn(shape[0], shape[2], shape[1], shape[3] + 3, device=device, dtype=dtype).transpose(1, 2)[..., : shape[3]]

    width = {"none": None, "head": 1, "channel": d_head}
    full_gate, linear_gate = (None if width[gate] is None else made(batch, n_pos, n, width[gate]) for gate, n in zip(gates, (n_full, n_linear), strict=True))
    place = torch.randperm(n_full + n_linear, device=device).int()
    scale = torch.randn(n_full + n_linear, d_head if gamma == "channel" else 1, device=device)
    return [made(batch, n_pos, n_full, d_head), made(batch, n_pos, n_linear, d_head), place, scale, full_gate, linear_gate]


def relative(own, expected):
    own, expected = own.detach().double(), expected.detach()
    return float((own - expected).norm() / expected.norm().clamp(min=1e-30))


def compare(tensors):
    """The result and all gradients beside the formula's."""
    wanted = [index for index, x in enumerate(tensors) if x is not None and index != 2]
    own = [x.detach().requires_grad_() if index in wanted else x for index, x in enumerate(tensors)]
    exact = [x.detach().double().requires_grad_() if index in wanted else x for index, x in enumerate(tensors)]
    out, expected = fuse(*own, eps=EPS), reference(*exact)
    assert out.is_contiguous() and out.dtype == tensors[0].dtype and relative(out, expected) < TOLERANCE[out.dtype]
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, [own[index] for index in wanted], grad)
    right = torch.autograd.grad(expected, [exact[index] for index in wanted], grad.double())
    for index, got, wished in zip(wanted, found, right, strict=True):
        assert got.shape == wished.shape and got.dtype == tensors[index].dtype and relative(got, wished) < 2 * TOLERANCE[got.dtype]


@settings(deadline=None, max_examples=15)
@given(
    shape=st.tuples(st.integers(1, 2), st.sampled_from([1, 7, 64, 70]), st.integers(0, 3), st.integers(0, 3), st.sampled_from([8, 64, 80, 128])),
    gamma=st.sampled_from(["head", "channel"]),
    gates=st.tuples(*[st.sampled_from(["none", "head", "channel"])] * 2),
    strided=st.booleans(),
)
def test_forward_and_backward_equal_the_formula(device, shape, gamma, gates, strided):
    if shape[2] + shape[3] == 0:
        return
    torch.manual_seed(0)
    compare(inputs(device, *shape, gamma, gates, strided=strided))


@pytest.mark.parametrize(("gamma", "gates"), [("head", ("channel", "none")), ("channel", ("head", "channel"))])
def test_gradients_add_up_over_all_tiles_of_a_program(device, gamma, gates, monkeypatch):
    """Five heads of nine tiles each, in two programs a head: one has a tile more than the other."""
    monkeypatch.setattr(fusion, "BACKWARD_PROGRAMS", 11)
    torch.manual_seed(0)
    compare(inputs(device, 3, 70, 2, 3, 128, gamma, gates, strided=True))


@pytest.mark.parametrize("gates", [("none", "none"), ("channel", "head")])
def test_gradients_in_bfloat16(device, gates):
    torch.manual_seed(0)
    compare(inputs(device, 2, 33, 2, 1, 80, "channel", gates, torch.bfloat16, strided=True))


def test_gates_may_be_of_another_type_than_the_rows(device):
    torch.manual_seed(0)
    tensors = inputs(device, 1, 7, 1, 2, 8, "head", ("channel", "head"))
    compare([*tensors[:4], *(gate.bfloat16() for gate in tensors[4:])])


def test_rows_that_lie_in_memory_once_for_the_whole_batch(device):
    torch.manual_seed(0)
    full, linear, *others = inputs(device, 1, 7, 2, 1, 8, "head", ("none", "none"))
    compare([full.expand(3, -1, -1, -1), linear.expand(3, -1, -1, -1), *others])


def test_rows_of_zeros_stay_zero_and_have_a_finite_gradient(device):
    torch.manual_seed(0)
    tensors = inputs(device, 1, 7, 2, 1, 8, "head", ("head", "none"))
    tensors[0][:, 3], tensors[1][:, 3] = 0, 0
    assert not fuse(*tensors, eps=EPS)[0, 3].any()
    compare(tensors)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens_at_all(device, shape):
    full, linear, place, gamma, _, _ = inputs(device, *shape, 2, 1, 8, "channel", ("none", "none"))
    out = fuse(full, linear, place, gamma.requires_grad_(), eps=EPS)
    out.sum().backward()
    assert out.shape == (*shape, 3, 8) and not gamma.grad.any()


@pytest.mark.parametrize("gates", [("none", "head"), ("channel", "none")])
def test_shapes_strides_and_types_are_those_that_torch_compile_is_told(device, gates):
    tensors = [*inputs(device, 2, 5, 2, 1, 8, "channel", gates, strided=True), EPS]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.hydralens.fuse_backward.default, (torch.randn(2, 5, 3, 8, device=device), *tensors), test_utils=tests)
    leaves = [x.requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in tensors]
    torch.library.opcheck(torch.ops.hydralens.fuse.default, tuple(leaves), test_utils=tests)


def test_bfloat16_is_rounded_once(device):
    torch.manual_seed(0)
    given_in = inputs(device, 1, 33, 2, 3, 64, "channel", ("channel", "head"), torch.bfloat16)
    out = fuse(*given_in, eps=EPS)
    expected = reference(*(x.double() for x in given_in[:2]), given_in[2], *(x.double() for x in given_in[3:]))
    unit = 2**-7 if device.type == "cpu" else 2**-8  # the interpreter cuts off where the GPU rounds
    assert out.dtype == torch.bfloat16 and float(((out.double() - expected).abs() / expected.abs()).max()) < 1.01 * unit


def test_worked_by_hand(device):
    """Rows of mean square 1 and 4; gamma 3 and 5; the gate of the linear head open by log 3: 2 * 3/4."""
    full = torch.tensor([1.0, -1.0, 1.0, 1.0], device=device).reshape(1, 1, 1, 4)
    linear = torch.tensor([2.0, 2.0, -2.0, 2.0], device=device).reshape(1, 1, 1, 4)
    place, gamma = torch.tensor([1, 0], device=device, dtype=torch.int32), torch.tensor([[5.0], [3.0]], device=device)
    out = fuse(full, linear, place, gamma, None, torch.full((1, 1, 1, 1), 3.0, device=device).log(), eps=EPS)
    torch.testing.assert_close(out[0, 0].cpu(), torch.tensor([[7.5, 7.5, -7.5, 7.5], [3.0, -3.0, 3.0, 3.0]]))


def test_the_same_inputs_give_the_same_bits(device):
    torch.manual_seed(0)
    given_in = inputs(device, 2, 70, 2, 2, 64, "channel", ("head", "channel"))
    own = [x.requires_grad_() if index != 2 else x for index, x in enumerate(given_in)]
    both = []
    for _ in range(2):
        out = fuse(*own, eps=EPS)
        both.append([out, *torch.autograd.grad(out.square().sum(), [x for index, x in enumerate(own) if index != 2])])
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_what_does_not_fit_is_named(device):
    full, linear, place, gamma, _, _ = inputs(device, 1, 4, 1, 2, 8, "head", ("none", "none"))
    for wrong, message in [
        ((full, linear[..., :4], place, gamma), "they may differ in the number of heads alone"),
        ((full, linear.double(), place, gamma), "they may differ in the number of heads alone"),
        ((full, linear, place[:2], gamma), r"1 \+ 2 heads need \[3\] and \[3, 8 or 1\]"),
        ((full, linear, place, gamma, torch.zeros(1, 4, 2, 1, device=device)), r"full_gate is \[1, 4, 2, 1\], expected \[1, 4, 1, 8 or 1\]"),
        ((full.repeat(1, 1, 1, 2)[..., ::2], linear, place, gamma), "the last must be 1"),
        ((full, linear, place.repeat(2)[::2], gamma), "place has strides .* contiguous"),
        ((full, linear, place, gamma.expand(3, 8)), "gamma has strides .* contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            fuse(*wrong, eps=EPS)


@torch.no_grad()
@pytest.mark.parametrize("full_gate", [None, "head", "channel"])
@pytest.mark.parametrize("linear_gate", [None, "head", "channel"])
def test_every_layer_fuses_as_its_modules_do(device, full_gate, linear_gate):
    """With one full head, several, none, and full heads only."""
    gamma = "head" if full_gate == "head" else "channel"
    hybrid = tiny_hybrid("qwen3" if linear_gate else "llama", full_gate=full_gate, linear_gate=linear_gate, gamma=gamma)[0].to(device)
    x = torch.randn(2, 5, hybrid.config.hidden_size, device=device)
    tokens = hybrid.model.tokens(x)
    for layer in hybrid.model.layers:
        attention = layer.self_attn
        outs = attention.outputs(x, tokens, None)
        own, expected = attention.fuse_in_one(outs, x), attention.fuse(attention.ordered(outs), x)
        torch.testing.assert_close(own, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("choices", [{}, {"full_gate": "channel", "linear_gate": "head"}, {"full_gate": None, "gamma": "head"}])
def test_a_hybrid_computes_the_same_with_the_kernels(device, choices, monkeypatch):
    """Logits and gradients, kernels of the fusion and around Gated DeltaNet against plain torch; some layers have heads of one kind only."""
    hybrid = tiny_hybrid("qwen3", **choices)[0].to(device)
    tokens = random_tokens(2, 37).to(device)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    found = {}
    for backend in ("torch", "triton"):
        monkeypatch.setenv("HYDRALENS_FUSION", backend)
        hybrid.zero_grad()
        logits = hybrid(tokens, attention_mask=mask).logits
        logits[mask.bool()].square().mean().backward()
        found[backend] = [logits[mask.bool()], *(p.grad for p in hybrid.parameters())]
    for own, expected in zip(found["triton"], found["torch"], strict=True):
        torch.testing.assert_close(own, expected, atol=1e-5 + 1e-3 * float(expected.detach().abs().max()), rtol=1e-3)
