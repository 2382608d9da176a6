"""A new token's query, key and value beside QK-norm, RoPE and scale in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from hydralens.hybrid.kernels.decode_append import append  # noqa: E402

EPS = 1e-6


def reference(x, weight, cos, sin):
    x = x.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    if cos is None:
        return x
    first, second = x.chunk(2, -1)
    return x * cos.double()[:, None] + torch.cat([-second, first], -1) * sin.double()[:, None]


def inputs(device, batch, n_heads, n_kv, d_head, room=9, dtype=torch.float32):
    """Rows that are slices of one product, as decoding has them, and caches full of numbers."""
    sizes = [n * d_head for n in (n_heads, n_kv, n_kv, 1)]
    rows = torch.randn(batch, sum(sizes), device=device, dtype=dtype).split(sizes, 1)
    caches = [torch.randn(batch, n_kv, room, d_head, device=device, dtype=dtype) for _ in range(2)]
    return [x.unflatten(1, (-1, d_head)) for x in rows[:3]], caches


@settings(deadline=None, max_examples=15)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 64, 80, 128])),
    norm=st.sampled_from(["qk", "q", "k", ""]),
    rope=st.sampled_from([0, 1, 2]),
    log_scale=st.sampled_from([None, 512.0]),
    data=st.data(),
)
def test_equals_the_formulas_and_writes_one_place(device, shape, norm, rope, log_scale, data):
    torch.manual_seed(0)
    (q, k, v), (keys, values) = inputs(device, *shape)
    batch, d_head = shape[0], shape[3]
    lengths = torch.tensor([data.draw(st.integers(0, 8)) for _ in range(batch)], dtype=torch.int32, device=device)
    tables = [None, None]
    if rope:
        angle = torch.randn(1 if rope == 1 else batch, d_head // 2, device=device).repeat(1, 2)
        tables = [angle.cos(), angle.sin()]
    weights = [torch.randn(d_head, device=device) if name in norm else None for name in "qk"]
    expected_k, expected_v = keys.double(), values.double()
    for row, length in enumerate(lengths.tolist()):
        expected_k[row, :, length], expected_v[row, :, length] = reference(k, weights[1], *tables)[row], v[row].double()
    expected_q = reference(q, weights[0], *tables)
    if log_scale is not None:
        expected_q *= ((lengths.double() + log_scale).log() / math.log(log_scale))[:, None, None]
    out = append(q, k, v, *tables, lengths, keys, values, *weights, log_scale=log_scale, eps=EPS)
    for found, right in ((out, expected_q), (keys, expected_k), (values, expected_v)):
        torch.testing.assert_close(found.double(), right, atol=2e-5, rtol=1e-5)
    assert out.is_contiguous()


def test_half_precision_is_computed_in_float32(device):
    torch.manual_seed(0)
    (q, k, v), caches = inputs(device, 2, 3, 1, 64, dtype=torch.float16)
    weight = torch.randn(64, device=device)
    out = append(q, k, v, None, None, torch.zeros(2, dtype=torch.int32, device=device), *caches, weight, None, log_scale=512.0, eps=EPS)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), reference(q, weight, None, None), atol=1e-3, rtol=1e-3)


def test_what_does_not_fit_is_named(device):
    (q, k, v), (keys, values) = inputs(device, 1, 2, 1, 8)
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    for wrong, message in [
        ((q, k, v[:, :, :4], None, None, lengths, keys, values), r"v \[1, 1, 4\]"),
        ((q, k, v, None, None, lengths, keys[:, :, :, ::2], values), "caches"),
        ((q, k, v, None, None, lengths.repeat(2), keys, values), r"lengths is \[2\], expected \[1\]"),
        ((q, k, v, None, None, lengths, keys.transpose(2, 3).contiguous().transpose(2, 3), values), "k_cache has strides"),
    ]:
        with pytest.raises(ValueError, match=message):
            append(*wrong, log_scale=None, eps=EPS)


def test_shapes_and_what_is_written_are_what_torch_compile_is_told(device):
    (q, k, v), caches = inputs(device, 1, 2, 1, 8)
    arguments = (q, k, v, None, None, torch.zeros(1, dtype=torch.int32, device=device), *caches, None, None, 512.0, EPS)
    torch.library.opcheck(torch.ops.hydralens.decode_append.default, arguments, test_utils=("test_schema", "test_faketensor"))
