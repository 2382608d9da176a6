"""The engine on a GPU gives the CPU's numbers; skipped, with the reason, where there is none."""

import pytest
import torch

from hydralens.models.lens import wrap_model
from hydralens.patching.activation import MODES, activation_patch
from hydralens.patching.pairs import COMPONENTS
from hydralens.patching.restriction import restriction_effects
from tests.patching.test_activation import random_probe
from tests.tiny import FAMILIES, tiny_hf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_float32_on_the_gpu_equals_the_cpu(family, mode):
    probe = random_probe(n_pos=28)  # far enough for every kernel, near enough for four layers of Mistral's window of 6 to reach
    for component in COMPONENTS:
        cpu = activation_patch(wrap_model(tiny_hf(family)), probe, component, mode, "noise", "all")
        gpu = activation_patch(wrap_model(tiny_hf(family).cuda()), probe, component, mode, "noise", "all")
        span = (cpu.clean_metric - cpu.corrupt_metric)[:, None, None]
        torch.testing.assert_close(gpu.per_pair * span, cpu.per_pair * span, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_on_the_gpu_ranks_as_float32(family):
    probe = random_probe(n_pairs=3, n_pos=28)
    single, half = (
        activation_patch(wrap_model(tiny_hf(family).to("cuda", dtype)), probe, "z", "total", "noise", "all", min_span=0)
        for dtype in (torch.float32, torch.bfloat16)
    )
    span = (single.clean_metric - single.corrupt_metric)[:, None, None]
    half_span = (half.clean_metric - half.corrupt_metric)[:, None, None]
    raw = torch.stack([(single.per_pair * span).flatten(), (half.per_pair * half_span).flatten()])
    assert torch.corrcoef(raw)[0, 1] > 0.95


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_restriction_on_the_gpu_equals_the_cpu(family):
    probe = random_probe(n_pos=61)
    cpu, gpu = (restriction_effects(wrap_model(hf), probe, window=4, sinks=2) for hf in (tiny_hf(family), tiny_hf(family).cuda()))
    span = (cpu.clean_metric - cpu.corrupt_metric)[:, None, None]
    torch.testing.assert_close(gpu.per_pair * span, cpu.per_pair * span, atol=1e-4, rtol=1e-3)
