"""Path patching of all heads to the queries of a set of receivers: this project, a loop of two forwards a sender in TransformerLens, and the limit.

    python benchmarks/path_patching.py [--tokens 512] [--senders 9] [--out FILE.json]

Values are compared before times. ``benchmarks/README.md`` says what is measured; the last run is in ``benchmarks/RESULTS.md``.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import boot_peer, lead, machine, machine_text, median_seconds, one_pair, patched_metric, plain_forwards, require_peer, say, table
from jaxtyping import Float
from torch import Tensor

from hydralens.errors import InputError
from hydralens.files import write_json
from hydralens.models.lens import LensModel
from hydralens.models.loading import load_model
from hydralens.patching.activation import activation_patch
from hydralens.patching.effects import HeadEffects
from hydralens.patching.pairs import Pair, unpad
from hydralens.patching.path import edge_maps, path_patch
from hydralens.probes.base import Probe

Head = tuple[int, int]  # (layer, head)

N_RECEIVERS = 12
LARGEST_DIFFERENCE = 1e-4  # in logits
EDGE_TOKENS, EDGE_RECEIVERS = 96, 3  # the peer's own sweep of edges costs a forward per later head, so it gets a short pair


@dataclass(frozen=True)
class Case:
    """Where the senders and the receivers' queries are patched, and how many times faster than the peer this has to be (None: no target)."""

    positions: str
    repeats: int
    target: float | None


CASES = (Case("answer", repeats=3, target=30), Case("all", repeats=1, target=None))


@dataclass(frozen=True, eq=False)
class PeerLoop:
    """What the peer gave for the sampled senders: the metric of every patched run, and seconds."""

    values: Float[Tensor, "sender"]
    sender_seconds: list[float]
    preparation_seconds: float

    def seconds(self, n_senders: int) -> float:
        """For all senders: each is two full forwards of the prompt, wherever it lies."""
        return self.preparation_seconds + statistics.mean(self.sender_seconds) * n_senders


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    require_peer()
    measured_on = machine()
    model = load_model("embedded", device="cpu", dtype="float32")
    probe = one_pair(model, options.tokens)
    pair = unpad(probe, 0, model.device)
    receivers = best_heads(model, probe, N_RECEIVERS)

    say("limit: two plain forwards")
    limit = median_seconds(lambda: plain_forwards(model, pair), 3)
    bridge = boot_peer()
    rows = []
    for case in CASES:
        say(f"ours: {case.positions}")
        ours_seconds, effects = ours(model, probe, receivers, case)
        values, senders = patched_metric(effects), sampled(effects.per_pair[0], options.senders)
        say(f"peer: {case.positions}, {len(senders)} senders")
        peer = peer_loop(bridge, pair, receivers, case.positions, senders)
        n_senders = int(values.isfinite().sum())
        peer_seconds = peer.seconds(n_senders)
        rows.append(
            {
                "positions": case.positions,
                "senders_with_a_later_receiver": n_senders,
                "ours_seconds": ours_seconds,
                "peer_seconds": peer_seconds,
                "times_faster": peer_seconds / ours_seconds,
                "target": case.target,
                "met": None if case.target is None else peer_seconds / ours_seconds >= case.target,
                "limit_seconds": limit,
                "times_limit": ours_seconds / limit,
                "max_abs_difference": float((values[at(senders)] - peer.values).abs().max()),
                "values_range": float(peer.values.max() - peer.values.min()),
                "peer_senders": senders,
                "peer_sender_seconds": peer.sender_seconds,
                "peer_preparation_seconds": peer.preparation_seconds,
            }
        )
    result = {
        "model": model.info.id,
        "heads": model.info.n_layers * model.info.n_heads,
        "tokens": len(pair.clean),
        "first_difference": pair.first_difference,
        "read_positions": len(pair.read),
        "seed": probe.seed,
        "clean_metric": float(effects.clean_metric[0]),
        "corrupt_metric": float(effects.corrupt_metric[0]),
        "receivers": receivers,
        "cases": rows,
        "edges": edges(model, bridge, one_pair(model, min(options.tokens, EDGE_TOKENS))),
        "machine": measured_on,
    }
    print(as_text(result))
    print(f"\n{write_json(options.out, result)}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Path patching from all heads of the embedded model: ours, TransformerLens and the limit.")
    parser.add_argument("--tokens", type=int, default=512, help="length of the prompts (default: %(default)s)")
    parser.add_argument("--senders", type=int, default=9, help="senders that the peer patches; its time is scaled to all (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"), help="the numbers as JSON (default: beside this file)")
    options = parser.parse_args(arguments)
    if options.senders < 1:
        raise InputError(f"--senders {options.senders}: the peer needs at least one sender")
    return options


