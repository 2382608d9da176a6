"""What surrounds Gated DeltaNet's recurrence, in one pass, beside its formulas in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

pytest.importorskip("triton")

from hydralens.hybrid.kernels import gdn_prepare  # noqa: E402
from hydralens.hybrid.kernels.gdn_prepare import prepare  # noqa: E402
from tests.hybrid.examples import tiny_hybrid  # noqa: E402

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


def inputs(device, batch, n_pos, n_heads, d_head, norm="qk", rope="one", padded=False, strided=False, dtype=torch.float32):
    """What ``prepare`` takes, ``real`` apart. With ``strided`` everything is part of something wider, and positions lie before the batch in memory."""

    def made(*shape):
        if not strided:
            return torch.randn(*shape, device=device, dtype=dtype)
        return torch.randn(shape[1], shape[0], *shape[2:-1], shape[-1] + 4, device=device, dtype=dtype).transpose(0, 1)[..., : shape[-1]]

    angle = torch.randn(1 if rope == "one" else batch, n_pos, d_head // 2, device=device).repeat(1, 1, 2)
    tables = (None, None) if rope == "none" else (angle.cos(), angle.sin())
    weights = [torch.randn(d_head, device=device) if name in norm else None for name in "qk"]
    rows = [made(batch, n_pos, n_heads, d_head) for _ in range(2)]
    gates = [made(batch, n_pos, n_heads) for _ in range(2)]
    real = torch.rand(n_pos, batch, device=device).T < 0.7 if padded else None
    return [*rows, *tables, *gates, torch.randn(n_heads, device=device), torch.randn(n_heads, device=device), *weights], real


def relative(own, expected):
    return float((own.detach().double() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-12))


def compare(tensors, real=None, negative=False):
    """The results and all gradients beside the formulas'."""
    wanted = [index for index, x in enumerate(tensors) if x is not None and NAMES[index] not in ("cos", "sin")]
    own = [x.detach().requires_grad_() if index in wanted else x for index, x in enumerate(tensors)]
    exact = [None if x is None else x.detach().double().requires_grad_(index in wanted) for index, x in enumerate(tensors)]
    out, expected = prepare(*own, real, eps=EPS, negative_eigenvalues=negative), reference(*exact, real, 2 if negative else 1)
    assert [x.dtype for x in out] == [tensors[0].dtype, tensors[0].dtype, torch.float32, torch.float32] and all(x.is_contiguous() for x in out)
    for got, right in zip(out, expected, strict=True):
        assert relative(got, right) < (1e-5 if got.dtype == torch.float32 else 5e-3)
    grads = [torch.randn_like(x) for x in out]
    found = torch.autograd.grad(out, [own[index] for index in wanted], grads)
    right = torch.autograd.grad(expected, [exact[index] for index in wanted], [grad.double() for grad in grads])
    for index, got, wished in zip(wanted, found, right, strict=True):
        assert got.shape == wished.shape and got.dtype == tensors[index].dtype
        # Of two channels one direction is left after the norm: gradients are differences of almost equal numbers.
        tolerance = 1e-2 if got.dtype == torch.bfloat16 else 1e-4 if tensors[0].shape[-1] == 2 else 2e-5
        assert float((got.double() - wished).norm()) < tolerance * max(1.0, float(wished.norm())), NAMES[index]


@settings(deadline=None, max_examples=15)
@given(
    shape=st.tuples(st.integers(1, 2), st.sampled_from([1, 7, 33]), st.integers(1, 3), st.sampled_from([2, 64, 80, 128])),
    norm=st.sampled_from(["qk", "q", "k", ""]),
    rope=st.sampled_from(["none", "one", "each"]),
    padded=st.booleans(),
    strided=st.booleans(),
    negative=st.booleans(),
)
def test_forward_and_backward_equal_the_formulas(device, shape, norm, rope, padded, strided, negative):
    torch.manual_seed(0)
    compare(*inputs(device, *shape, norm, rope, padded, strided), negative)


@pytest.mark.parametrize("norm", ["qk", "k"])
def test_gradients_add_up_over_all_tiles_of_a_program(device, norm, monkeypatch):
    """Three heads of nine tiles each, in two programs a head: one has a tile more than the other."""
    monkeypatch.setattr(gdn_prepare, "BACKWARD_PROGRAMS", 7)
    torch.manual_seed(0)
    compare(*inputs(device, 3, 37, 3, 128, norm, "each", True, True), True)


def test_gradients_in_bfloat16(device):
    torch.manual_seed(0)
    compare(*inputs(device, 2, 33, 2, 80, padded=True, dtype=torch.bfloat16))


