"""The engine on a GPU gives the CPU's numbers; skipped, with the reason, where there is none."""

import pytest
import torch

from hydralens.models.lens import wrap_model
from hydralens.patching.activation import MODES, activation_patch
from hydralens.patching.attribution import METHODS, attribution_patch
from hydralens.patching.pairs import COMPONENTS
from hydralens.patching.path import SECOND_PASSES, path_patch
from hydralens.patching.restriction import restriction_effects
from tests.patching.examples import random_probe
from tests.tiny import FAMILIES, tiny_hf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


PROBE = random_probe(n_pos=28)  # far enough for every kernel, near enough for four layers of Mistral's window of 6 to reach


def same_on_both(family, measure, atol):
    """``measure(model)`` on either device, compared in units of the metric."""
    cpu, gpu = (measure(wrap_model(hf)) for hf in (tiny_hf(family), tiny_hf(family).cuda()))
    span = (cpu.clean_metric - cpu.corrupt_metric)[:, None, None]
    torch.testing.assert_close(gpu.per_pair * span, cpu.per_pair * span, atol=atol, rtol=1e-3, equal_nan=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_float32_on_the_gpu_equals_the_cpu(family, mode):
    for component in COMPONENTS:
        same_on_both(family, lambda model, component=component: activation_patch(model, PROBE, component, mode, "noise", "all"), atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("second_pass", SECOND_PASSES)
@pytest.mark.parametrize(("receiver_input", "receivers"), [("q", [(1, 0), (3, 1), (3, 3)]), ("v", [(1, 1), (3, 0)])])
def test_path_patching_on_the_gpu_equals_the_cpu(family, second_pass, receiver_input, receivers):
    for positions in ("needle", "all"):
        settings = {"second_pass": second_pass, "positions": positions}
        same_on_both(family, lambda model, settings=settings: path_patch(model, PROBE, receivers, receiver_input, **settings), atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_attribution_on_the_gpu_equals_the_cpu(family, method):
    for component in COMPONENTS:
        same_on_both(family, lambda model, component=component: attribution_patch(model, PROBE, component, method), atol=2e-4)


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
    same_on_both(family, lambda model: restriction_effects(model, random_probe(n_pos=61), window=4, sinks=2), atol=1e-4)
