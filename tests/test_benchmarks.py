"""The parts of the benchmarks that need neither the peer nor the embedded model."""

import sys

import pytest
import torch

from benchmarks import patching as bench
from hydralens.errors import InputError
from hydralens.patching.pairs import unpad


@pytest.fixture(scope="module")
def tiny():
    model, probe = bench.tiny_llama(128), bench.random_pair(96)
    return model, probe, unpad(probe, 0, torch.device("cpu"))


@pytest.mark.parametrize("sweep", bench.SWEEPS, ids=lambda sweep: sweep.name)
def test_our_values_are_the_peers_metric_of_patched_runs(tiny, sweep):
    """Reference: one head's z replaced by a plain hook, and the metric that the peer is given."""
    model, probe, pair = tiny
    _, values = bench.ours(model, probe, sweep)
    base, source = (pair.clean, pair.corrupt) if sweep.direction == "noise" else (pair.corrupt, pair.clean)
    layer, head, d_head = 3, 5, model.info.head_dim  # the last layer, after which direct and total effects are the same
    columns = pair.read if sweep.positions == "answer" else slice(None)
    projection, kept = model.hf.model.layers[layer].self_attn.o_proj, []

    def replace(module, args):
        z = args[0].clone()
        z[:, columns, head * d_head : (head + 1) * d_head] = kept[0][:, columns, head * d_head : (head + 1) * d_head]
        return (z,)

    with torch.no_grad():
        handle = projection.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        model.hf(input_ids=source[None])
        handle.remove()
        handle = projection.register_forward_pre_hook(replace)
        patched = model.hf(input_ids=base[None]).logits
        handle.remove()
        unpatched = model.hf(input_ids=base[None]).logits
    assert float(values[layer, head]) == pytest.approx(float(bench.lead(patched, pair)), abs=1e-4)
    assert abs(float(bench.lead(patched, pair) - bench.lead(unpatched, pair))) > 1e-2  # the patch did something


def test_the_limit_counts_the_positions_after_the_first_difference(tiny):
    model, _, pair = tiny
    direct, answer, suffix = (bench.unavoidable(model, pair, sweep) for sweep in bench.SWEEPS)
    assert direct == answer == 2
    assert suffix == 2 + 8 * (0 + 1 + 2 + 3) / 4 / 2  # 8 heads; 0 to 3 of 4 layers after the patched one; half the positions
    assert bench.median_seconds(lambda: bench.plain_forwards(model, pair), 2) > 0


def test_memory_of_a_sweep_is_measured_in_its_own_process():
    short, long = (bench.in_own_process(bench.growth, "direct", n_tokens) for n_tokens in (1024, 4096))
    assert 0 < short < long < 2**29


def test_a_peers_time_is_scaled_to_all_layers():
    assert bench.PeerSweep(torch.zeros(2, 9), [3.0, 5.0], preparation_seconds=1.0).seconds(30) == 121


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--layers", "a"], "--layers 'a' is not a list"), ([], "TransformerLens, is not installed; run: pip install -e '.\\[lens\\]'")]
)
def test_wrong_input_is_one_line(monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "transformer_lens", None)
    with pytest.raises(InputError, match=message):
        bench.main(arguments)


def test_a_table_is_markdown():
    assert bench.table(("a", "bb"), [("ccc", "d")]) == "| a   | bb |\n| --- | -- |\n| ccc | d  |"
