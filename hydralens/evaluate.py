"""The evaluation in one call: models beside each other, as tables, figures and a page. What is finished is not computed again."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
from tqdm.auto import tqdm

from hydralens.environment import environment
from hydralens.errors import InputError
from hydralens.evaluation import ask_reasoning, ask_retrieval, perplexity, speed
from hydralens.figures.evaluation import depth_heatmap, perplexity_curve
from hydralens.figures.saving import save_figures
from hydralens.files import read_json, write_atomically, write_json
from hydralens.models.lens import LensModel
from hydralens.probes.needles import SHAPES
from hydralens.probes.tasks import TASKS as REASONING
from hydralens.report.evaluation import write_evaluation
from hydralens.transfer.corpus import from_files

RETRIEVAL = tuple(name for name in SHAPES if name.startswith("niah_"))
TASKS = (*RETRIEVAL, *REASONING, "perplexity", "speed")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DOCUMENTS = 32  # of a text, at most


def evaluate(
    models: dict[str, LensModel],
    out: str | Path,
    *,
    tasks: Sequence[str] = ("niah_single_1", "niah_single_2", "niah_multikey_1"),
    lengths: Sequence[int] = (512, 1024),
    depths: Sequence[float] = DEPTHS,
    n_prompts: int = 50,
    text: str | Path | None = None,
    seed: int = 0,
    verbose: bool = False,
) -> dict[str, pd.DataFrame]:
    """Ask every model the same and write ``OUT/evaluation.csv``, ``perplexity.csv``, ``speed.csv``, ``figures/``, ``evaluation.json`` and ``evaluation.html``.

    Every finished cell (model, task, length) is kept in ``OUT/cells``, under a name made of the weights and the settings, so that a killed run goes on
    and other settings never mix.

    Args:
        models: name -> model, the one to compare with first. All are asked with the tokenizer of the first.
        tasks: any of ``TASKS``: RULER's needle tasks, reasoning tasks (whose prompts have a length of their own), ``perplexity`` (at the greatest length),
            ``speed``.
        lengths: tokens of the prompts.
        depths: where the needle lies, 0 to 1.
        n_prompts: of a task and length, spread over the depths.
        text: a file or folder for ``perplexity``.

    Returns:
        The tables under ``evaluation``, ``perplexity`` and ``speed``, those that were asked for.

    Raises:
        InputError: an unknown task, a length too short for it, tokenizers that differ, no text for perplexity, or ``out`` cannot be written.
    """
    _check(models, tasks, lengths, text)
    out, first = Path(out), next(iter(models.values()))
    documents = None if text is None else _documents(text, first)
    tables: dict[str, list[pd.DataFrame]] = {}
    begun = time.perf_counter()
    # Reasoning prompts have a length of their own, and the longest text shows all positions.
    asked = {task: lengths[:1] if task in REASONING else [max(lengths)] if task == "perplexity" else lengths for task in tasks}
    cells = [(name, task, length) for name in models for task in tasks for length in asked[task]]
    for name, task, length in tqdm(cells, desc="evaluating", disable=not verbose):
        model = models[name]
        # The tokenizer of one, the weights of the other: prompts are equal.
        if task in RETRIEVAL:
            settings = {"depths": list(depths), "n_prompts": n_prompts, "seed": seed}
            kind, ask = "evaluation", lambda m, t=task, n=length: ask_retrieval(m, t, n, depths=depths, n_prompts=n_prompts, seed=seed, verbose=verbose)
        elif task in REASONING:
            settings = {"n_prompts": n_prompts, "seed": seed}
            kind, ask = "evaluation", lambda m, t=task: ask_reasoning(m, t, n_prompts=n_prompts, seed=seed, verbose=verbose)
        elif task == "perplexity":
            settings = {"text": hashlib.sha256(b"".join(document.numpy().tobytes() for document in documents)).hexdigest()}
            kind, ask = "perplexity", lambda m, n=length: perplexity(m, documents, n, verbose=verbose)
        else:
            settings, kind, ask = {}, "speed", lambda m, n=length: pd.DataFrame([speed(m, n)])
        found = _cell(out / "cells", model, {"task": task, "length": length} | settings, ask)
        tables.setdefault(kind, []).append(found.assign(model=name)[["model", *found.columns]])
    joined = {kind: pd.concat(parts, ignore_index=True) for kind, parts in tables.items()}
    for kind, frame in joined.items():
        write_atomically(out / f"{kind}.csv", lambda path, frame=frame: frame.to_csv(path, index=False, float_format="%.6g"))
    about = {"models": {name: model.info.model_dump(mode="json") for name, model in models.items()}, "tasks": list(tasks), "lengths": list(lengths)}
    about |= {"depths": list(depths), "n_prompts": n_prompts, "seed": seed, "text": None if text is None else str(text)} | environment(first)
    write_json(out / "evaluation.json", about | {"seconds": round(time.perf_counter() - begun, 1)})
    drawn = figures(joined)
    save_figures(drawn, out / "figures")
    write_evaluation(out / "evaluation.html", joined, drawn, about)
    return joined


def figures(tables: dict[str, pd.DataFrame]) -> dict[str, go.Figure]:
    """File name -> figure, of what was measured."""
    drawn = {}
    if "evaluation" in tables and tables["evaluation"]["depth"].notna().any():
        drawn["depth_heatmap"] = depth_heatmap(tables["evaluation"])
    if "perplexity" in tables:
        drawn["perplexity"] = perplexity_curve(tables["perplexity"])
    return drawn


def _check(models: dict[str, LensModel], tasks: Sequence[str], lengths: Sequence[int], text: str | Path | None) -> None:
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise InputError(f"task {unknown[0]!r} is unknown; choose from {', '.join(TASKS)}" if unknown else f"no task; choose from {', '.join(TASKS)}")
    if not lengths or min(lengths) < 2:
        raise InputError(f"lengths are {list(lengths)}; give one or more numbers of tokens")
    if "perplexity" in tasks and text is None:
        raise InputError("perplexity needs a text; give --text with a file or folder, or leave the task out")
    for name, model in models.items():
        if model.tokenizer is None:
            raise InputError(f"{name} has no tokenizer; put the base model's tokenizer files into its folder")
    first, *others = models.items()
    for name, model in others:
        if model.tokenizer.get_vocab() != first[1].tokenizer.get_vocab():
            raise InputError(f"{name} and {first[0]} have different tokenizers; what they are asked would not be the same")


def _documents(text: str | Path, model: LensModel) -> list[torch.Tensor]:
    corpus = from_files(text, model.tokenizer)
    return [torch.from_numpy(corpus.document(index).astype("int64")) for index in range(min(DOCUMENTS, corpus.n_documents))]


def _cell(folder: Path, model: LensModel, settings: dict[str, Any], ask: Callable[[LensModel], pd.DataFrame]) -> pd.DataFrame:
    """What ``ask`` gives, or gave before."""
    key = json.dumps([version("hydralens"), model.info.fingerprint, str(model.dtype), settings], sort_keys=True)
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    if not path.exists():
        write_json(path, {"settings": settings, "rows": json.loads(ask(model).to_json(orient="records", double_precision=12))})
    rows = read_json(path)["rows"]
    return pd.DataFrame([{name: float("nan") if value is None else value for name, value in row.items()} for row in rows])