def test_a_gradient_of_one_result_alone(device):
    """What a loss does not depend on has a gradient of 0."""
    torch.manual_seed(0)
    tensors, _ = inputs(device, 1, 5, 2, 8)
    own = [x.requires_grad_() if name not in ("cos", "sin") else x for name, x in zip(NAMES, tensors, strict=True)]
    d_q, d_k, d_a, d_b = torch.autograd.grad(prepare(*own, eps=EPS)[3].sum(), [own[NAMES.index(name)] for name in ("q", "k", "a", "b")])
    assert not d_q.any() and not d_k.any() and not d_a.any() and d_b.all()


def test_the_slowest_and_the_fastest_decays_keep_their_digits(device):
    """log(1 + e^x) at both ends, where it is e^x and x: one decays over e^80 tokens, the other within one."""
    a = torch.tensor([-80.0, -30.0, -17.0, -5.0, 0.0, 5.0, 17.0, 30.0, 80.0], device=device).reshape(1, -1, 1).requires_grad_()
    row, zero = torch.ones(1, 9, 1, 2, device=device), torch.zeros(1, device=device)
    _, _, log_decay, beta = prepare(row, row, None, None, a, a, zero, zero, eps=EPS)
    exact = a.detach().double().requires_grad_()
    expected = -torch.where(exact < 0, exact.exp().log1p(), exact + (-exact).exp().log1p())
    torch.testing.assert_close(log_decay.double(), expected, atol=0, rtol=2e-5)
    torch.testing.assert_close(beta.double(), exact.sigmoid(), atol=0, rtol=2e-5)
    found, right = torch.autograd.grad(log_decay.sum(), a), torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(found[0].double(), right[0], atol=0, rtol=2e-5)


def test_rows_of_zeros_stay_zero_and_have_a_finite_gradient(device):
    torch.manual_seed(0)
    tensors, _ = inputs(device, 1, 5, 2, 8, "k")
    tensors[0][:, 1], tensors[1][:, 1] = 0, 0
    assert not any(x[:, 1].any() for x in prepare(*tensors, eps=EPS)[:2])
    compare(tensors)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens_at_all(device, shape):
    tensors, real = inputs(device, *shape, 2, 8, rope="each", padded=True)
    out = prepare(*tensors[:8], tensors[8].requires_grad_(), tensors[9], real, eps=EPS)
    out[0].sum().backward()
    assert [list(x.shape) for x in out] == [[*shape, 2, 8]] * 2 + [[*shape, 2]] * 2 and not tensors[8].grad.any()


def test_the_same_inputs_give_the_same_bits(device):
    torch.manual_seed(0)
    tensors, real = inputs(device, 2, 70, 3, 64, padded=True)
    own = [x.requires_grad_() if name not in ("cos", "sin") else x for name, x in zip(NAMES, tensors, strict=True)]
    both = []
    for _ in range(2):
        out = prepare(*own, real, eps=EPS)
        both.append([*out, *torch.autograd.grad(sum((x**3).sum() for x in out), [x for x in own if x.requires_grad])])
    assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


@pytest.mark.parametrize(("norm", "rope"), [("qk", "none"), ("", "one")])
def test_shapes_strides_and_types_are_those_that_torch_compile_is_told(device, norm, rope):
    tensors, real = inputs(device, 2, 5, 3, 8, norm, rope, True, True)
    arguments, tests = [*tensors, real, EPS, False], ("test_schema", "test_autograd_registration", "test_faketensor")
    grads = [torch.randn_like(x) for x in prepare(*tensors, real, eps=EPS)]
    torch.library.opcheck(torch.ops.hydralens.gdn_prepare_backward.default, (*grads, *arguments), test_utils=tests)
    leaves = [x.requires_grad_() if name not in ("cos", "sin") and x is not None else x for name, x in zip(NAMES, tensors, strict=True)]
    torch.library.opcheck(torch.ops.hydralens.gdn_prepare.default, (*leaves, *arguments[len(leaves) :]), test_utils=tests)


@torch.no_grad()
@pytest.mark.parametrize(("family", "choices"), [("qwen3", {}), ("llama", {"negative_eigenvalues": True}), ("qwen3", {"linear_rope": False})])
@pytest.mark.parametrize("padded", [False, True])
def test_a_branch_prepares_as_its_torch_code_does(device, family, choices, padded, monkeypatch):
    """With and without QK-norm; positions start at another place in every padded row."""
    hybrid = tiny_hybrid(family, **choices)[0].to(device)
    branch = hybrid.model.layers[1].self_attn.branches["gdn"]
    x, mask = torch.randn(2, 9, hybrid.config.hidden_size, device=device), torch.ones(2, 9, dtype=torch.long, device=device)
    mask[1, :4] = 0
    tokens, found = hybrid.model.tokens(x, mask if padded else None), []
    for backend in ("torch", "triton"):
        monkeypatch.setenv("HYDRALENS_FUSION", backend)
        found.append(branch.prepare(x, *(branch.split(project(x)) for project in (branch.q_proj, branch.k_proj, branch.v_proj)), tokens))
    for expected, own in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, atol=1e-6, rtol=1e-5)


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