# The receivers, the sample and ours


def best_heads(model: LensModel, probe: Probe, k: int) -> list[Head]:
    """The heads with the largest direct effects on the pair's answer, best first; of layer 0 none, since no head sends to it."""
    effects = activation_patch(model, probe).per_pair[0]
    effects[0] = torch.nan
    return _largest(effects, k)


def sampled(effects: Float[Tensor, "layer head"], count: int) -> list[Head]:
    """Senders at even distances in the order of their absolute effects, from the strongest on."""
    ranked = _largest(effects.abs(), int(effects.isfinite().sum()))
    count = min(count, len(ranked))
    return [ranked[index * len(ranked) // count] for index in range(count)]


def _largest(values: Float[Tensor, "layer head"], k: int) -> list[Head]:
    order = values.flatten().nan_to_num(-torch.inf).argsort(descending=True, stable=True)
    return [divmod(cell, values.shape[1]) for cell in order[:k].tolist()]


def at(heads: Sequence[Head]) -> tuple[Tensor, Tensor]:
    """The index of these heads in a map."""
    layers, columns = torch.tensor(heads).T
    return layers, columns


def ours(model: LensModel, probe: Probe, receivers: list[Head], case: Case) -> tuple[float, HeadEffects]:
    """Median seconds for all senders, everything included, and their effects."""
    effects = None

    def run() -> None:
        nonlocal effects
        effects = path_patch(model, probe, receivers, "q", positions=case.positions)

    seconds = median_seconds(run, case.repeats)
    return seconds, effects


# The peer


@torch.no_grad()
def peer_loop(bridge: Any, pair: Pair, receivers: Sequence[Head], positions: str, senders: Sequence[Head]) -> PeerLoop:
    """Path patching with TransformerLens' hooks, two forwards a sender.

    Pass 1: z of all heads held at the clean run's but the sender's, which is the corrupt run's; MLPs recomputed; the receivers' queries
    are read. Pass 2: the clean run with those queries.
    """
    where = pair.patched(positions)
    heads_of: dict[int, list[int]] = {}
    for layer, head in receivers:
        heads_of.setdefault(layer, []).append(head)
    read: dict[int, Tensor] = {}

    def hold(z: Tensor, hook: Any, held: Tensor) -> Tensor:
        return held

    def keep(q: Tensor, hook: Any, layer: int) -> None:
        read[layer] = q.clone()

    def insert(q: Tensor, hook: Any, layer: int) -> Tensor:
        q = q.clone()
        for head in heads_of[layer]:
            q[:, where, head] = read[layer][:, where, head]
        return q

    bridge(pair.clean[None])  # does not count
    start = time.perf_counter()
    (_, clean), (_, corrupt) = (bridge.run_with_cache(tokens[None], names_filter=lambda name: name.endswith("hook_z")) for tokens in (pair.clean, pair.corrupt))
    preparation = time.perf_counter() - start

    values, seconds = [], []
    for layer, head in senders:
        start = time.perf_counter()
        mine = f"blocks.{layer}.attn.hook_z"
        sent = clean[mine].clone()
        sent[:, where, head] = corrupt[mine][:, where, head]
        holding = [(name, partial(hold, held=sent if name == mine else z)) for name, z in clean.items()]
        reading = [(f"blocks.{index}.attn.hook_q", partial(keep, layer=index)) for index in heads_of]
        bridge.run_with_hooks(pair.clean[None], return_type=None, fwd_hooks=holding + reading)
        inserting = [(f"blocks.{index}.attn.hook_q", partial(insert, layer=index)) for index in heads_of]
        values.append(lead(bridge.run_with_hooks(pair.clean[None], fwd_hooks=inserting), pair))
        seconds.append(time.perf_counter() - start)
    return PeerLoop(torch.stack(values), seconds, preparation)


# The peer's own path patching: single edges


def edges(model: LensModel, bridge: Any, probe: Probe) -> dict[str, Any]:
    """Edges sender -> q of a receiver, MLPs frozen, later heads recomputed, corrupt run with the sender's clean output: ours and the peer's.

    The receivers are the best heads by direct effect, the senders the strongest into each of them.
    """
    pair = unpad(probe, 0, model.device)
    receivers = best_heads(model, probe, EDGE_RECEIVERS)
    say(f"ours: edges to {_named(receivers)}")
    maps = edge_maps(model, probe, receivers, "q", freeze_mlps=True, second_pass="total", direction="denoise", positions="all")
    senders = sorted({_largest(effects.per_pair[0].abs(), 1)[0] for effects in maps.values()})
    say(f"peer: edges from {_named(senders)}")
    theirs = peer_edges(bridge, pair, senders)
    compared = []
    for receiver, effects in maps.items():
        values = patched_metric(effects)
        for sender in senders:
            if sender[0] < receiver[0]:
                compared.append({"sender": sender, "receiver": receiver, "ours": float(values[sender]), "peer": float(theirs[sender][receiver])})
    peer = [edge["peer"] for edge in compared]
    return {
        "tokens": len(pair.clean),
        "senders": senders,
        "receivers": receivers,
        "compared": compared,
        "max_abs_difference": max(abs(edge["ours"] - edge["peer"]) for edge in compared),
        "values_range": max(peer) - min(peer),
    }


@torch.no_grad()
def peer_edges(bridge: Any, pair: Pair, senders: Sequence[Head]) -> dict[Head, Float[Tensor, "layer head"]]:
    """TransformerLens' own sweep (``get_act_patch_direct_path``): sender -> metric with the edge into q of every later head patched."""
    from transformer_lens.patching import get_act_patch_direct_path

    corrupt = pair.corrupt[None]
    caches = [bridge.run_with_cache(tokens[None], names_filter=lambda name: name.endswith("hook_z"))[1] for tokens in (pair.clean, pair.corrupt)]
    return {
        sender: get_act_patch_direct_path(bridge, corrupt, *caches, lambda logits: lead(logits, pair), *sender, component="q", verbose=False)
        for sender in senders
    }


# What is printed


def as_text(result: dict[str, Any]) -> str:
    """Markdown that reads well in a terminal too."""
    reached, edge = result["cases"][0]["senders_with_a_later_receiver"], result["edges"]
    header = ("positions", "ours s", "peer s", "peer / ours", "target", "", "limit s", "ours / limit", "max abs difference", "target", "", "range of values")
    rows = [
        (
            row["positions"],
            f"{row['ours_seconds']:.2f}",
            f"{row['peer_seconds']:.1f}",
            f"{row['times_faster']:.1f}",
            "none" if row["target"] is None else f"{row['target']:g}",
            {None: "", True: "met", False: "missed"}[row["met"]],
            f"{row['limit_seconds']:.2f}",
            f"{row['times_limit']:.2f}",
            f"{row['max_abs_difference']:.1e}",
            f"{LARGEST_DIFFERENCE:g}",
            "met" if row["max_abs_difference"] <= LARGEST_DIFFERENCE else "missed",
            f"{row['values_range']:.3f}",
        )
        for row in result["cases"]
    ]
    return (
        f"{result['model']}, {result['heads']} senders, of which {reached} have a receiver in a later layer; one pair of {result['tokens']} tokens, "
        f"first difference at {result['first_difference']}, {result['read_positions']} answer tokens; "
        f"metric {result['clean_metric']:.3f} clean, {result['corrupt_metric']:.3f} corrupt\n"
        f"{machine_text(result['machine'])}\n"
        f"Receivers, q of: {_named(result['receivers'])}\n"
        f"The peer patches {len(result['cases'][0]['peer_senders'])} of the {reached} senders: its seconds are scaled to the {reached}, "
        "values are compared on the sample.\n\n"
        f"{table(header, rows)}\n\n"
        f"Single edges, {edge['tokens']} tokens, TransformerLens' get_act_patch_direct_path: from {_named(edge['senders'])} to q of "
        f"{_named(edge['receivers'])}, {len(edge['compared'])} edges: max abs difference {edge['max_abs_difference']:.1e}, "
        f"range of values {edge['values_range']:.3f}"
    )


def _named(heads: Sequence[Head]) -> str:
    return ", ".join(f"L{layer}H{head}" for layer, head in heads)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"path patching benchmark: {error}", file=sys.stderr)
        sys.exit(2)
