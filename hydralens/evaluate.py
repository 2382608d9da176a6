"""The evaluation in one call: models beside each other, as tables, figures and a page. What is finished is not computed again."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from tqdm.auto import tqdm

from hydralens.environment import environment
from hydralens.errors import InputError
from hydralens.evaluation import ask_reasoning, ask_retrieval, made_documents, perplexity, retrieval_prompts, speed
from hydralens.evaluation.speed import STEPS
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

    Every finished cell (model, task, length) is kept in ``OUT/cells``, under a name made of the model and all that its values depend on, so that a killed
    run goes on and other settings never mix.

    Args:
        models: name -> model, the one to compare with first. All are asked with the tokenizer of the first.
        tasks: any of ``TASKS``: RULER's needle tasks, reasoning tasks (whose prompts have a length of their own), ``perplexity`` (which reads documents
            to the greatest length), ``speed``.
        lengths: tokens of the prompts.
        depths: where the needle lies, 0 to 1.
        n_prompts: of a task and length, spread over the depths.
        text: a file or folder for ``perplexity``; by default made prose, which is simple.

    Returns:
        The tables under ``evaluation``, ``perplexity`` and ``speed``, those that were asked for.

    Raises:
        InputError: an unknown task, a length too short for it, tokenizers that differ, a text too short, or ``out`` cannot be written. Found out before
            anything is asked.
    """
    tasks, lengths, depths = (list(dict.fromkeys(given)) for given in (tasks, lengths, depths))
    _check(models, tasks, lengths, depths, n_prompts, seed)
    out, first = Path(out), next(iter(models.values()))
    documents = _documents(text, first, max(lengths), seed) if "perplexity" in tasks else []
    read = hashlib.sha256(b"".join(document.numpy().tobytes() for document in documents)).hexdigest()
    tables: dict[str, list[pd.DataFrame]] = {}
    took = []
    cells = [(name, task, length) for name in models for task in tasks for length in _lengths(task, lengths)]
    for name, task, length in tqdm(cells, desc="evaluating", disable=not verbose):
        if task in RETRIEVAL:
            settings = {"depths": depths, "n_prompts": n_prompts, "seed": seed}
            kind, ask = "evaluation", lambda m, t=task, n=length: ask_retrieval(m, t, n, depths=depths, n_prompts=n_prompts, seed=seed, verbose=verbose)
        elif task in REASONING:
            settings = {"n_prompts": n_prompts, "seed": seed}
            kind, ask = "evaluation", lambda m, t=task: ask_reasoning(m, t, n_prompts=n_prompts, seed=seed, verbose=verbose)
        elif task == "perplexity":
            settings = {"text": read}
            kind, ask = "perplexity", lambda m, n=length: perplexity(m, documents, n, verbose=verbose)
        else:
            settings = {"device": environment(first)["device"]}
            kind, ask = "speed", lambda m, n=length: pd.DataFrame([speed(m, n)])
        # The weights of each, the tokenizer of the first: what is asked is the same to the token.
        found, seconds = _cell(out / "cells", replace(models[name], tokenizer=first.tokenizer), {"task": task, "length": length} | settings, ask)
        tables.setdefault(kind, []).append(found.assign(model=name)[["model", *found.columns]])
        took.append({"model": name, "task": task, "length": length, "seconds": seconds})
    joined = {kind: pd.concat(parts, ignore_index=True) for kind, parts in tables.items()}
    for kind, frame in joined.items():
        write_atomically(out / f"{kind}.csv", lambda path, frame=frame: frame.to_csv(path, index=False, float_format="%.6g"))
    about = {"models": {name: model.info.model_dump(mode="json") for name, model in models.items()}, "tasks": tasks, "lengths": lengths}
    about |= {"depths": depths, "n_prompts": n_prompts, "seed": seed, "text": "made prose" if text is None else str(text)} | environment(first)
    write_json(out / "evaluation.json", about | {"seconds": round(sum(cell["seconds"] for cell in took), 1), "cells": took})
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


def _lengths(task: str, lengths: list[int]) -> list[int | None]:
    """Those at which a task is asked; reasoning prompts have a length of their own."""
    return [None] if task in REASONING else [max(lengths)] if task == "perplexity" else lengths


def _check(models: dict[str, LensModel], tasks: list[str], lengths: list[int], depths: list[float], n_prompts: int, seed: int) -> None:
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise InputError(f"task {unknown[0]!r} is unknown; choose from {', '.join(TASKS)}" if unknown else f"no task; choose from {', '.join(TASKS)}")
    if not lengths or min(lengths) < 2:
        raise InputError(f"lengths are {lengths}; give one or more numbers of tokens")
    if not depths:
        raise InputError("depths are empty; give one or more shares of the text before the needle, 0 to 1")
    if n_prompts < 1:
        raise InputError(f"n_prompts is {n_prompts}; it must be at least 1")
    for name, model in models.items():
        if model.tokenizer is None:
            raise InputError(f"{name} has no tokenizer; put the base model's tokenizer files into its folder")
        most, reach = getattr(model.hf.config, "n_positions", None), max(lengths) + STEPS * ("speed" in tasks)
        if most is not None and reach > most:  # learned positions end; rotary ones go on
            raise InputError(f"{name} has positions for {most} tokens and would read {reach}; give shorter lengths")
    first, *others = models.items()
    for name, model in others:
        if model.tokenizer.get_vocab() != first[1].tokenizer.get_vocab():
            raise InputError(f"{name} and {first[0]} have different tokenizers; what they are asked would not be the same")
    for task in tasks:
        if task in RETRIEVAL:
            retrieval_prompts(first[1], task, min(lengths), depths=depths, n_prompts=n_prompts, seed=seed)


def _documents(text: str | Path | None, model: LensModel, length: int, seed: int) -> list[torch.Tensor]:
    """Documents of ``length`` tokens or more."""
    if text is None:
        return made_documents(model.tokenizer, DOCUMENTS, length, seed)
    corpus = from_files(text, model.tokenizer)
    longest = int(np.diff(corpus.documents).max())
    if longest < length:
        raise InputError(f"no document of {text} has {length} tokens, the longest has {longest}; use longer text or shorter lengths")
    enough = np.flatnonzero(np.diff(corpus.documents) >= length)[:DOCUMENTS]
    return [torch.from_numpy(corpus.document(index).astype("int64")) for index in enough]


def _cell(folder: Path, model: LensModel, settings: dict[str, Any], ask: Callable[[LensModel], pd.DataFrame]) -> tuple[pd.DataFrame, float]:
    """What ``ask`` gives, or gave before, and the seconds that it took."""
    key = json.dumps([version("hydralens"), model.info.fingerprint, str(model.dtype), settings], sort_keys=True)
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    if not path.exists():
        begun = time.perf_counter()
        rows = json.loads(ask(model).to_json(orient="records", double_precision=12))
        write_json(path, {"settings": settings, "seconds": round(time.perf_counter() - begun, 2), "rows": rows})
    kept = read_json(path)
    rows = [{name: float("nan") if value is None else value for name, value in row.items()} for row in kept["rows"]]
    return pd.DataFrame(rows), kept["seconds"]
