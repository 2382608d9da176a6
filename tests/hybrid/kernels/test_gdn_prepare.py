"""What surrounds Gated DeltaNet's recurrence, in one pass, beside its formulas in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

pytest.importorskip("triton")

from hydralens.hybrid.kernels.gdn_prepare import prepare  # noqa: E402

EPS = 1e-6
NAMES = ("q", "k", "cos", "sin", "a", "b", "A_log", "dt_bias", "q_weight", "k_weight")


def reference(q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight, real, top):
    """Everything with an axis of positions; ``top`` is the largest beta."""

    def unit(x, weight):
        if weight is not None:
            x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
        if cos is not None:
            half = x.shape[-1] // 2
            x = x * cos[:, :, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[:, :, None]
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    counted = 1 if real is None else real[..., None].double()
    return unit(q, q_weight), unit(k, k_weight), -A_log.exp() * F.softplus(a + dt_bias) * counted, top * b.sigmoid() * counted


def inputs(device, batch, n_pos, n_heads, d_head, norm=True, rope="one", padded=False, strided=False, dtype=torch.float32):
    def made(*shape):
        if not strided or len(shape) < 3:
            return torch.randn(*shape, device=device, dtype=dtype)
        return torch.randn(*shape[:-1], shape[-1] + 4, device=device, dtype=dtype)[..., : shape[-1]]

    angle = torch.randn(1 if rope == "one" else batch, n_pos, d_head // 2, device=device).repeat(1, 1, 2)
    tables = (None, None) if rope == "none" else (angle.cos(), angle.sin())
    weights = [torch.randn(d_head, device=device) for _ in range(2)] if norm else [None, None]
    rows = [made(batch, n_pos, n_heads, d_head) for _ in range(2)]
    gates = [made(batch, n_pos, n_heads) for _ in range(2)]
    real = torch.rand(batch, n_pos, device=device) < 0.7 if padded else None
    return [*rows, *tables, *gates, torch.randn(n_heads, device=device), torch.randn(n_heads, device=device), *weights], real


def relative(own, expected):
    return float((own.detach().double() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-12))


@settings(deadline=None, max_examples=15)
@given(
    shape=st.tuples(st.integers(1, 2), st.sampled_from([1, 7, 33]), st.integers(1, 3), st.sampled_from([2, 64, 80, 128])),
    norm=st.booleans(),
    rope=st.sampled_from(["none", "one", "each"]),
    padded=st.booleans(),
    strided=st.booleans(),
    negative=st.booleans(),
)
def test_forward_and_backward_equal_the_formulas(device, shape, norm, rope, padded, strided, negative):
    torch.manual_seed(0)
    tensors, real = inputs(device, *shape, norm, rope, padded, strided)
    wanted = [index for index, x in enumerate(tensors) if x is not None and NAMES[index] not in ("cos", "sin")]
    own = [x.detach().requires_grad_() if index in wanted else x for index, x in enumerate(tensors)]
    exact = [None if x is None else x.detach().double().requires_grad_(index in wanted) for index, x in enumerate(tensors)]
    out, expected = prepare(*own, real, eps=EPS, negative_eigenvalues=negative), reference(*exact, real, 2 if negative else 1)
    for got, right in zip(out, expected, strict=True):
        assert relative(got, right) < 1e-5
    grads = [torch.randn_like(x) for x in out]
    found = torch.autograd.grad(out, [own[index] for index in wanted], grads)
    right = torch.autograd.grad(expected, [exact[index] for index in wanted], [grad.double() for grad in grads])
    for index, got, wished in zip(wanted, found, right, strict=True):
        # Of two channels one direction is left after the norm: gradients are differences of almost equal numbers.
        assert float((got.double() - wished).norm()) < 1e-4 * max(1.0, float(wished.norm())), NAMES[index]


def test_half_precision_is_computed_in_float32(device):
    torch.manual_seed(0)
    tensors, _ = inputs(device, 1, 9, 2, 64, dtype=torch.bfloat16)
    out = prepare(*tensors, eps=EPS)
    expected = reference(*(x.double() for x in tensors), None, 1)
    assert [x.dtype for x in out] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    assert [relative(*both) < bound for both, bound in zip(zip(out, expected, strict=True), (5e-3, 5e-3, 1e-6, 1e-6), strict=True)] == [True] * 4


def test_worked_by_hand(device):
    """A quarter turn takes (3, 4) to (-4, 3), of length 5; a = -b = log 3, so that softplus gives log 4 and sigmoid 1/4."""
    q = torch.tensor([3.0, 4.0], device=device).reshape(1, 1, 1, 2)
    cos, sin = torch.zeros(1, 1, 2, device=device), torch.ones(1, 1, 2, device=device)
    log3, zero = torch.full((1, 1, 1), 3.0, device=device).log(), torch.zeros(1, device=device)
    turned, same, log_decay, beta = prepare(q, 2 * q, cos, sin, log3, -log3, zero, zero, eps=EPS)
    torch.testing.assert_close(turned.flatten().cpu(), torch.tensor([-0.8, 0.6]))
    torch.testing.assert_close(same, turned)
    torch.testing.assert_close(
        torch.stack([-log_decay, beta]).flatten().cpu(), torch.tensor([4.0, 0.25]).log().where(torch.tensor([True, False]), torch.tensor(0.25))
    )


def test_what_does_not_fit_is_named(device):
    tensors, _ = inputs(device, 1, 4, 2, 8)
    for place, wrong, message in [
        (1, tensors[1][:, :3], r"k is \[1, 3, 2, 8\], expected \[1, 4, 2, 8\]"),
        (4, tensors[4][..., :1], r"a is \[1, 4, 1\], expected \[1, 4, 2\]"),
        (3, None, "cos and sin come together or not at all"),
        (0, tensors[0].double(), "the types equal"),
        (0, tensors[0].repeat(1, 1, 1, 2)[..., ::2], "its stride 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare(*tensors[:place], wrong, *tensors[place + 1 :], eps=EPS)
