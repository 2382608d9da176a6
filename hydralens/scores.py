"""``HeadScores``: what each head is worth per probe, per capability and overall, with the effects behind it."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydralens.errors import InputError
from hydralens.files import write_atomically, write_json
from hydralens.models.info import ModelInfo
from hydralens.patching.effects import HeadEffects
from hydralens.probes.base import Probe

THRESHOLD = 0.01  # an effect above this makes a head count for a probe (HydraHead)

ROLES = ("receivers", "senders", "measured")
RESTRICTIONS = ("restriction", "linear_restriction")  # to sinks and a window; to linear heads
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
        measured: the same mapping for what the method itself measures, where the composite is made from that and not from receivers and senders.
        solved: one entry per probe asked, also of those left out: probe, corruption, capability, n_pairs, n_solved, used.
        method: how ``composite`` was made: one of ``hydralens.scoring.METHODS``, or ``linear_restriction``.
    """

    model: ModelInfo
    receivers: Effects
    composite: Float[Tensor, "layer head"]
    probes: list[dict]
    senders: Effects = field(default_factory=dict)
    measured: Effects = field(default_factory=dict)
    solved: list[dict] = field(default_factory=list)
    method: str = "paper"

    @property
    def made_from(self) -> Effects:
        """The effects that the composite combines."""
        return self.measured or self.receivers

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
        """One column as a map: ``score``, ``rank``, a capability (its Eq. 11 score before scaling) or a probe label (its mean raw direct
        effect; where direct effects were not measured, what the method itself measures).

        Raises:
            InputError: no such column; the message lists those there are.
        """
        maps = {"score": self.composite, "rank": self.rank.float()}
        for effects in self.measured.values():
            maps |= {label: effect.values for label, effect in effects.items()}
        for capability, effects in self.receivers.items():
            maps[capability] = capability_score(effects, self.senders.get(capability, {}))
            maps |= {label: effect.values for label, effect in effects.items()}
        if column not in maps:
            raise InputError(f"no column {column!r}; there are {', '.join(maps)}")
        return maps[column]

    def to_frame(self) -> pd.DataFrame:
        """Long form, the columns of ``head_scores.csv``: one row per (capability, probe, layer, head), then the rows of the composite.

        ``receiver_ie`` and ``sender_ie`` are clipped to [0, 1], ``receiver_ie_raw`` is signed; ``ci_low`` and ``ci_high`` bound the
        raw receiver effect; ``measured`` is the method's own value. ``score`` and ``rank`` are filled where capability is ``composite``.
        """
        layers, heads = np.divmod(np.arange(self.composite.numel()), self.model.n_heads)
        place = {"layer": layers, "head": heads, "kv_head": heads // self.model.group}
        frames = []
        labels = {(capability, label): None for role in ROLES for capability, effects in getattr(self, role).items() for label in effects}
        for capability, label in labels:
            receiver, sender, measured = (getattr(self, role).get(capability, {}).get(label) for role in ROLES)
            present = receiver or measured or sender
            unknown = np.full(len(layers), np.nan)
            raw = unknown if receiver is None else receiver.values.flatten().numpy()
            low, high = (unknown, unknown) if receiver is None else (bound.flatten().numpy() for bound in receiver.interval())
            columns = {
                "receiver_ie": raw.clip(0, 1),
                "sender_ie": unknown if sender is None else sender.values.flatten().numpy().clip(0, 1),
                "receiver_ie_raw": raw,
                "ci_low": low,
                "ci_high": high,
                "n_pairs": present.n_pairs,
                "measured": unknown if measured is None else measured.values.flatten().numpy(),
            }
            frames.append(pd.DataFrame({"capability": capability, "probe": label, **place, **columns}))
        composite = {"score": self.composite.flatten().numpy(), "rank": self.rank.flatten().numpy()}
        frames.append(pd.DataFrame({"capability": "composite", "probe": "", **place, **composite}))
        return pd.concat(frames, ignore_index=True).astype({"n_pairs": "Int64", "rank": "Int64"})

    def select(self, choose: Callable[[HeadEffects], HeadEffects]) -> "HeadScores":
        """The scores that ``choose(effects)`` of every probe gives by the same method."""
        roles = {role: {c: {label: choose(effect) for label, effect in m.items()} for c, m in getattr(self, role).items()} for role in ROLES}
        return replace(self, **roles, composite=combine(self.method, **roles))

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


def mean_score(measured: Effects, drop_negative: bool = False) -> Float[Tensor, "layer head"]:
    """Mean of what a method measures, over the kept pairs of a probe and then over the probes of all capabilities; NaN counts as 0.

    Args:
        drop_negative: negative values of single pairs count as 0. A head that a pair would rather see restricted is no evidence
            against the pairs that need it, and the ranking is steadier so.
    """
    means = []
    for effect in all_probes(measured).values():
        values = effect.per_pair[effect.kept].nan_to_num(0)
        means.append((values.clamp(min=0) if drop_negative else values).mean(0))
    return torch.stack(means).mean(0)


def combine(method: str, receivers: Effects, senders: Effects, measured: Effects) -> Float[Tensor, "layer head"]:
    """The composite of a method from the effects it is made of."""
    return mean_score(measured, drop_negative=method in RESTRICTIONS) if measured else paper_score(receivers, {} if method == "direct" else senders)


def by_label(probes: Sequence[Probe]) -> dict[str, Probe]:
    """Label -> probe.

    Raises:
        InputError: no probes, or labels that would hide one another.
    """
    if not probes:
        raise InputError("no probes to score with; make some with hydralens.probes.retrieval(model)")
    label, n = Counter(probe.label for probe in probes).most_common(1)[0]
    if n > 1:
        raise InputError(f"{n} probes are called {label}; give each probe its own name")
    return {probe.label: probe for probe in probes}


def describe(probe: Probe, n_pairs: int, direction: str, metric: str) -> dict:
    """The entry of a probe as ``HeadScores.probes`` and ``head_mask.json`` hold it."""
    about = {"name": probe.label, "capability": probe.capability, "n_pairs": n_pairs, "n_tokens": probe.n_tokens, "seed": probe.seed}
    return about | {"direction": direction, "metric": metric}


def scores_of(model: ModelInfo, method: str, effects: Iterable[HeadEffects], probes: list[dict]) -> HeadScores:
    """HeadScores of one method from its effects alone, probe by probe; ``probes`` as ``describe`` gives them."""
    measured: dict[str, dict[str, HeadEffects]] = {}
    for effect in effects:
        measured.setdefault(effect.capability, {})[f"{effect.probe}/{effect.corruption}"] = effect
    return HeadScores(model=model, receivers={}, measured=measured, composite=mean_score(measured), probes=probes, method=method)


def all_probes(effects: Effects) -> dict[str, HeadEffects]:
    """Every probe's effects under ``name/corruption``, over all capabilities."""
    return {label: effect for probes in effects.values() for label, effect in probes.items()}


def _best_first(scores: Float[Tensor, "layer head"]) -> Int[Tensor, "cell"]:
    """Cells ``layer * n_heads + head`` from the highest score down; ties by lower layer, then lower head."""
    return scores.flatten().argsort(descending=True, stable=True)
