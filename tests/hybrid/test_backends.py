import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from hydralens.errors import InputError
from hydralens.hybrid import backends
from hydralens.hybrid.backends import cannot_train, doctor_line, gdn_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def installed(monkeypatch):
    """``installed("fla", "triton")``: these can be imported and nothing else that a backend asks for."""

    def pretend(*names):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in names else None)

    monkeypatch.delenv(backends.VARIABLE, raising=False)
    return pretend


def test_backend_follows_the_tensor_not_what_is_installed(installed):
    installed("fla", "triton")
    assert gdn_backend(CPU) == "torch" and gdn_backend(CUDA) == "fla"
    assert gdn_backend(CPU, "torch") == gdn_backend(CUDA, "torch") == "torch"
    assert gdn_backend(torch.device("mps")) == gdn_backend(torch.device("meta")) == "torch"


def test_a_gpu_without_fla_is_an_error_with_the_line_to_type(installed):
    for names in ((), ("fla",), ("triton",)):
        installed(*names)
        with pytest.raises(InputError, match='pip install "fla-core'):
            gdn_backend(CUDA)
    with pytest.raises(InputError, match="on cpu"):
        gdn_backend(CPU, "fla")


def test_the_environment_wins(installed, monkeypatch):
    installed()
    monkeypatch.setenv(backends.VARIABLE, "torch")
    assert gdn_backend(CUDA, "fla") == "torch"
    monkeypatch.setenv(backends.VARIABLE, "tilelang")
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
    assert doctor_line() == "torch, chunk by chunk: there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(backends, "version", lambda _: "3.6.0")
    installed()
    assert doctor_line() == backends.NEEDS_FLA
    installed("fla", "triton")
    assert doctor_line().startswith("fla on cuda; inference only: fla refuses the backward")
    monkeypatch.setattr(backends, "version", lambda _: "3.7.1")
    assert doctor_line() == "fla on cuda; trains too"


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
