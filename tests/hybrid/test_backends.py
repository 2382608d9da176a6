import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.hybrid import backends
from hydralens.hybrid.backends import attend_causal, attention_backend, cannot_train, doctor_lines, fusion_backend, gdn_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = torch.bfloat16


@pytest.fixture
def installed(monkeypatch):
    """``installed("fla-core", "triton")``: these are there and nothing else that a backend asks for, on a Hopper GPU."""

    def pretend(*names, capability=(9, 0)):
        monkeypatch.setattr(backends, "_installed", lambda name: name in names)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    for variable in backends.WORDS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the kernels' own tests set it
    return pretend


def test_backend_follows_the_tensor_not_what_is_installed(installed):
    installed("fla-core", "triton", "flash-attn-4")
    assert gdn_backend(CPU) == "torch" and gdn_backend(CUDA) == "fla"
    assert fusion_backend(CPU) == fusion_backend(CUDA) == "torch" and fusion_backend(CUDA, "triton") == "triton"
    assert attention_backend(CPU, HALF, 64) == "torch" and attention_backend(CUDA, HALF, 64) == "fa4"
    assert gdn_backend(CPU, "torch") == gdn_backend(CUDA, "torch") == "torch"
    assert gdn_backend(torch.device("mps")) == gdn_backend(torch.device("meta")) == fusion_backend(torch.device("mps")) == "torch"


def test_a_gpu_without_fla_is_an_error_with_the_line_to_type(installed):
    for names in ((), ("fla-core",), ("triton",)):
        installed(*names)
        with pytest.raises(InputError, match='pip install "fla-core'):
            gdn_backend(CUDA)
    with pytest.raises(InputError, match="on cpu"):
        gdn_backend(CPU, "fla")


@pytest.mark.parametrize(
    ("names", "capability", "dtype", "head_dim", "chosen"),
    [
        (("flash-attn-4", "flash-attn"), (9, 0), HALF, 128, "fa4"),
        (("flash-attn",), (9, 0), torch.float16, 128, "fa2"),
        (("flash-attn-4", "flash-attn"), (8, 0), HALF, 128, "fa2"),
        (("flash-attn-4", "flash-attn"), (9, 0), HALF, 256, "fa2"),
        (("flash-attn-4",), (9, 0), HALF, 256, "torch"),
        (("flash-attn-4",), (9, 0), torch.float32, 128, "torch"),
        (("flash-attn-4",), (9, 0), HALF, 20, "torch"),
        (("flash-attn",), (7, 5), HALF, 64, "torch"),
        ((), (9, 0), HALF, 64, "torch"),
    ],
)
def test_attention_takes_the_newest_kernel_that_fits(installed, names, capability, dtype, head_dim, chosen):
    installed(*names, capability=capability)
    assert attention_backend(CUDA, dtype, head_dim) == chosen


def test_a_kernel_asked_for_by_name_says_what_hinders_it(installed):
    installed("flash-attn-4", "flash-attn", capability=(7, 5))
    for device, dtype, head_dim, name, reason in [
        (CPU, HALF, 64, "fa4", "the model is on cpu"),
        (CUDA, torch.float32, 64, "fa4", "in float32, not in half precision"),
        (CUDA, HALF, 256, "fa4", "multiples of 8 up to 128"),
        (CUDA, HALF, 64, "fa2", "compute capability 7, and flash-attn needs 8"),
    ]:
        with pytest.raises(InputError, match=reason):
            attention_backend(device, dtype, head_dim, name)
    installed()
    with pytest.raises(InputError, match="flash-attn-4 is not installed; use auto or torch"):
        attention_backend(CUDA, HALF, 64, "fa4")
    with pytest.raises(InputError, match="triton is not installed"):
        fusion_backend(CUDA, "triton")
    with pytest.raises(InputError, match="the model is on cpu"):
        fusion_backend(CPU, "triton")


