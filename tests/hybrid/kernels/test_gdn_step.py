"""One decoded token of Gated DeltaNet beside the recurrence in float64, and step after step beside whole sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from hydralens.hybrid.kernels.gdn_step import step  # noqa: E402
from hydralens.hybrid.recurrence import gated_delta_rule  # noqa: E402
from tests.hybrid.examples import tiny_hybrid  # noqa: E402
from tests.hybrid.kernels.test_gdn_prepare import EPS, inputs, reference, relative  # noqa: E402


def compare(tensors, v, state, negative=False):
    """The outputs of a step a position, and the state after the last, beside the chunked recurrence over all of them in float64."""
    q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight = tensors
    exact = reference(*(None if x is None else x.double() for x in tensors), None, 2 if negative else 1)
    expected, last = gated_delta_rule(*exact[:2], v.double(), *exact[2:], initial_state=state.double())
    own, outs = state.clone(), []
    for t in range(q.shape[1]):
        rows = [x[:, t] for x in (q, k, v, a, b)]
        tables = [None if x is None else x[:, t] for x in (cos, sin)]
        outs.append(step(*rows, A_log, dt_bias, *tables, own, q_weight, k_weight, eps=EPS, negative_eigenvalues=negative))
        assert outs[-1].is_contiguous() and outs[-1].dtype == v.dtype
    assert relative(torch.stack(outs, 1), expected) < (1e-5 if v.dtype == torch.float32 else 5e-3) and relative(own, last) < 1e-5


@torch.no_grad()
@settings(deadline=None, max_examples=15)
@given(
    shape=st.tuples(st.integers(1, 2), st.just(5), st.integers(1, 3), st.sampled_from([8, 64, 80, 128])),
    d_v=st.sampled_from([8, 64, 72, 128]),
    norm=st.sampled_from(["qk", "q", "k", ""]),
    rope=st.sampled_from(["none", "one", "each"]),
    strided=st.booleans(),
    negative=st.booleans(),
)
def test_steps_equal_the_recurrence_over_the_sequence(device, shape, d_v, norm, rope, strided, negative):
    torch.manual_seed(0)
    tensors, _ = inputs(device, *shape, norm, rope, False, strided)
    q, k, cos, sin, a, b, A_log, dt_bias, q_weight, k_weight = tensors
    batch, n_pos, n_heads, d_k = shape
    v = torch.randn(batch, n_heads, n_pos, d_v + 3, device=device).transpose(1, 2)[..., :d_v]
    compare(tensors, v if strided else v.contiguous(), torch.randn(batch, n_heads, d_k, d_v, device=device), negative)


@torch.no_grad()
@pytest.mark.parametrize("of_qk", [torch.bfloat16, torch.float32])
def test_half_precision_keeps_a_state_in_float32(device, of_qk):
    """Also where RoPE left q and k in float32."""
    torch.manual_seed(0)
    tensors, _ = inputs(device, 2, 20, 2, 16, dtype=of_qk)
    compare(tensors, torch.randn(2, 20, 2, 24, device=device).bfloat16(), torch.zeros(2, 2, 16, 24, device=device))


@torch.no_grad()
@pytest.mark.parametrize(("family", "choices"), [("qwen3", {}), ("llama", {"negative_eigenvalues": True})])
def test_steps_equal_a_branch_over_the_whole_sequence(device, family, choices, monkeypatch):
    """With and without QK-norm; the branch in plain torch, chunk by chunk."""
    monkeypatch.setenv("HYDRALENS_FUSION", "torch")
    hybrid = tiny_hybrid(family, gdn_backend="torch", **choices)[0].to(device)
    branch = hybrid.model.layers[1].self_attn.branches["gdn"]
    x = torch.randn(2, 9, hybrid.config.hidden_size, device=device)
    tokens = hybrid.model.tokens(x)
    q, k, v = (branch.split(project(x)) for project in (branch.q_proj, branch.k_proj, branch.v_proj))
    cos, sin, a, b, A_log, dt_bias, *norms = branch.given(x, tokens)
    state, outs = torch.zeros(2, len(branch.heads), branch.head_dim, branch.head_dim, device=device), []
    for t in range(9):
        rows, tables = (y[:, t] for y in (q, k, v, a, b)), (table[:, t] for table in (cos, sin))
        outs.append(step(*rows, A_log, dt_bias, *tables, state, *norms, **branch.constants()))
    torch.testing.assert_close(torch.stack(outs, 1), branch(x, tokens, None), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_operator_changes_the_state_and_nothing_else(device):
    torch.manual_seed(0)
    tensors, _ = inputs(device, 2, 1, 2, 8)
    q, k, cos, sin, a, b = (x[:, 0] for x in tensors[:6])
    arguments = (q, k, k, a, b, *tensors[6:8], cos, sin, torch.randn(2, 2, 8, 8, device=device), *tensors[8:], EPS, False)
    torch.library.opcheck(torch.ops.hydralens.gdn_step.default, arguments, test_utils=("test_schema", "test_faketensor"))


@torch.no_grad()
def test_worked_by_hand(device):
    """The state decays to a half; the key (1, 0) recalls 1, so that beta 1/2 writes half of 5 - 1 and the query (1, 0) reads 1 + 2."""
    one = torch.tensor([[[1.0, 0.0]]], device=device)
    state = torch.tensor([[2.0, 0.0], [4.0, 0.0]], device=device).reshape(1, 1, 2, 2)
    v = torch.tensor([[[5.0, 0.0]]], device=device)
    zero = torch.zeros(1, 1, device=device)
    out = step(one, one, v, zero, zero, zero[0], zero[0], None, None, state, eps=EPS)  # softplus(0) = log 2, sigmoid(0) = 1/2
    torch.testing.assert_close(out.flatten().cpu(), torch.tensor([3.0, 0.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(state[0, 0].cpu(), torch.tensor([[3.0, 0.0], [2.0, 0.0]]), atol=1e-5, rtol=0)


def test_what_does_not_fit_is_named(device):
    tensors, _ = inputs(device, 1, 1, 2, 8)
    q, k, cos, sin, a, b = (x[:, 0] for x in tensors[:6])
    state = torch.zeros(1, 2, 8, 8, device=device)

    def call(v=k, state=state):
        with torch.no_grad():
            step(q, k, v, a, b, tensors[6], tensors[7], cos, sin, state, eps=EPS)

    for wrong, message in [
        ({"state": state.double()}, "float32 and contiguous"),
        ({"state": state.mT}, "float32 and contiguous"),
        ({"state": state[..., :4]}, r"expected \[1, 2, 8, 8\]"),
        ({"v": k[:, :1]}, r"v is \[1, 1, 8\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**wrong)
    with pytest.raises(ValueError, match="has no backward"):
        step(q.requires_grad_(), k, k, a, b, tensors[6], tensors[7], cos, sin, state, eps=EPS)
    with pytest.raises(ValueError, match="has no backward"):
        step(q.detach(), k, k, a, b, tensors[6], tensors[7], cos, sin, state, None, tensors[9].requires_grad_(), eps=EPS)
