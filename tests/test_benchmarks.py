"""The benchmarks without the embedded model and without a GPU: tiny models and small shapes in their place; the peer only where a test compares with it."""

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
from hydralens.bench import BENCHMARKS, gpu, kernels, layer, report, run, sweeps  # noqa: E402
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


# --- hydralens bench ---

TABLES = {
    "kernels": 6,
    "layer": 4,
    "decode": 1,
    "sweeps": 1,
    "transfer": 2,
}


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_measures_small_shapes_on_a_cpu(name, on_cpu, tmp_path, capsys):
    run(name, tmp_path, small=True)
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(found["tables"]) == TABLES[name] and found["machine"]["torch"] == torch.__version__
    text, printed = (tmp_path / f"{name}.md").read_text(), capsys.readouterr().out
    for title, rows in found["tables"].items():
        assert f"### {title}\n" in text and title in printed
        assert rows and len({tuple(row) for row in rows}) == 1
        for key in rows[0]:  # values are compared wherever something of ours ran, and times are times
            numbers = [row[key] for row in rows if row[key] is not None]
            assert not key.startswith("error") or all(number < 1e-4 for number in numbers)
            assert key.split()[-1] not in ("ms", "tokens/s", "s") or all(number > 0 for number in numbers)
    if name == "kernels":
        assert sum("needs a GPU" in note for note in found["notes"]) == 4


def test_a_full_benchmark_needs_a_gpu(on_cpu, tmp_path):
    with pytest.raises(InputError, match="benchmark layer needs an NVIDIA GPU, and torch sees none; --small"):
        run("layer", tmp_path)
    with pytest.raises(InputError, match="benchmark 'speed' is not one of kernels, layer"):
        run("speed", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_killed_run_leaves_what_it_measured(on_cpu, tmp_path, capsys):
    own = report.Report("made", tmp_path, small=True)
    own.row("one", shape="2 x 3", ms=0.12345, error=None)
    own.row("two", ms=12345.6)
    own.note("left out")
    own.row("one", shape="4", ms=1.0, error=2e-7)
    assert json.loads((tmp_path / "made.json").read_text())["tables"]["one"][0] == {"shape": "2 x 3", "ms": 0.12345, "error": None}
    text = (tmp_path / "made.md").read_text()
    assert "left out\n\n### one\n\n| shape | ms | error |\n| --- | --- | --- |\n| 2 x 3 | 0.123 |  |\n| 4 | 1 | 2e-07 |\n\n### two" in text
    assert capsys.readouterr().out.count("| shape ") == 2  # a table that goes on after another gets its header again


def test_a_wrong_kernel_is_not_timed(on_cpu):
    own = report.Report("made", None, small=True)
    for error in (0.5, float("nan")):
        kernels.compare(own, "kernel", "2 x 3", 8, 1e9, error, lambda: 1 / 0, {})
    assert own.result["tables"] == {} and own.result["notes"][0] == "kernel, 2 x 3: relative error 0.5, so it is not timed"


def test_the_crossover_is_read_off_between_two_lengths():
    lengths = (1024, 4096, 16384)
    assert layer.crossover(lengths, (0.5, 2.0, 8.0)) == pytest.approx(2048)
    assert layer.crossover(lengths, (0.25, 0.5, 1.0)) == pytest.approx(16384)
    assert layer.crossover(lengths, (0.5, 0.6, 0.7)) is None
    assert layer.crossover(lengths, (2.0, 3.0, 4.0)) is None


def test_operations_and_bytes_are_counted_by_hand():
    assert layer.softmax_flops(8, 2, 16) == 2 * 2 * (8 * 8 / 2) * 2 * 16
    assert layer.delta_flops(32768, 14, 128) == 327_680 * 32768 * 14
    assert gpu.n_bytes(torch.zeros(3, 5), None, torch.zeros(4, dtype=torch.bfloat16)) == 68


def test_the_mask_keeps_the_heads_of_a_layer_in_one_group():
    full = gpu.spread_mask(28, 16)
    assert full.sum() == 56 and full[:, :2].all()
    assert gpu.spread_mask(30, 9).sum() == 34


def test_a_relative_error_that_is_not_a_number_stays_so():
    good, bad = torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])
    assert gpu.relative(1.5 * good, good) == 0.5
    assert gpu.relative((good, bad), (good, good)) != gpu.relative((good, bad), (good, good))


def test_the_fusion_in_torch_is_the_models_own(on_cpu):
    """Reference: the hybrid's attention module, whose fusion and gates the benchmark writes down again."""
    from hydralens.hybrid import build_hybrid

    own = report.Report("made", None, small=True)
    hybrid = build_hybrid(gpu.random_model(gpu.qwen3(True), own), gpu.spread_mask(2, 16)).eval()
    attention = hybrid.model.layers[0].self_attn
    torch.nn.init.normal_(attention.branches["full"].gate.weight)
    x, full, linear = torch.randn(1, 5, 64), torch.randn(1, 5, 2, 16), torch.randn(1, 5, 14, 16)
    place = torch.tensor(attention.place, dtype=torch.int32)
    gate = attention.branches["full"].gate(x)[..., None]
    expected = attention.fuse(torch.cat([full, linear], 2)[:, :, attention.place], x)
    torch.testing.assert_close(kernels.fuse_in_torch(full, linear, place, attention.fusion.gamma, gate), expected, atol=1e-5, rtol=1e-5)


def test_patched_metrics_of_the_sweeps_reference_move(on_cpu):
    from hydralens.models.lens import wrap_model

    own = report.Report("made", None, small=True)
    model = wrap_model(gpu.random_model(gpu.qwen3(True), own))
    probe = sweeps.random_pair(32, 512)
    metrics = {sweeps.patched_metric(model, probe, layer, 3) for layer in (0, 1)}
    assert len(metrics) == 2
