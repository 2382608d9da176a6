"""From probes to scores: every head is measured on every probe the model solves.

``restriction``, the default, scores a head by what the mask would do to it: what limiting it to sinks and a recent window costs the
answer. ``paper`` is HydraHead's composite (Eq. 11-12): heads whose output carries the answer, directly or through those that do;
``direct`` is its first half, without senders, which works on hybrids too. The other methods are the detectors of ``hydralens.detectors``.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from hydralens.detectors import PER_PROBE, WHOLE
from hydralens.errors import InputError, ProbeNotSolvedError, check_word
from hydralens.files import write_atomically
from hydralens.models.lens import LensModel
from hydralens.patching.activation import activation_patch
from hydralens.patching.effects import HeadEffects
from hydralens.patching.metric import DECAY
from hydralens.patching.path import path_patch
from hydralens.patching.restriction import SINKS, WINDOW, restriction_effects
from hydralens.probes.base import Probe
from hydralens.ranks import share, wait_for_all
from hydralens.scores import THRESHOLD, HeadScores, all_probes, by_label, combine, describe, paper_score

FLOOR = 0.5  # logits (nats for restriction) by which clean must exceed corrupt before a pair's effects mean anything
MIN_SOLVED = 0.5  # share of a probe's pairs that must pass
PAIRS_AT_MOST = 3  # pairs per probe that go into what a method measures itself: a restriction score costs about fifteen forwards a pair
METHODS = ("restriction", "paper", "direct", *PER_PROBE, *WHOLE)


def score_heads(
    model: LensModel,
    probes: Sequence[Probe],
    *,
    method: str = "restriction",
    senders: int | None = None,
    required: Collection[str] | None = None,
    floor: float = FLOOR,
    pairs_at_most: int = PAIRS_AT_MOST,
    linear: LensModel | None = None,
    shards: str | Path | None = None,
    verbose: bool = False,
) -> HeadScores:
    """Score every head on every probe.

    Direct effects are always measured. A pair counts when the model answers its clean prompt (first answer token by argmax) and
    its clean metric exceeds its corrupt metric by ``floor`` logits; a probe is used when at least half of its pairs count, and
    probes left out are listed in ``solved``.

    Args:
        method: what the composite is: ``restriction`` (see ``restriction_effects``; to sinks and 64 positions, or a quarter of the longest prompt
            if that is less, where that costs the answer at least 0.5 nats), ``paper`` (Eq. 11-12), ``direct`` (the same without senders) or a
            detector. All but these two see clean prompts only, so one corruption of each used probe is enough for them.
        senders: pairs of each probe, the first ones that count, on which effects through the receivers are measured (Eq. 11, ``path_patch``): through
            the q, at the answer positions, of all heads whose direct effect reaches 0.01 on average over a capability's probes; one step back.
            Default: ``pairs_at_most`` for ``paper``, none otherwise.
        required: capabilities of which at least one probe must be used; default: all that are asked.
        pairs_at_most: pairs of each probe, the first ones that count, on which what a method measures itself is measured.
        linear: with method ``restriction``, a hybrid of linear heads alone, such as ``align/linear`` of a shared alignment: heads are then scored by what
            its heads in their place cost (``restriction_effects``), and the scores' method is ``linear_restriction``.
        shards: a folder for the effects of each finished pair, so that a killed run goes on where it stopped. Within ``hydralens.ranks.all_ranks``, as
            ``torchrun`` starts it, every rank measures its share of the pairs there.

    Raises:
        InputError: an unknown method, no probes, two with one label, or ``linear`` with another method or of another model.
        ProbeNotSolvedError: no probe of a required capability is used, or restriction costs no probe enough; nothing is scored.
    """
    check_word("method", method, METHODS)
    if linear is not None and method != "restriction":
        raise InputError(f"linear is for method 'restriction', not {method!r}; leave one of them out")
    labelled = by_label(probes)
    shards = None if shards is None else Path(shards)
    receivers: dict[str, dict[str, HeadEffects]] = {}
    used, solved = [], []

    def direct(probe: Probe) -> HeadEffects:
        # Which pairs count is decided here, so activation_patch drops none.
        return _counted(activation_patch(model, probe, min_span=0), floor)

    effects = _effects(model, list(labelled.values()), f"direct {floor}", shards, direct, "scoring heads", verbose)
    for (label, probe), effect in zip(labelled.items(), effects, strict=True):
        enough = effect.n_pairs >= max(1, MIN_SOLVED * probe.n_pairs)
        about = {"probe": probe.name, "corruption": probe.corruption, "capability": probe.capability}
        solved.append(about | {"n_pairs": probe.n_pairs, "n_solved": effect.n_pairs, "used": enough})
        if enough:
            receivers.setdefault(probe.capability, {})[label] = effect
            used.append(describe(probe, effect.n_pairs, "noise", f"logit difference, decay {DECAY}"))
    for capability in dict.fromkeys(probe.capability for probe in probes) if required is None else required:
        if capability not in receivers:
            raise ProbeNotSolvedError(_unsolved(capability, solved))
    senders = (pairs_at_most if method == "paper" else 0) if senders is None else senders
    sending = _senders(model, labelled, receivers, floor, senders, shards, verbose) if senders else {}
    scores = HeadScores(
        model=model.info, receivers=receivers, senders=sending, composite=paper_score(receivers, sending), probes=used, solved=solved, method="paper"
    )
    if method == "paper":
        return scores
    if method == "direct":
        return replace(scores, composite=combine(method, receivers, sending, {}), method=method)
    counted = [labelled[label].select(effect.kept.nonzero()[:pairs_at_most, 0]) for label, effect in all_probes(receivers).items()]
    clean = _one_per_name(counted)
    if method in WHOLE:
        whole = WHOLE[method](model, clean)
        return replace(scores, measured=whole.measured, composite=whole.composite, probes=whole.probes, method=method)
    least = MIN_SOLVED * min(pairs_at_most, *(probe.n_pairs for probe in probes))
    measured, used = _measured(model, clean, method, linear, least, shards, verbose)
    method = method if linear is None else "linear_restriction"
    return replace(scores, measured=measured, composite=combine(method, receivers, sending, measured), probes=used, method=method)


def _senders(
    model: LensModel,
    labelled: Mapping[str, Probe],
    receivers: Mapping[str, Mapping[str, HeadEffects]],
    floor: float,
    n_pairs: int,
    shards: Path | None,
    verbose: bool,
) -> dict[str, dict[str, HeadEffects]]:
    """Capability -> label -> effects through the q of the capability's receivers; no entry where no head reaches the threshold behind layer 0."""
    senders: dict[str, dict[str, HeadEffects]] = {}
    for capability, effects in receivers.items():
        strength = torch.stack([effect.values for effect in effects.values()]).mean(0)
        through = [(int(layer), int(head)) for layer, head in (strength >= THRESHOLD).nonzero() if layer > 0]
        if not through:
            continue

        def patch(probe: Probe, through: list[tuple[int, int]] = through) -> HeadEffects:
            return _counted(path_patch(model, probe, through, "q", min_span=0), floor)

        probes = [labelled[label].select(effect.kept.nonzero()[:n_pairs, 0]) for label, effect in effects.items()]
        found = _effects(model, probes, f"sender {floor} {through}", shards, patch, f"senders, {capability}", verbose)
        senders[capability] = dict(zip(effects, found, strict=True))
    return senders


