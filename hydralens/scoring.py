"""From effects to scores: what each head is worth per probe, per capability and overall.

Two methods. ``paper`` is HydraHead's composite (Eq. 11-12): heads whose output carries the answer. ``restriction`` scores a head by
what the mask would do to it: what limiting it to sinks and a recent window costs the answer.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from torch import Tensor
from tqdm.auto import tqdm

from hydralens.errors import InputError, ProbeNotSolvedError, check_word
from hydralens.files import write_atomically, write_json
from hydralens.models.info import ModelInfo
from hydralens.models.lens import LensModel
from hydralens.patching.activation import activation_patch
from hydralens.patching.effects import HeadEffects
from hydralens.patching.metric import DECAY
from hydralens.patching.restriction import SINKS, WINDOW, restriction_effects
from hydralens.probes.base import Probe

THRESHOLD = 0.01  # an effect above this makes a head count for a probe (paper section 1.5)
FLOOR = 0.5  # logits by which clean must exceed corrupt before a pair's effects mean anything
MIN_SOLVED = 0.5  # share of a probe's pairs that must pass
RESTRICTION_PAIRS = 3  # pairs per probe whose clean prompt is scored by restriction: each costs about twelve forwards
METHODS = ("paper", "restriction")

ROLES = ("receivers", "senders", "restriction")
Effects = Mapping[str, Mapping[str, HeadEffects]]  # capability -> probe label -> effects


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Scores of every query head, with the effects they were made from.

    Attributes:
        model: which model.
        receivers: capability -> probe label (``name/corruption``) -> direct effects (HydraHead Eq. 10); measured by every method.
        composite: float32 ``[layer, head]``, the score that selection uses; 0 where a head carries no signal.
        probes: one entry per probe as ``head_mask.json`` lists them: name, capability, n_pairs, n_tokens, seed, direction, metric.
        senders: the same mapping for effects through the receivers (path patching); empty when not measured.
        restriction: the same mapping for restriction effects; empty unless they made the composite.
        solved: one entry per probe asked, also of those left out: probe, corruption, capability, n_pairs, n_solved, used.
        method: how ``composite`` was made.
    """

    model: ModelInfo
    receivers: Effects
    composite: Float[Tensor, "layer head"]
    probes: list[dict]
    senders: Effects = field(default_factory=dict)
    restriction: Effects = field(default_factory=dict)
    solved: list[dict] = field(default_factory=list)
    method: str = "paper"

    @property
    def made_from(self) -> Effects:
        """The effects that the composite combines."""
        return self.restriction if self.method == "restriction" else self.receivers

    @property
    def n_with_signal(self) -> int:
        """How many heads have a non-zero score; by the paper's method only about a tenth do, so most of a large mask is tie-break."""
        return int((self.composite != 0).sum())

    @property
    def rank(self) -> Int[Tensor, "layer head"]:
        """0 for the best head; ties by lower layer, then lower head."""
        order = _best_first(self.composite)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order))
        return rank.reshape(self.composite.shape)

    def top(self, k: int) -> list[tuple[int, int]]:
        """The ``k`` best heads, best first, as ``(layer, head)``."""
        return [divmod(cell, self.model.n_heads) for cell in _best_first(self.composite)[:k].tolist()]

    def map(self, column: str) -> Float[Tensor, "layer head"]:
        """One column as a map: ``score``, ``rank``, a capability (its Eq. 11 score before scaling) or a probe label (its mean raw direct effect).

        Raises:
            InputError: no such column; the message lists those there are.
        """
        maps = {"score": self.composite, "rank": self.rank.float()}
        for capability, effects in self.receivers.items():
            maps[capability] = capability_score(effects, self.senders.get(capability, {}))
            maps |= {label: effect.values for label, effect in effects.items()}
        if column not in maps:
            raise InputError(f"no column {column!r}; there are {', '.join(maps)}")
        return maps[column]

    def to_frame(self) -> pd.DataFrame:
        """Long form, the columns of ``head_scores.csv``: one row per (capability, probe, layer, head), then the rows of the composite.

        ``receiver_ie`` and ``sender_ie`` are clipped to [0, 1], ``receiver_ie_raw`` is signed; ``ci_low`` and ``ci_high`` bound the
        raw receiver effect. ``score`` and ``rank`` are filled where capability is ``composite``.
        """
        layers, heads = np.divmod(np.arange(self.composite.numel()), self.model.n_heads)
        place = {"layer": layers, "head": heads, "kv_head": heads // self.model.group}
        frames = []
        for capability, effects in self.receivers.items():
            for label, effect in effects.items():
                low, high = effect.interval()
                sender, restricted = (role.get(capability, {}).get(label) for role in (self.senders, self.restriction))
                raw = effect.values.flatten().numpy()
                measured = {
                    "receiver_ie": raw.clip(0, 1),
                    "sender_ie": np.nan if sender is None else sender.values.flatten().numpy().clip(0, 1),
                    "receiver_ie_raw": raw,
                    "ci_low": low.flatten().numpy(),
                    "ci_high": high.flatten().numpy(),
                    "n_pairs": effect.n_pairs,
                    "restriction_ie": np.nan if restricted is None else restricted.values.flatten().numpy(),
                }
                frames.append(pd.DataFrame({"capability": capability, "probe": label, **place, **measured}))
        composite = {"score": self.composite.flatten().numpy(), "rank": self.rank.flatten().numpy()}
        frames.append(pd.DataFrame({"capability": "composite", "probe": "", **place, **composite}))
        return pd.concat(frames, ignore_index=True).astype({"n_pairs": "Int64", "rank": "Int64"})

    def split_half(self, k: int) -> dict[str, float]:
        """Agreement of the composites of the two halves of the pairs (even and odd): share of the top ``k`` in common, and Spearman.

        Spearman over all heads is low when most scores are zero, however stable the top is; so both are given.
        """
        halves = []
        for parity in (0, 1):
            receivers, restriction = (
                {c: {label: _half(e, parity) for label, e in m.items()} for c, m in r.items()} for r in (self.receivers, self.restriction)
            )
            halves.append(restriction_score(restriction) if self.method == "restriction" else paper_score(receivers, {}))
        tops = [set(_best_first(half)[:k].tolist()) for half in halves]
        return {"k": k, "top_k_overlap": len(tops[0] & tops[1]) / k, "spearman": float(spearmanr(*(half.flatten().numpy() for half in halves)).statistic)}

    def save(self, folder: str | Path) -> None:
        """Write ``head_scores.csv`` (for people and other tools), ``scores.json`` and ``effects.safetensors`` (for ``load``)."""
        folder = Path(folder)
        tensors, entries = {"composite": self.composite.contiguous()}, []
        for role in ROLES:
            for capability, effects in getattr(self, role).items():
                for label, effect in effects.items():
                    arrays, fields = effect.split()
                    tensors |= {f"{len(entries)}.{name}": value for name, value in arrays.items()}
                    entries.append({"role": role, "capability": capability, "label": label, "effect": fields})
        about = {"model": self.model.model_dump(), "method": self.method, "probes": self.probes, "solved": self.solved, "effects": entries}
        write_atomically(folder / "effects.safetensors", lambda path: save_file(tensors, path))
        write_json(folder / "scores.json", about)
        write_atomically(folder / "head_scores.csv", lambda path: self.to_frame().to_csv(path, index=False, float_format="%.6g"))

    @classmethod
    def load(cls, folder: str | Path) -> "HeadScores":
        """Read what ``save`` wrote.

        Raises:
            InputError: the folder does not hold scores, or holds damaged ones.
        """
        folder = Path(folder)
        mend = f"make them with: hydralens score MODEL --out {folder}"
        for name in ("scores.json", "effects.safetensors"):
            if not (folder / name).is_file():
                raise InputError(f"{folder} holds no head scores ({name} is missing); {mend}")
        try:
            about = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / "effects.safetensors")
            roles: dict[str, dict[str, dict[str, HeadEffects]]] = {role: {} for role in ROLES}
            for index, entry in enumerate(about["effects"]):
                arrays = {name.split(".", 1)[1]: value for name, value in tensors.items() if name.startswith(f"{index}.")}
                roles[entry["role"]].setdefault(entry["capability"], {})[entry["label"]] = HeadEffects(**entry["effect"], **arrays)
            model = ModelInfo(**about["model"])
            return cls(model=model, composite=tensors["composite"], probes=about["probes"], solved=about["solved"], method=about["method"], **roles)
        except Exception as error:  # whatever a damaged file breaks, the mend is the same
            reason = " ".join(str(error).split())
            raise InputError(f"the head scores in {folder} are damaged ({reason}); {mend}") from error


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
    composite = restriction_score(restriction)
    return HeadScores(model=model.info, receivers=receivers, restriction=restriction, composite=composite, probes=used, solved=solved, method="restriction")