def test_the_environment_wins(installed, monkeypatch):
    installed("triton")
    monkeypatch.setenv(backends.GDN, "torch")
    monkeypatch.setenv(backends.ATTENTION, "torch")
    monkeypatch.setenv(backends.FUSION, "torch")
    assert gdn_backend(CUDA, "fla") == attention_backend(CUDA, HALF, 64, "fa4") == fusion_backend(CUDA, "triton") == "torch"
    monkeypatch.setenv(backends.GDN, "tilelang")
    with pytest.raises(InputError, match="HYDRALENS_GDN 'tilelang' is not one of"):
        gdn_backend(CUDA)


@pytest.mark.parametrize(
    ("triton", "capability", "trains"),
    [("3.3.1", (9, 0), True), ("3.4.0", (9, 0), False), ("3.6.0", (9, 0), False), ("3.7.0", (9, 0), False), ("3.7.1", (9, 0), True), ("3.6.0", (8, 0), True)],
)
def test_training_on_hopper_depends_on_triton(triton, capability, trains):
    reason = cannot_train(triton, capability)
    assert (reason is None) == trains and (trains or f"Triton {triton}" in reason)


def test_doctor_says_what_runs(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor_lines()["linear heads"] == "torch, chunk by chunk: there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "version", lambda _: "3.6.0")
    installed()
    assert doctor_lines() == {
        "linear heads": backends.NEEDS_FLA,
        "full heads": "torch on cuda in half precision; not fa4: flash-attn-4 is not installed; not fa2: flash-attn is not installed",
        "fusion": "torch on cuda",
    }
    installed("fla-core", "triton", "flash-attn-4")
    assert doctor_lines()["linear heads"].startswith("fla on cuda; inference only: fla refuses the backward")
    monkeypatch.setattr(backends, "version", lambda _: "3.7.1")
    assert doctor_lines() == {
        "linear heads": "fla on cuda; trains too",
        "full heads": "fa4 on cuda in half precision; not fa2: flash-attn is not installed",
        "fusion": "torch on cuda",
    }


@settings(deadline=None, max_examples=30)
@given(batch=st.integers(1, 2), kv_heads=st.integers(1, 3), group=st.integers(1, 3), new=st.integers(1, 5), past=st.integers(0, 4))
def test_causal_attention_lets_the_last_query_see_the_last_key(batch, kv_heads, group, new, past):
    torch.manual_seed(0)
    q = torch.randn(batch, kv_heads * group, new, 8, dtype=torch.float64)
    k, v = (torch.randn(batch, kv_heads, past + new, 8, dtype=torch.float64) for _ in range(2))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(group, 1)) / 8**0.5
    scores += torch.full((new, past + new), -torch.inf).triu(past + 1)
    expected = torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v.repeat_interleave(group, 1))
    torch.testing.assert_close(attend_causal(q, k, v), expected)


def test_flash_attention_is_called_with_positions_before_heads_and_its_log_sum_exp_dropped(monkeypatch):
    seen = {}

    def dense(q, k, v, causal):
        seen.update(q=q, causal=causal)
        return q + 1, "log-sum-exp"

    monkeypatch.setattr(backends, "attention_backend", lambda *_: "fa4")
    monkeypatch.setattr(backends, "_flash", lambda name: (dense, None))
    q, kv = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    assert torch.equal(attend_causal(q, kv, kv), q.transpose(1, 2) + 1)
    assert seen["q"].shape == (1, 3, 4, 8) and seen["causal"]


def test_the_kernel_gets_one_dtype_under_autocast(monkeypatch):
    seen = {}

    def kernel(*, q, k, v, g, beta, **_):
        seen.update(q=q.dtype, k=k.dtype, v=v.dtype, g=g.dtype, beta=beta.dtype)
        return v, None

    monkeypatch.setattr(backends, "gdn_backend", lambda *_: "fla")
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", SimpleNamespace(chunk_gated_delta_rule=kernel))
    full, half, gates = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16), torch.zeros(1, 4, 2)
    with torch.no_grad():
        backends.delta_rule(full, full, half, gates, gates, initial_state=None, cu_seqlens=None, backend="auto")
    assert seen == {"q": torch.bfloat16, "k": torch.bfloat16, "v": torch.bfloat16, "g": torch.float32, "beta": torch.float32}
