"""Which heads feed which: path patching iterated one step back until nothing new passes the threshold (HydraHead)."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from hydralens.errors import InputError, check_word
from hydralens.models.lens import LensModel
from hydralens.patching.activation import activation_patch
from hydralens.patching.path import path_effects
from hydralens.probes.base import Probe

LOGITS = "logits"
INPUTS = {"q": "q", "k": "k_ungrouped", "v": "v_ungrouped"}  # receivers are query heads, each with its own keys and values


@dataclass(frozen=True, eq=False)
class Circuit:
    """The heads that an answer goes through, and the paths between them.

    Attributes:
        rounds: heads by the round that found them, strongest first: round 0 acts on the answer directly, round ``r`` through round ``r - 1``.
        effects: ``(layer, head)`` -> the mean IE with which it was found.
        edges: one row per path that passes the threshold: sender, receiver (``L{layer}H{head}``, or ``logits``), input (``q``, ``k``, ``v``
            or ``z`` for the logits), effect (mean IE through this receiver alone), round.
        threshold: what an effect must reach.
        exhausted: the last round found nothing new; otherwise ``max_rounds`` was reached.
        probe, n_pairs, n_layers: what was asked, and of how many layers the model is.
    """

    rounds: list[list[tuple[int, int]]]
    effects: dict[tuple[int, int], float]
    edges: pd.DataFrame
    threshold: float
    exhausted: bool
    probe: str
    n_pairs: int
    n_layers: int

    @property
    def heads(self) -> list[tuple[int, int]]:
        return [head for found in self.rounds for head in found]


def trace_circuit(
    model: LensModel,
    probe: Probe,
    threshold: float = 0.01,
    receiver_inputs: Sequence[str] = ("q",),
    max_rounds: int = 3,
    *,
    positions: str | None = None,
    second_pass: str = "total",
    batch_tokens: int | None = None,
    verbose: bool = False,
) -> Circuit:
    """Start at the heads with a direct effect on the answer, and go back from receivers to senders until nothing new passes the threshold.

    A round patches the paths to all heads that the round before found, jointly, and to each of them alone for the edges.

    Args:
        threshold: mean IE from which a head or a path counts (0.01 in the paper).
        receiver_inputs: any of ``q``, ``k``, ``v``; keys and values are those of the receiver alone, not of its group, and cost most: a patch of
            them at an early position changes every position after it.
        max_rounds: rounds of path patching at most.
        positions, second_pass, batch_tokens: as in ``path_patch``.

    Raises:
        InputError: an unknown input, a threshold that is not positive, or no head with a direct effect above it.
    """
    for name in receiver_inputs:
        check_word("receiver_inputs", name, tuple(INPUTS))
    if not threshold > 0:
        raise InputError(f"threshold is {threshold}; it must be positive")
    direct = activation_patch(model, probe, batch_tokens=batch_tokens, verbose=verbose)
    found = _passing(direct.values, threshold)
    if not found:
        raise InputError(f"no head of {probe.label} has a direct effect of {threshold:g} or more; lower the threshold")
    rounds, effects = [list(found)], dict(found)
    edges = [{"sender": _name(head), "receiver": LOGITS, "input": "z", "effect": effect, "round": 0} for head, effect in found.items()]
    exhausted = False
    for number in range(1, max_rounds + 1):
        receivers = [head for head in rounds[-1] if head[0] > 0]
        new: dict[tuple[int, int], float] = {}
        for name in receiver_inputs if receivers else ():
            settings = {"second_pass": second_pass, "positions": positions, "batch_tokens": batch_tokens, "verbose": verbose}
            joint, *single = path_effects(model, probe, [receivers, *([head] for head in receivers)], INPUTS[name], **settings)
            passing = _passing(joint.values, threshold)
            for head, effect in passing.items():
                if head not in effects:
                    new[head] = max(effect, new.get(head, effect))
            for receiver, alone in zip(receivers, single, strict=True):
                for head, effect in _passing(alone.values, threshold).items():
                    edges.append({"sender": _name(head), "receiver": _name(receiver), "input": name, "effect": effect, "round": number})
        exhausted = not new
        if exhausted:
            break
        rounds.append(sorted(new, key=lambda head: (-new[head], head)))
        effects |= new
    known = {_name(head) for head in effects}
    table = pd.DataFrame([edge for edge in edges if edge["sender"] in known])
    return Circuit(rounds, effects, table, threshold, exhausted, probe.label, direct.n_pairs, model.info.n_layers)


def _passing(values, threshold: float) -> dict[tuple[int, int], float]:
    """Heads whose effect reaches the threshold, strongest first; NaN never does."""
    cells = {(int(layer), int(head)): float(values[layer, head]) for layer, head in (values >= threshold).nonzero()}
    return dict(sorted(cells.items(), key=lambda item: (-item[1], item[0])))


def _name(head: tuple[int, int]) -> str:
    return f"L{head[0]}H{head[1]}"