def _unsolved(capability: str, solved: list[dict]) -> str:
    asked = [entry for entry in solved if entry["capability"] == capability]
    if not asked:
        return f"no {capability} probe was asked, but one is required; add some or leave {capability} out of required"
    best = max(asked, key=lambda entry: entry["n_solved"] / entry["n_pairs"])
    counts = f"{best['n_solved']} of {best['n_pairs']} pairs of {best['probe']}/{best['corruption']}"
    others = f", the best of {len(asked)} {capability} probes" if len(asked) > 1 else ""
    return f"the model does not solve this probe: {counts}{others}; use shorter prompts (n_tokens), other probes or another model"


def capability_score(receivers: Mapping[str, HeadEffects], senders: Mapping[str, HeadEffects]) -> Float[Tensor, "layer head"]:
    """Eq. 11: max(receiver effect, sender effect) x kappa.

    Effects are means over the sub-probes, clipped to [0, 1]; kappa is the share of sub-probes in which the head's stronger
    role passes 0.01. NaN (impossible) counts as no effect.
    """

    def stack(effects: Mapping[str, HeadEffects]) -> Float[Tensor, "probe layer head"]:
        return torch.stack([effect.values for effect in effects.values()]).nan_to_num(0).clamp(0, 1)

    strength = stack(receivers)
    if senders:
        through = stack({label: senders[label] for label in receivers})
        strength = torch.where(through.mean(0) > strength.mean(0), through, strength)
    coverage = (strength >= THRESHOLD).float().mean(0)
    return strength.mean(0) * coverage


