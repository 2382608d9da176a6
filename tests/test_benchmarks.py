"""The benchmarks without the embedded model: tiny models in its place; the peer only where a test compares with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(FOLDER))  # as for a script: its folder is where ``common`` is found

from benchmarks import patching as bench  # noqa: E402
from benchmarks import path_patching as paths  # noqa: E402
from hydralens.errors import InputError  # noqa: E402
from hydralens.models.adapters import to_transformer_lens  # noqa: E402
from hydralens.patching.pairs import unpad  # noqa: E402
from hydralens.patching.path import path_patch  # noqa: E402


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


@pytest.mark.parametrize("case", paths.CASES, ids=lambda case: case.positions)
def test_two_forwards_a_sender_in_the_peers_hooks_give_our_values(tiny, case):
    pytest.importorskip("transformer_lens")
    model, probe, pair = tiny
    receivers, senders = [(1, 3), (3, 0), (3, 6)], [(0, 1), (1, 3), (2, 7)]
    _, effects = paths.ours(model, probe, receivers, case)
    peer = paths.peer_loop(to_transformer_lens(model), pair, receivers, case.positions, senders)
    values = bench.patched_metric(effects)
    torch.testing.assert_close(peer.values, values[paths.at(senders)], atol=1e-4, rtol=0)
    assert (peer.values - effects.clean_metric).abs().max() > 1e-3  # the patches did something
    assert len(peer.sender_seconds) == 3 and min(peer.sender_seconds) > 0


def test_a_peers_time_is_scaled_to_all_senders():
    assert paths.PeerLoop(torch.zeros(2), [3.0, 5.0], preparation_seconds=1.0).seconds(261) == 1045


def test_the_sample_runs_from_the_strongest_sender_to_the_weak_ones():
    effects = torch.tensor([[0.1, -0.5, 0.2], [0.0, 0.3, -0.4], [torch.nan] * 3])  # heads of the last layer have no receiver after them
    assert paths.sampled(effects, 3) == [(0, 1), (1, 1), (0, 0)]
    assert paths.sampled(effects, 100) == [(0, 1), (1, 2), (1, 1), (0, 2), (0, 0), (1, 0)]


def test_path_patching_is_compared_and_written_down(tiny, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformer_lens")
    model, probe, _ = tiny
    monkeypatch.setattr(paths, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(paths, "one_pair", lambda *_: probe)
    monkeypatch.setattr(paths, "boot_peer", lambda: to_transformer_lens(model))
    paths.main(["--senders", "2", "--out", str(tmp_path / "numbers.json")])
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    receivers = [tuple(head) for head in numbers["receivers"]]
    last = max(layer for layer, _ in receivers)
    assert len(set(receivers)) == 12 and min(receivers)[0] > 0
    for row, case in zip(numbers["cases"], paths.CASES, strict=True):
        assert row["senders_with_a_later_receiver"] == last * 8 and len(row["peer_senders"]) == 2
        assert row["max_abs_difference"] < 1e-4 < row["values_range"]
        effects = path_patch(model, probe, receivers, positions=case.positions).per_pair[0]
        assert effects[tuple(row["peer_senders"][0])].abs() == effects[effects.isfinite()].abs().max()
    edge = numbers["edges"]
    assert edge["compared"] and edge["max_abs_difference"] < 1e-4 < edge["values_range"]
    printed = capsys.readouterr().out
    assert f"32 senders, of which {last * 8} have a receiver in a later layer; one pair of 96 tokens" in printed
    assert f"{len(edge['compared'])} edges: max abs difference {edge['max_abs_difference']:.1e}" in printed


@pytest.mark.parametrize(
    ("benchmark", "arguments", "message"),
    [
        (bench, ["--layers", "a"], "--layers 'a' is not a list"),
        (bench, [], "TransformerLens, is not installed; run: pip install -e '.\\[lens\\]'"),
        (paths, ["--senders", "0"], "--senders 0: the peer needs at least one sender"),
        (paths, [], "TransformerLens, is not installed; run: pip install -e '.\\[lens\\]'"),
    ],
)
def test_wrong_input_is_one_line(monkeypatch, benchmark, arguments, message):
    monkeypatch.setitem(sys.modules, "transformer_lens", None)
    with pytest.raises(InputError, match=message):
        benchmark.main(arguments)


def test_a_script_refuses_wrong_input_with_exit_code_2():
    done = subprocess.run([sys.executable, str(FOLDER / "path_patching.py"), "--senders", "0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "path patching benchmark: --senders 0: the peer needs at least one sender\n"


def test_a_table_is_markdown():
    assert bench.table(("a", "bb"), [("ccc", "d")]) == "| a   | bb |\n| --- | -- |\n| ccc | d  |"
