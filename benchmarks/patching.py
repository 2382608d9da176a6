"""Activation patching of all heads: this project, TransformerLens' own sweep and the limit, on one pair, in one run.

    python benchmarks/patching.py [--layers 0,15,29] [--tokens 512] [--out FILE.json] [--skip-memory]

Values are compared before times. ``benchmarks/README.md`` says what is measured; the last run is in ``benchmarks/RESULTS.md``.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from common import boot_peer, lead, machine, machine_text, median_seconds, one_pair, patched_metric, plain_forwards, require_peer, say, table
from jaxtyping import Float
from torch import Tensor

from hydralens.errors import InputError
from hydralens.files import write_json
from hydralens.models.lens import LensModel, wrap_model
from hydralens.models.loading import load_model
from hydralens.patching.activation import activation_patch
from hydralens.patching.pairs import Pair, unpad
from hydralens.probes.base import Probe

MIB = 2**20
GROWTH_LENGTHS = (4096, 8192, 16384)


@dataclass(frozen=True)
class Sweep:
    """One way of patching z of every head, and how many times faster than the peer it has to be."""

    mode: str
    positions: str
    direction: str
    repeats: int
    target: float

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.positions}"


SWEEPS = (
    Sweep("direct", "answer", "noise", repeats=3, target=100),
    Sweep("total", "answer", "denoise", repeats=3, target=60),
    Sweep("total", "suffix", "denoise", repeats=1, target=4),
)


@dataclass(frozen=True, eq=False)
class PeerSweep:
    """What the peer gave for the sampled layers: the metric of every patched run, and seconds."""

    values: Float[Tensor, "sampled head"]
    layer_seconds: list[float]
    preparation_seconds: float

    def seconds(self, n_layers: int) -> float:
        """For all layers: a cell is one full forward of the prompt, whichever layer is patched."""
        return self.preparation_seconds + statistics.mean(self.layer_seconds) * n_layers


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    require_peer()
    measured_on = machine()
    model = load_model("embedded", device="cpu", dtype="float32")
    n_layers = model.info.n_layers
    for layer in options.layers:
        if not 0 <= layer < n_layers:
            raise InputError(f"--layers: {model.info.id} has layers 0..{n_layers - 1}, not {layer}")
    probe = one_pair(model, options.tokens)
    pair = unpad(probe, 0, model.device)

    say("limit: two plain forwards")
    two_forwards = median_seconds(lambda: plain_forwards(model, pair), 3)
    bridge = boot_peer()
    rows = []
    for sweep in SWEEPS:
        say(f"ours: {sweep.name}")
        ours_seconds, values = ours(model, probe, sweep)
        say(f"peer: {sweep.name}, {_layers(options.layers)}")
        peer = peer_sweep(bridge, pair, sweep, options.layers)
        peer_seconds, limit = peer.seconds(n_layers), two_forwards * unavoidable(model, pair, sweep) / 2
        rows.append(
            {
                "sweep": sweep.name,
                "direction": sweep.direction,
                "ours_seconds": ours_seconds,
                "peer_seconds": peer_seconds,
                "times_faster": peer_seconds / ours_seconds,
                "target": sweep.target,
                "met": peer_seconds / ours_seconds >= sweep.target,
                "limit_seconds": limit,
                "times_limit": ours_seconds / limit,
                "max_abs_difference": float((values[options.layers] - peer.values).abs().max()),
                "values_range": float(peer.values.max() - peer.values.min()),
                "peer_layer_seconds": peer.layer_seconds,
                "peer_preparation_seconds": peer.preparation_seconds,
            }
        )
    effects = activation_patch(model, probe)
    result = {
        "model": model.info.id,
        "heads": n_layers * model.info.n_heads,
        "tokens": len(pair.clean),
        "first_difference": pair.first_difference,
        "read_positions": len(pair.read),
        "seed": probe.seed,
        "clean_metric": float(effects.clean_metric[0]),
        "corrupt_metric": float(effects.corrupt_metric[0]),
        "peer_layers": options.layers,
        "two_forwards_seconds": two_forwards,
        "sweeps": rows,
        "memory": [] if options.skip_memory else peak_memory(probe, pair, options.layers[0]),
        "growth": [] if options.skip_memory else memory_growth(GROWTH_LENGTHS),
        "machine": measured_on,
    }
    print(as_text(result))
    print(f"\n{write_json(options.out, result)}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Activation patching of all heads of the embedded model: ours, TransformerLens and the limit.")
    parser.add_argument("--layers", default="0,15,29", help="layers whose heads the peer patches; its time is scaled to all layers (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="length of the prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"), help="the numbers as JSON (default: beside this file)")
    parser.add_argument("--skip-memory", action="store_true", help="no memory figures (they need Linux)")
    options = parser.parse_args(arguments)
    try:
        options.layers = [int(layer) for layer in options.layers.split(",")]
    except ValueError:
        raise InputError(f"--layers {options.layers!r} is not a list of layer numbers such as 0,15,29") from None
    return options


# Ours and the limit


def ours(model: LensModel, probe: Probe, sweep: Sweep) -> tuple[float, Float[Tensor, "layer head"]]:
    """Median seconds of the sweep, everything included, and the metric of every patched run."""
    effects = None

    def run() -> None:
        nonlocal effects
        effects = activation_patch(model, probe, "z", sweep.mode, sweep.direction, sweep.positions)

    seconds = median_seconds(run, sweep.repeats)
    return seconds, patched_metric(effects)


def unavoidable(model: LensModel, pair: Pair, sweep: Sweep) -> float:
    """Work that no exact sweep can leave out, in plain forwards: two, and for changes at all later positions every cell's later layers and positions."""
    if sweep.positions != "suffix":
        return 2
    share = (len(pair.clean) - pair.first_difference) / len(pair.clean)
    return 2 + model.info.n_heads * (model.info.n_layers - 1) / 2 * share


