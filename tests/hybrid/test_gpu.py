"""The hybrid on a GPU against the CPU's reference."""

import importlib.util

import pytest
import torch
from torch.nn import functional as F

from hydralens.hybrid import HybridCache
from hydralens.hybrid.backends import attend_packed, cannot_train, delta_rule
from hydralens.hybrid.recurrence import gated_delta_rule
from tests.hybrid.examples import random_tokens, tiny_hybrid
from tests.hybrid.test_recurrence import inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs fla-core"),
]


def relative(own: torch.Tensor, expected: torch.Tensor) -> float:
    return float((own.detach().float().cpu() - expected.detach().float().cpu()).norm() / expected.detach().float().norm())


def trains() -> bool:
    import triton

    return cannot_train(triton.__version__, torch.cuda.get_device_capability()) is None


@pytest.mark.parametrize("n_pos", [1, 63, 64, 200])
@pytest.mark.parametrize("width", [64, 128])
def test_flas_kernels_equal_the_reference(n_pos, width):
    own = inputs(batch=2, n_pos=n_pos, n_heads=3, d_k=width, d_v=width, decay=0.1, seed=n_pos, dtype=torch.float32)
    own = [*(x.bfloat16() for x in own[:3]), *own[3:]]
    state = torch.randn(2, 3, width, width) * 0.1
    expected, last = gated_delta_rule(*own, initial_state=state)
    with torch.no_grad():
        out, end = delta_rule(*(x.cuda() for x in own), initial_state=state.cuda(), cu_seqlens=None, backend="fla")
    assert relative(out, expected) < 1e-2 and relative(end, last) < 1e-2 and end.dtype == torch.float32


def test_gradients_of_flas_kernel_equal_the_references():
    if not trains():
        pytest.skip("fla refuses this backward with this Triton on Hopper")
    own = inputs(batch=1, n_pos=130, n_heads=2, d_k=64, d_v=64, decay=0.1, dtype=torch.float32)
    grads = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in own]
        cast = [*(x.bfloat16() for x in leaves[:3]), *leaves[3:]]
        out, _ = delta_rule(*cast, initial_state=None, cu_seqlens=None, backend="torch" if device == "cpu" else "fla")
        grads.append(torch.autograd.grad((out.float() ** 2).sum(), leaves))
    assert all(relative(ours, theirs) < 2e-2 for theirs, ours in zip(*grads, strict=True))


@torch.no_grad()
def test_a_hybrid_on_the_gpu_equals_the_one_on_the_cpu():
    hybrid, _ = tiny_hybrid("qwen3", linear_conv=4)
    tokens = random_tokens(2, 70)
    expected = hybrid(tokens).logits
    torch.backends.cuda.matmul.allow_tf32 = False
    hybrid.cuda()
    assert relative(hybrid(tokens.cuda()).logits, expected) < 1e-2
    cache = HybridCache(4)
    steps = [hybrid(tokens[:, :60].cuda(), cache=cache).logits, *(hybrid(tokens[:, t : t + 1].cuda(), cache=cache).logits for t in range(60, 70))]
    assert relative(torch.cat(steps, 1), expected) < 1e-2


def test_packed_documents_run_on_flash_attention_and_equal_the_reference():
    q, k, v = (torch.randn(1, 3, 200, 64, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(3))
    documents = torch.tensor([0, 1, 65, 200])
    expected = [F.scaled_dot_product_attention(*(x[:, :, a:b].float() for x in (q, k, v)), is_causal=True) for a, b in ((0, 1), (1, 65), (65, 200))]
    out = attend_packed(q.cuda(), k.cuda(), v.cuda(), documents.cuda(), scale=0.125)
    assert out.shape == (1, 200, 3, 64) and relative(out, torch.cat(expected, 2).transpose(1, 2)) < 1e-2
