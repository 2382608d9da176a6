"""The main job: from a model to ``head_mask.json`` and a report a person can read, in one call."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch

from hydralens.environment import environment
from hydralens.errors import InputError, check_word
from hydralens.figures.findings import FULL, NONE, PAPER, RANDOM, SELECTED
from hydralens.figures.saving import save_figures
from hydralens.files import write_atomically, write_json
from hydralens.models.lens import LensModel
from hydralens.patching.restriction import SINKS, WINDOW, completeness_error
from hydralens.probes import reasoning, retrieval
from hydralens.report import RunResult, run_figures, write_report
from hydralens.scores import all_probes, paper_score
from hydralens.scoring import score_heads
from hydralens.selection import RULES, heads_for_ratio, select_heads
from hydralens.similarity import similarities
from hydralens.statistics import fewest_pairs, split_half
from hydralens.validation import far_prompts, knockout_curve, mask_preview, random_masks

KNOCKOUTS = (0, 1, 4, 16)  # ranks at which the knock-out curve is read; K, the mask's size, is added
CHECK_SHAPES = ("niah_single_2", "niah_multikey_1")  # what the checks ask: one needle, and one needle among others
SENDER_PAIRS = 1  # pairs per probe behind the paper's mask where another method selects; a capability has many probes
CHECK_SEED = 1_000_003  # added to the seed: the checks' prompts are never those the heads were scored on


def run(
    model: LensModel,
    out: str | Path,
    *,
    ratio: str = "7:1",
    rule: str = "global",
    method: str = "restriction",
    n_pairs: int = 4,
    n_tokens: int = 256,
    n_check: int = 10,
    n_draws: int = 2,
    seed: int = 0,
    verbose: bool = True,
) -> RunResult:
    """Probe, score, select, check, draw and report; every file of the run is in ``out`` afterwards.

    A killed run goes on where it stopped: finished probes are kept in ``out/shards`` until the scores are written.

    Args:
        ratio, rule: how heads are selected, see ``select_heads``.
        method: what scores a head, see ``score_heads``; unless it is ``paper``, the preview shows the paper's mask, from receivers and
            senders, beside the selected one.
        n_pairs, n_tokens: pairs per probe, and tokens per retrieval prompt.
        n_check, n_draws: prompts per task, and random draws, of the knock-out curve and the mask preview.

    Raises:
        ProbeNotSolvedError: the model solves no retrieval probe; nothing is exported.
        InputError: a wrong argument, or ``out`` cannot be written.
    """
    out, wall = Path(out), {}
    k = heads_for_ratio(ratio, model.info.n_layers * model.info.n_heads)
    check_word("rule", rule, RULES)
    for name, value, least in (("n_pairs", n_pairs, 1), ("n_check", n_check, 1), ("n_draws", n_draws, 1), ("seed", seed, 0)):
        if value < least:
            raise InputError(f"{name} is {value}; it must be at least {least}")
    check_writable(out)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        wall[name] = round(time.perf_counter() - start, 1)

    with phase("probes"):
        probes = retrieval(model, n_pairs, n_tokens, seed) + reasoning(model, n_pairs, seed)
        checks = retrieval(model, n_check, n_tokens, seed + CHECK_SEED, shapes=CHECK_SHAPES, corruptions=("value",))
        for probe in checks:
            far_prompts(model, probe)  # prompts too short for the preview are refused before the long work
    with phase("scores"):
        # A model may solve no reasoning probe; retrieval is what a mask is for.
        scores = score_heads(
            model, probes, method=method, senders=None if method == "paper" else SENDER_PAIRS, required=("retrieval",), shards=out / "shards", verbose=verbose
        )
    mask = select_heads(scores, ratio, rule=rule, seed=seed)
    with phase("similarity"):
        clean = [probe.select([0]) for probe in {probe.name: probe for probe in probes}.values()]  # one prompt of each probe
        layers, heads = similarities(model, clean, ["output"], ["write"])
    with phase("knock-out"):
        counts = sorted({*(count for count in KNOCKOUTS if count < k), k})
        knockout = knockout_curve(model, scores.top(k), checks, counts, n_draws, seed, verbose)
    with phase("mask preview"):
        shape = mask.array.shape
        every, none = torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        masks = {FULL: [every], SELECTED: [mask.array], RANDOM: random_masks(shape, mask.n_full, n_draws, seed), NONE: [none]}
        if method != "paper":
            papers = replace(scores, method="paper", composite=paper_score(scores.receivers, scores.senders))
            masks[PAPER] = [select_heads(papers, ratio, rule=rule, seed=seed).array]
        preview = mask_preview(model, masks, checks, verbose=verbose)

    ranked = max(1, min(k, scores.n_with_signal))  # beyond it the order is that of ties, in which halves agree by chance
    arguments = {"ratio": ratio, "rule": rule, "method": method, "n_pairs": n_pairs, "n_tokens": n_tokens, "n_check": n_check, "n_draws": n_draws, "seed": seed}
    if method == "restriction":
        errors = [completeness_error(effect) for effect in all_probes(scores.measured).values()]
        arguments |= {"restriction": {"completeness_error": {"mean": sum(errors) / len(errors), "largest": max(errors)}}}
    result = RunResult(
        model=model.info,
        scores=scores,
        mask=mask,
        layer_similarity=layers["output"],
        head_similarity=heads["write"],
        knockout=knockout,
        preview=preview,
        solved=scores.solved,
        stability=split_half(scores, ranked) if fewest_pairs(scores) > 1 else {},
        settings=arguments | {"preview": {"window": WINDOW, "sinks": SINKS}, **environment(model), "wall_seconds": wall},
    )
    with phase("files"):
        _write(out, result)
    write_json(out / "run.json", _record(result))
    rmtree(out / "shards", ignore_errors=True)
    return result


def check_writable(out: Path) -> None:
    """Refuse a folder that cannot be written before the long work, not after it.

    Raises:
        InputError: with the reason.
    """
    write_atomically(out / ".writable", lambda path: path.write_text("")).unlink()


def _write(out: Path, result: RunResult) -> None:
    result.scores.save(out)
    result.mask.save(out / "head_mask.json")
    result.layer_similarity.save_csv(out / "layer_similarity.csv")
    result.head_similarity.save_csv(out / "head_similarity.csv")
    for name in ("knockout", "preview"):
        frame = getattr(result, name)
        write_atomically(out / f"{name}.csv", lambda path, frame=frame: frame.to_csv(path, index=False, float_format="%.6g"))
    figures = run_figures(result)
    save_figures(figures, out / "figures")
    write_report(out / "report.html", result, figures)


def _record(result: RunResult) -> dict[str, Any]:
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": result.model.model_dump(),
        **result.settings,
        "probes": result.solved,
        "stability": result.stability,
        "positive_control": asdict(result.control) | {"sentence": result.control.sentence},
    }