# The peer


@torch.no_grad()
def peer_sweep(bridge: Any, pair: Pair, sweep: Sweep, layers: list[int]) -> PeerSweep:
    """TransformerLens' own sweep of z (``get_act_patch_attn_head_out_all_pos``) over all heads of some layers.

    Patching at the answer only, or with later attention frozen, is the same sweep with another setter or with hooks around it: the peer has no
    shorter way, one cell stays one full forward.
    """
    from transformer_lens.patching import get_act_patch_attn_head_out_all_pos, layer_head_vector_patch_setter

    def at_the_answer(z: Tensor, index: list[int], source_z: Tensor) -> Tensor:
        z[:, pair.read, index[1]] = source_z[:, pair.read, index[1]]
        return z

    def frozen(layer: int) -> tuple[str, Callable[..., Tensor]]:
        name = f"blocks.{layer}.attn.hook_out"
        return name, lambda out, hook: written[name]

    base, source = (pair.clean, pair.corrupt) if sweep.direction == "noise" else (pair.corrupt, pair.clean)
    bridge(base[None])  # does not count
    start = time.perf_counter()
    _, cache = bridge.run_with_cache(source[None], names_filter=lambda name: name.endswith("hook_z"))
    if sweep.mode == "direct":
        _, written = bridge.run_with_cache(base[None], names_filter=lambda name: name.endswith("attn.hook_out"))
    preparation = time.perf_counter() - start

    values, seconds = [], []
    for layer in layers:
        cells = pd.DataFrame({"layer": layer, "head": range(bridge.cfg.n_heads)})
        later = range(layer + 1, bridge.cfg.n_layers)
        start = time.perf_counter()
        with bridge.hooks(fwd_hooks=[frozen(index) for index in later]) if sweep.mode == "direct" else nullcontext():
            row = get_act_patch_attn_head_out_all_pos(
                bridge,
                base[None],
                cache,
                lambda logits: lead(logits, pair),
                patch_setter=layer_head_vector_patch_setter if sweep.positions == "suffix" else at_the_answer,
                index_axis_names=None,
                index_df=cells,
            )
        seconds.append(time.perf_counter() - start)
        values.append(row)
    return PeerSweep(torch.stack(values), seconds, preparation)


# Memory, each figure from a process of its own


def peak_memory(probe: Probe, pair: Pair, layer: int) -> list[dict[str, Any]]:
    """Resident memory in MiB of each side's sweeps: with the model loaded, and at its peak. The peer patches one layer: every cell is the same forward."""
    rows = []
    for sweep in SWEEPS:
        for side, measure, given in (("ours", _ours_memory, (probe,)), ("peer", _peer_memory, (pair, layer))):
            say(f"memory: {side}, {sweep.name}")
            loaded, peak = in_own_process(measure, sweep, *given)
            rows.append({"sweep": sweep.name, "side": side, "loaded_mib": loaded / MIB, "peak_mib": peak / MIB})
    return rows


def _ours_memory(sweep: Sweep, probe: Probe) -> tuple[int, int]:
    model = load_model("embedded", device="cpu", dtype="float32")
    loaded = resident("VmRSS")
    activation_patch(model, probe, "z", sweep.mode, sweep.direction, sweep.positions)
    return loaded, resident("VmHWM")


