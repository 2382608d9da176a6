import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.hybrid.recurrence import gated_delta_rule, gated_delta_rule_recurrent


def inputs(batch=2, n_pos=13, n_heads=2, d_k=4, d_v=3, *, decay=1.0, seed=0, dtype=torch.float64):
    """q, k, v, log_decay, beta, as a layer gives them: keys of length 1, decays from none to ``exp(-decay)`` and far beyond for some."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(batch, n_pos, n_heads, d_k, generator=generator, dtype=dtype), dim=-1) for _ in range(2))
    v = torch.randn(batch, n_pos, n_heads, d_v, generator=generator, dtype=dtype)
    log_decay = -decay * torch.rand(batch, n_pos, n_heads, generator=generator, dtype=dtype)
    return q, k, v, log_decay, torch.rand(batch, n_pos, n_heads, generator=generator, dtype=dtype)


def by_hand(q, k, v, log_decay, beta, state):
    """Written from the paper with explicit sums, one number at a time."""
    batch, n_pos, n_heads, d_k = q.shape
    d_v, state, out = v.shape[-1], state.clone(), torch.zeros_like(v)
    for b in range(batch):
        for h in range(n_heads):
            s = state[b, h]
            for t in range(n_pos):
                s = log_decay[b, t, h].exp() * s
                recalled = [sum(s[i, j] * k[b, t, h, i] for i in range(d_k)) for j in range(d_v)]
                s = torch.stack(
                    [torch.stack([s[i, j] + k[b, t, h, i] * beta[b, t, h] * (v[b, t, h, j] - recalled[j]) for j in range(d_v)]) for i in range(d_k)]
                )
                out[b, t, h] = torch.stack([sum(s[i, j] * q[b, t, h, i] for i in range(d_k)) for j in range(d_v)])
            state[b, h] = s
    return out, state


@pytest.mark.parametrize("rule", [gated_delta_rule, gated_delta_rule_recurrent])
def test_equals_a_loop_over_single_numbers(rule):
    arguments, state = inputs(n_pos=7), torch.randn(2, 2, 4, 3, dtype=torch.float64)
    options = {"chunk": 3} if rule is gated_delta_rule else {}
    for own, expected in zip(rule(*arguments, initial_state=state, **options), by_hand(*arguments, state), strict=True):
        torch.testing.assert_close(own, expected, atol=1e-12, rtol=1e-12)


def test_a_toy_worked_out_on_paper():
    """One head, keys e1, e1, e2: the second write to e1 replaces the first (beta 1), a half decay halves it, e2 is written beside it."""
    one, two = [1.0, 0.0], [0.0, 1.0]
    k, v = torch.tensor([[[one], [one], [two]]]), torch.tensor([[[[6.0]], [[2.0]], [[5.0]]]])
    q = torch.tensor([[[one], [one], [[1.0, 1.0]]]])
    log_decay, beta = torch.tensor([[[0.0], [0.0], [0.5]]]), torch.ones(1, 3, 1)
    log_decay[0, 2] = torch.tensor(0.5).log()
    out, state = gated_delta_rule(q, k, v, log_decay, beta)
    torch.testing.assert_close(out.flatten(), torch.tensor([6.0, 2.0, 1.0 + 5.0]))
    torch.testing.assert_close(state[0, 0, :, 0], torch.tensor([1.0, 5.0]))


@settings(max_examples=60, deadline=None)
@given(
    n_pos=st.integers(0, 40),
    chunk=st.sampled_from([1, 2, 7, 16, 64]),
    d_k=st.integers(1, 6),
    d_v=st.integers(1, 6),
    decay=st.sampled_from([0.0, 1e-3, 1.0, 70.0, 1e4]),
    split=st.integers(0, 40),
)
def test_chunked_equals_token_by_token_in_any_pieces(n_pos, chunk, d_k, d_v, decay, split):
    arguments = inputs(n_pos=n_pos, d_k=d_k, d_v=d_v, decay=decay)
    expected, last = gated_delta_rule_recurrent(*arguments)
    split = min(split, n_pos)
    first, state = gated_delta_rule(*(x[:, :split] for x in arguments), chunk=chunk)
    second, state = gated_delta_rule(*(x[:, split:] for x in arguments), initial_state=state, chunk=chunk)
    torch.testing.assert_close(torch.cat([first, second], 1), expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(state, last, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("decay", [0.5, 300.0])
def test_gradients(decay):
    arguments = [x.requires_grad_() for x in inputs(batch=1, n_pos=6, n_heads=1, d_k=3, d_v=2, decay=decay)]
    state = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x[:-1], initial_state=x[-1], chunk=4), (*arguments, state))


@pytest.mark.parametrize("rule", [gated_delta_rule, gated_delta_rule_recurrent])
def test_packed_documents_equal_separate_ones(rule):
    arguments, ends = inputs(batch=1, n_pos=20), torch.tensor([0, 5, 5, 6, 20])  # the second is empty
    states = torch.randn(4, 2, 4, 3, dtype=torch.float64)
    out, last = rule(*arguments, initial_state=states, cu_seqlens=ends)
    for index, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
        own, state = rule(*(x[:, start:stop] for x in arguments), initial_state=states[index : index + 1])
        torch.testing.assert_close(out[:, start:stop], own)
        torch.testing.assert_close(last[index : index + 1], state)


def test_the_state_is_float32_under_bfloat16_and_long_runs_stay_finite():
    arguments = inputs(batch=1, n_pos=500, n_heads=1, d_k=8, d_v=8, decay=0.01, dtype=torch.float32)
    exact, _ = gated_delta_rule(*(x.double() for x in arguments))
    out, state = gated_delta_rule(*(x.bfloat16() for x in arguments[:3]), *arguments[3:])
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert (out.double() - exact).norm() / exact.norm() < 2e-2
    single, _ = gated_delta_rule(*arguments)
    assert (single.double() - exact).norm() / exact.norm() < 1e-5


def test_wrong_shapes_are_one_clear_line():
    q, k, v, log_decay, beta = inputs()
    with pytest.raises(InputError, match=r"k is \[2, 13, 1, 4\], expected \[2, 13, 2, 4\]"):
        gated_delta_rule(q, k[:, :, :1], v, log_decay, beta)
    with pytest.raises(InputError, match="batch of 2"):
        gated_delta_rule(q, k, v, log_decay, beta, cu_seqlens=torch.tensor([0, 13]))
    row = [x[:1] for x in (q, k, v, log_decay, beta)]
    for rule in (gated_delta_rule, gated_delta_rule_recurrent):
        for ends in ([0, 9], [2, 13], [0, 9, 7, 13]):
            with pytest.raises(InputError, match=rf"cu_seqlens is \[{ends[0]}, .*it must run from 0 to the 13 tokens"):
                rule(*row, cu_seqlens=torch.tensor(ends))


@pytest.mark.parametrize("strong", [-13.8, -1e4, -1e6, -torch.inf])
def test_in_float32_slow_decays_behind_strong_ones_are_kept(strong):
    arguments = inputs(batch=1, n_pos=200, d_k=16, d_v=16, decay=0.02)
    arguments[3][:, ::16] = strong
    exact, last = gated_delta_rule_recurrent(*arguments)
    out, state = gated_delta_rule(*(x.float() for x in arguments))
    assert (out.double() - exact).norm() / exact.norm() < 2e-6
    assert (state.double() - last).norm() / last.norm() < 2e-6