def _measured(
    model: LensModel, probes: Sequence[Probe], method: str, linear: LensModel | None, least: float, shards: Path | None, verbose: bool
) -> tuple[dict[str, dict[str, HeadEffects]], list[dict]]:
    """What a method itself measures, probe by probe, and the probes it could be measured on, with ``least`` pairs or more."""
    measured: dict[str, dict[str, HeadEffects]] = {}
    used = []
    window = max(1, min(WINDOW, max(probe.n_tokens for probe in probes) // 4))

    def measure(probe: Probe) -> HeadEffects:
        if method == "restriction":
            return _counted(restriction_effects(model, probe, window=window, linear=linear, min_span=FLOOR), FLOOR)
        return PER_PROBE[method](model, probe)

    restricted_to = f"{SINKS} sinks and {window} positions" if linear is None else "its linear head"
    settings = method if method != "restriction" else f"restriction {window}" if linear is None else f"restriction {linear.info.fingerprint}"
    for probe, effect in zip(probes, _effects(model, probes, settings, shards, measure, method, verbose), strict=True):
        how = ("restriction", f"log-probability, {effect.positions}") if method == "restriction" else (effect.direction, method)
        if effect.n_pairs >= max(1, least):
            measured.setdefault(probe.capability, {})[probe.label] = effect
            used.append(describe(probe, effect.n_pairs, *how))
    if not measured:
        raise ProbeNotSolvedError(
            f"restricting every head to {restricted_to} costs the answer less than {FLOOR} nats in every probe; use longer prompts (n_tokens) or method 'paper'"
            if method == "restriction"
            else f"{method} could not be measured on any probe: too few pairs are answered; use more pairs or shorter prompts (n_tokens)"
        )
    return measured, used


def _counted(effect: HeadEffects, floor: float) -> HeadEffects:
    """Only pairs count that the model answers, and whose metric the corruption (or the restriction) lowers by the floor."""
    return replace(effect, kept=effect.answered & (effect.clean_metric - effect.corrupt_metric >= floor))


def _unsolved(capability: str, solved: list[dict]) -> str:
    asked = [entry for entry in solved if entry["capability"] == capability]
    if not asked:
        return f"no {capability} probe was asked, but one is required; add some or leave {capability} out of required"
    best = max(asked, key=lambda entry: entry["n_solved"] / entry["n_pairs"])
    counts = f"{best['n_solved']} of {best['n_pairs']} pairs of {best['probe']}/{best['corruption']}"
    others = f", the best of {len(asked)} {capability} probes" if len(asked) > 1 else ""
    return f"the model does not solve this probe: {counts}{others}; use shorter prompts (n_tokens), other probes or another model"


def _one_per_name(probes: Sequence[Probe]) -> list[Probe]:
    """One corruption of each probe, whose clean prompts alone are used: that with most pairs, and of equals swap, which has a second needle to tell apart."""
    preference = {"swap": 0, "key": 1, "value": 2}
    best: dict[str, Probe] = {}
    for probe in sorted(probes, key=lambda probe: (-probe.n_pairs, preference.get(probe.corruption, 3))):
        best.setdefault(probe.name, probe)
    return [best[name] for name in dict.fromkeys(probe.name for probe in probes)]


def _effects(
    model: LensModel, probes: Sequence[Probe], settings: str, shards: Path | None, measure: Callable[[Probe], HeadEffects], doing: str, verbose: bool
) -> list[HeadEffects]:
    """``measure(probe)`` of every probe; with shards pair by pair, each rank its share of the pairs, and then all ranks read all.

    Pairs do not know of each other, so that the result is the same to the bit.
    """
    if shards is None:
        return [measure(probe) for probe in tqdm(probes, desc=doing, disable=not verbose)]
    cells = [[probe.select([pair]) for pair in range(probe.n_pairs)] for probe in probes]
    rank, world = share()
    for cell in tqdm([cell for own in cells for cell in own][rank::world], desc=doing, disable=not verbose or rank > 0):
        _sharded(model, cell, settings, shards, measure)
    wait_for_all()
    return [HeadEffects.join([_sharded(model, cell, settings, shards, measure) for cell in own]) for own in cells]


def _sharded(model: LensModel, probe: Probe, settings: str, shards: Path, measure: Callable[[Probe], HeadEffects]) -> HeadEffects:
    """``measure(probe)``, read from the shard of the same model, tokens and settings where there is one."""
    path = shards / f"{_key(model, probe, settings)}.safetensors"
    if path.exists():
        with suppress(SafetensorError), safe_open(path, "pt") as file:  # a damaged shard is measured again
            return HeadEffects(**json.loads(file.metadata()["fields"]), **{name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    effect = measure(probe)
    tensors, fields = effect.split()
    write_atomically(path, lambda temporary: save_file(tensors, temporary, {"fields": json.dumps(fields)}))
    return effect


def _key(model: LensModel, probe: Probe, settings: str) -> str:
    digest = hashlib.sha256(f"{version('hydralens')} {model.info.fingerprint} {model.dtype} {probe.name} {probe.corruption} {settings}".encode())
    for tensor in (probe.clean, probe.corrupt, probe.attention_mask, probe.answer, probe.foil, probe.read_positions, probe.needle_span):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]
