"""The fusion in one pass beside its formula in float64, and inside a hybrid beside the modules it replaces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from hydralens.hybrid.kernels.fusion import fuse  # noqa: E402
from tests.hybrid.examples import random_tokens, tiny_hybrid  # noqa: E402

EPS = 1e-6


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
    given_in = inputs(device, *shape, gamma, gates, strided=strided)
    wanted = [index for index, x in enumerate(given_in) if x is not None and index != 2]
    own = [x.detach().requires_grad_() if index in wanted else x for index, x in enumerate(given_in)]
    exact = [x.detach().double().requires_grad_() if index in wanted else x for index, x in enumerate(given_in)]
    out, expected = fuse(*own, eps=EPS), reference(*exact)
    assert out.is_contiguous() and relative(out, expected) < 1e-5
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, [own[index] for index in wanted], grad)
    for got, right in zip(found, torch.autograd.grad(expected, [exact[index] for index in wanted], grad.double()), strict=True):
        assert got.shape == right.shape and relative(got, right) < 2e-5


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
    ]:
        with pytest.raises(ValueError, match=message):
            fuse(*wrong, eps=EPS)


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
        torch.testing.assert_close(own, expected, atol=1e-5 + 1e-3 * float(expected.abs().max()), rtol=1e-3)