@torch.no_grad()
def _peer_memory(sweep: Sweep, pair: Pair, layer: int) -> tuple[int, int]:
    bridge = boot_peer()
    bridge(pair.clean[None, :16])  # weights are read from the disk when they are first used; opening ours includes a run of 16 tokens
    loaded = resident("VmRSS")
    peer_sweep(bridge, pair, sweep, [layer])
    return loaded, resident("VmHWM")


def memory_growth(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Peak memory in MiB of sweeps over a tiny random Llama (4 layers, 8 heads, 2 KV heads, d_model 128) as the context doubles."""
    rows = []
    for mode in ("direct", "total"):
        before = None
        for n_tokens in lengths:
            say(f"memory: {mode}, answer, {n_tokens} tokens")
            mib = in_own_process(growth, mode, n_tokens) / MIB
            rows.append({"sweep": f"{mode}, answer", "tokens": n_tokens, "mib": mib, "times_shorter": mib / before if before else None})
            before = mib
    return rows


def growth(mode: str, n_tokens: int) -> int:
    """Bytes that a sweep at ``n_tokens`` adds at its peak to a process that has just done one at 64 tokens."""
    model = tiny_llama(n_tokens)
    activation_patch(model, random_pair(64), "z", mode, "noise", "answer")
    before = resident("VmRSS")
    activation_patch(model, random_pair(n_tokens), "z", mode, "noise", "answer")
    return resident("VmHWM") - before


def tiny_llama(n_tokens: int) -> LensModel:
    """Random weights, for prompts up to ``n_tokens``."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=n_tokens,
        initializer_range=0.2,
    )
    return wrap_model(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval())


def random_pair(n_tokens: int, n_answer: int = 4) -> Probe:
    """Random tokens that differ in three places from the middle on."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(256, (1, n_tokens), generator=generator)
    corrupt, middle = clean.clone(), n_tokens // 2
    corrupt[:, middle : middle + 3] = (clean[:, middle : middle + 3] + 1) % 256
    answer = torch.randint(256, (1, n_answer), generator=generator)
    read = torch.arange(n_tokens - n_answer, n_tokens)[None]
    span = torch.tensor([[middle, middle + 3]])
    return Probe("random", "retrieval", "value", 0, clean, corrupt, torch.ones_like(clean), answer, (answer + 1) % 256, read, span)


def in_own_process(function: Callable, *arguments: Any) -> Any:
    """``function(*arguments)`` in a fresh interpreter."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def resident(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process in bytes; ru_maxrss would count the parent's memory too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


# What is printed


def as_text(result: dict[str, Any]) -> str:
    """Markdown that reads well in a terminal too."""
    parts = [
        f"{result['model']}, {result['heads']} heads, z; one pair of {result['tokens']} tokens, first difference at {result['first_difference']}, "
        f"{result['read_positions']} answer tokens; metric {result['clean_metric']:.3f} clean, {result['corrupt_metric']:.3f} corrupt\n"
        f"{machine_text(result['machine'])}\n"
        f"The peer patches all heads of {_layers(result['peer_layers'])}: its seconds are scaled to all layers, values are compared on these heads.",
        table(
            ("sweep", "ours s", "peer s", "peer / ours", "target", "", "limit s", "ours / limit", "max abs difference", "range of values"),
            [
                (
                    f"{row['sweep']} ({row['direction']})",
                    f"{row['ours_seconds']:.2f}",
                    f"{row['peer_seconds']:.1f}",
                    f"{row['times_faster']:.1f}",
                    f"{row['target']:g}",
                    "met" if row["met"] else "missed",
                    f"{row['limit_seconds']:.2f}",
                    f"{row['times_limit']:.2f}",
                    f"{row['max_abs_difference']:.1e}",
                    f"{row['values_range']:.2f}",
                )
                for row in result["sweeps"]
            ],
        ),
    ]
    if result["memory"]:
        header = ("sweep", "side", "model loaded MiB", "peak RSS MiB")
        parts.append(table(header, [(r["sweep"], r["side"], f"{r['loaded_mib']:.0f}", f"{r['peak_mib']:.0f}") for r in result["memory"]]))
    if result["growth"]:
        header = ("tiny random model", "tokens", "peak over a 64-token sweep MiB", "times the shorter")
        times = [f"{r['times_shorter']:.2f}" if r["times_shorter"] else "" for r in result["growth"]]
        parts.append(table(header, [(r["sweep"], str(r["tokens"]), f"{r['mib']:.1f}", x) for r, x in zip(result["growth"], times, strict=True)]))
    return "\n\n".join(parts)


def _layers(layers: Sequence[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"patching benchmark: {error}", file=sys.stderr)
        sys.exit(2)