def paper_score(receivers: Effects, senders: Effects) -> Float[Tensor, "layer head"]:
    """Eq. 12: capability scores scaled to [0, 1] by min-max over heads, averaged with equal weights."""
    total = 0
    for capability, effects in receivers.items():
        score = capability_score(effects, senders.get(capability, {}))
        low, high = score.min(), score.max()
        total = total + (score - low) / (high - low).clamp(min=torch.finfo(score.dtype).tiny)
    return total / len(receivers)


def restriction_score(restriction: Effects) -> Float[Tensor, "layer head"]:
    """Mean restriction effect, over the pairs of a probe and then over the probes of all capabilities.

    Negative values of single pairs count as 0: a head that a pair would rather see restricted is no evidence against the pairs
    that need it, and the ranking is steadier so.
    """
    return torch.stack([effect.per_pair[effect.kept].clamp(min=0).mean(0) for effects in restriction.values() for effect in effects.values()]).mean(0)


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


def _best_first(scores: Float[Tensor, "layer head"]) -> Int[Tensor, "cell"]:
    """Cells ``layer * n_heads + head`` from the highest score down; ties by lower layer, then lower head."""
    return scores.flatten().argsort(descending=True, stable=True)


def _half(effect: HeadEffects, parity: int) -> HeadEffects:
    """Every second of the pairs that count; the only one, where there is one."""
    counted = effect.kept.nonzero()[:, 0]
    return effect.select(counted[parity::2] if len(counted) > 1 else counted)
