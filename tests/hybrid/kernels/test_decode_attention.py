"""Attention of one new token to a cache, beside the softmax in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from hydralens.hybrid.kernels.decode_attention import SHORTEST, decode_attention  # noqa: E402


def reference(q, k, v, queries, lengths, scale):
    out = torch.zeros_like(q)
    for batch, length in enumerate(lengths.tolist()):
        for kv_head, group in enumerate(queries.tolist()):
            for head in (head for head in group if head >= 0):
                weights = (k[batch, kv_head, :length] @ q[batch, head] * scale).softmax(0)
                out[batch, head] = weights @ v[batch, kv_head, :length]
    return out


def inputs(device, batch, groups, n_keys, d_head, dtype=torch.float32, strided=False):
    """``groups``: how many query heads each KV head has; which they are is drawn."""
    n_heads, widest = sum(groups), max(groups)
    heads = torch.randperm(n_heads).split(groups)
    queries = torch.stack([torch.cat([own, own.new_full((widest - len(own),), -1)]) for own in heads]).int().to(device)
    room = n_keys + (7 if strided else 0)
    q = torch.randn(batch, n_heads, d_head, device=device, dtype=dtype)
    k, v = (torch.randn(batch, len(groups), room, d_head, device=device, dtype=dtype)[:, :, :n_keys] for _ in range(2))
    return q, k, v, queries


@settings(deadline=None, max_examples=15)
@given(
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    n_keys=st.sampled_from([1, 63, 64, 200, 3 * SHORTEST + 5]),
    d_head=st.sampled_from([16, 64, 80]),
    strided=st.booleans(),
    data=st.data(),
)
def test_equals_the_softmax_at_every_length(device, groups, n_keys, d_head, strided, data):
    torch.manual_seed(0)
    given_in = inputs(device, 2, groups, n_keys, d_head, strided=strided)
    lengths = torch.tensor([data.draw(st.integers(1, n_keys)) for _ in range(2)], dtype=torch.int32, device=device)
    out = decode_attention(*given_in, lengths, scale=0.3)
    expected = reference(*(x.double() for x in given_in[:3]), given_in[3], lengths, 0.3)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_half_precision(device):
    torch.manual_seed(0)
    half = torch.float16 if device.type == "cpu" else torch.bfloat16  # the interpreter multiplies bfloat16's bits as whole numbers
    given_in = inputs(device, 1, [2, 1], 300, 64, half)
    lengths = torch.tensor([290], dtype=torch.int32, device=device)
    expected = reference(*(x.double() for x in given_in[:3]), given_in[3], lengths, 0.125)
    out = decode_attention(*given_in, lengths, scale=0.125)
    assert out.dtype == half and float((out.double() - expected).norm() / expected.norm()) < 1e-2


def test_worked_by_hand(device):
    """Scores 0 and log 3 weigh two values 1 to 3; the third key lies behind the length."""
    q = torch.full((1, 1, 16), 1.0, device=device)
    k = torch.tensor([0.0, 3.0, 100.0], device=device).log().nan_to_num(neginf=0.0)[None, None, :, None].expand(1, 1, 3, 16).contiguous()
    v = torch.tensor([4.0, 8.0, 1000.0], device=device)[None, None, :, None].expand(1, 1, 3, 16).contiguous()
    zero = torch.zeros(1, 1, dtype=torch.int32, device=device)
    out = decode_attention(q, k, v, zero, torch.tensor([2], dtype=torch.int32, device=device), scale=1 / 16)
    torch.testing.assert_close(out.cpu(), torch.full((1, 1, 16), 7.0))


def test_what_does_not_fit_is_named(device):
    q, k, v, queries = inputs(device, 1, [1, 1], 8, 16)
    lengths = torch.tensor([8], dtype=torch.int32, device=device)
    for wrong, message in [
        ((q, k, v[:, :, :4], queries, lengths), "they may differ in heads and keys alone"),
        ((q, k.double(), v, queries, lengths), "they may differ in heads and keys alone"),
        ((q, k, v, queries[:1], lengths), r"queries is \[1, 1\], expected \[2, up to 16\]"),
        ((q, k, v, queries, lengths.repeat(2)), r"lengths is \[2\], expected \[1\]"),
        ((q.repeat(1, 1, 2)[..., ::2], k, v, queries, lengths), "q has strides"),
    ]:
        with pytest.raises(ValueError, match=message):
            decode_attention(*wrong, scale=1.0)
