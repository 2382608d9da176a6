"""From probes to scores: every head is measured on every probe the model solves.

``paper`` is HydraHead's composite (Eq. 11-12): heads whose output carries the answer. ``restriction`` scores a head by what the mask
would do to it: what limiting it to sinks and a recent window costs the answer.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from hydralens.errors import InputError, ProbeNotSolvedError, check_word
from hydralens.files import write_atomically
from hydralens.models.lens import LensModel
from hydralens.patching.activation import activation_patch
from hydralens.patching.effects import HeadEffects
from hydralens.patching.metric import DECAY
from hydralens.patching.restriction import SINKS, WINDOW, restriction_effects
from hydralens.probes.base import Probe
from hydralens.scores import HeadScores, mean_score, paper_score

FLOOR = 0.5  # logits by which clean must exceed corrupt before a pair's effects mean anything
MIN_SOLVED = 0.5  # share of a probe's pairs that must pass
RESTRICTION_PAIRS = 3  # pairs per probe whose clean prompt is scored by restriction: each costs about twelve forwards
METHODS = ("paper", "restriction")


def score_heads(
    model: LensModel,
    probes: Sequence[Probe],
    *,
    method: str = "paper",
    required: Collection[str] | None = None,
    floor: float = FLOOR,
    shards: str | Path | None = None,
    verbose: bool = False,
) -> HeadScores:
    """Score every head on every probe.

    Direct effects are always measured. A pair counts when the model answers its clean prompt (first answer token by argmax) and
    its clean metric exceeds its corrupt metric by ``floor`` logits; a probe is used when at least half of its pairs count, and
    probes left out are listed in ``solved``.

    Args:
        method: what the composite is: ``paper`` (Eq. 11-12 from the direct effects) or ``restriction`` (the clean prompts of the
            first pairs of one corruption of each used probe, where restricting all heads costs the answer at least ``floor`` nats).
        required: capabilities of which at least one probe must be used; default: all that are asked.
        shards: a folder for the effects of each finished probe, so that a killed run goes on where it stopped.

    Raises:
        ProbeNotSolvedError: no probe of a required capability is used, or restriction costs no probe enough; nothing is scored.
    """
    check_word("method", method, METHODS)
    if not probes:
        raise InputError("no probes to score with; make some with hydralens.probes.retrieval(model)")
    labels = [f"{probe.name}/{probe.corruption}" for probe in probes]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"{labels.count(label)} probes are called {label}; give each probe its own name")
    receivers: dict[str, dict[str, HeadEffects]] = {}
    used, solved = [], []
    for label, probe in zip(tqdm(labels, desc="scoring heads", disable=not verbose), probes, strict=True):
        effect = _measure(model, probe, "direct", floor, shards)
        passing = int(effect.kept.sum())
        enough = passing >= max(1, MIN_SOLVED * probe.n_pairs)
        solved.append(
            {"probe": probe.name, "corruption": probe.corruption, "capability": probe.capability, "n_pairs": probe.n_pairs, "n_solved": passing, "used": enough}
        )
        if enough:
            receivers.setdefault(probe.capability, {})[label] = effect
            used.append(_describe(label, probe, passing))
    for capability in dict.fromkeys(probe.capability for probe in probes) if required is None else required:
        if capability not in receivers:
            raise ProbeNotSolvedError(_unsolved(capability, solved))
    if method == "paper":
        return HeadScores(model=model.info, receivers=receivers, composite=paper_score(receivers, {}), probes=used, solved=solved)

    restriction: dict[str, dict[str, HeadEffects]] = {}
    used = []
    chosen = _one_per_name([probe for label, probe in zip(labels, probes, strict=True) if label in receivers.get(probe.capability, {})])
    for probe in tqdm(chosen, desc="restricting heads", disable=not verbose):
        effect = _measure(model, probe.select(list(range(min(probe.n_pairs, RESTRICTION_PAIRS)))), "restriction", floor, shards)
        if int(effect.kept.sum()) >= max(1, MIN_SOLVED * len(effect.kept)):
            label = f"{probe.name}/{probe.corruption}"
            restriction.setdefault(probe.capability, {})[label] = effect
            used.append(_describe(label, probe, effect.n_pairs) | {"direction": "restriction", "metric": f"log-probability, window {WINDOW}, sinks {SINKS}"})
    if not restriction:
        raise ProbeNotSolvedError(
            f"restricting every head to {SINKS} sinks and {WINDOW} positions costs the answer less than {floor} in every probe; "
            "use longer prompts (n_tokens) or method 'paper'"
        )
    composite = mean_score(restriction, drop_negative=True)
    return HeadScores(model=model.info, receivers=receivers, measured=restriction, composite=composite, probes=used, solved=solved, method="restriction")


def _unsolved(capability: str, solved: list[dict]) -> str:
    asked = [entry for entry in solved if entry["capability"] == capability]
    if not asked:
        return f"no {capability} probe was asked, but one is required; add some or leave {capability} out of required"
    best = max(asked, key=lambda entry: entry["n_solved"] / entry["n_pairs"])
    counts = f"{best['n_solved']} of {best['n_pairs']} pairs of {best['probe']}/{best['corruption']}"
    others = f", the best of {len(asked)} {capability} probes" if len(asked) > 1 else ""
    return f"the model does not solve this probe: {counts}{others}; use shorter prompts (n_tokens), other probes or another model"


def _one_per_name(probes: Sequence[Probe]) -> list[Probe]:
    """One corruption of each probe, whose clean prompts alone are used: preferably swap, whose prompts have a second needle to tell apart."""
    preference = {"swap": 0, "key": 1, "value": 2}
    best: dict[str, Probe] = {}
    for probe in sorted(probes, key=lambda probe: preference.get(probe.corruption, 3)):
        best.setdefault(probe.name, probe)
    return [best[name] for name in dict.fromkeys(probe.name for probe in probes)]


def _measure(model: LensModel, probe: Probe, kind: str, floor: float, shards: str | Path | None) -> HeadEffects:
    """Effects of one kind; ``kept`` marks the pairs that count. Read from the shard of the same model, tokens and settings where there is one."""
    path = None if shards is None else Path(shards) / f"{_key(model, probe, kind, floor)}.safetensors"
    if path is not None and path.exists():
        with suppress(SafetensorError), safe_open(path, "pt") as file:  # a damaged shard is measured again
            return HeadEffects(**json.loads(file.metadata()["fields"]), **{name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    # Which pairs count is decided here, so none is dropped before.
    effect = activation_patch(model, probe, min_span=0) if kind == "direct" else restriction_effects(model, probe)
    effect = replace(effect, kept=effect.answered & (effect.clean_metric - effect.corrupt_metric >= floor))
    if path is not None:
        tensors, fields = effect.split()
        write_atomically(path, lambda temporary: save_file(tensors, temporary, {"fields": json.dumps(fields)}))
    return effect


def _key(model: LensModel, probe: Probe, kind: str, floor: float) -> str:
    digest = hashlib.sha256(f"{version('hydralens')} {model.info.fingerprint} {model.dtype} {probe.name} {probe.corruption} {kind} {floor}".encode())
    for tensor in (probe.clean, probe.corrupt, probe.attention_mask, probe.answer, probe.foil, probe.read_positions):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _describe(label: str, probe: Probe, n_pairs: int) -> dict:
    about = {"name": label, "capability": probe.capability, "n_pairs": n_pairs, "n_tokens": probe.n_tokens, "seed": probe.seed}
    return about | {"direction": "noise", "metric": f"logit difference, decay {DECAY}"}
