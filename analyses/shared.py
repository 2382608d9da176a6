"""What the analyses share: their arguments, the head scores several of them read, and how results are written."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pandas as pd
import plotly.graph_objects as go

from hydralens.environment import made_with
from hydralens.errors import InputError
from hydralens.figures import save_figures
from hydralens.files import write_atomically, write_text
from hydralens.models.lens import LensModel
from hydralens.probes import reasoning, retrieval
from hydralens.probes.base import Probe
from hydralens.scores import HeadScores, paper_score
from hydralens.scoring import score_heads

SUB_PROBES = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2")  # five, as in the paper, which does not name them
TASKS = ("niah_single_2", "niah_multikey_1")  # asked on prompts that were not used for scoring: one needle, and one among four
HELD_OUT = 555_000  # added to the seed of such prompts


def arguments(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256, help="tokens per retrieval prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    return parser


def arguments_with_scores(doc: str) -> argparse.ArgumentParser:
    parser = arguments(doc)
    parser.add_argument("--scores", type=Path, help="a folder with head scores, measured and saved there if it holds none; default: OUT/head_scores")
    parser.add_argument("--pairs", type=int, default=8, help="pairs per probe, where scores have to be measured")
    return parser


def head_scores(model: LensModel, args: argparse.Namespace) -> HeadScores:
    """The scores in ``--scores``. If there are none: restriction scores and direct effects, both of all pairs, of the five sub-probes and the reasoning probes.

    Raises:
        InputError: the scores are another model's, or without direct effects.
    """
    folder = args.scores or args.out / "head_scores"
    if not (folder / "scores.json").exists():
        probes = retrieval(model, args.pairs, args.tokens, args.seed, shapes=SUB_PROBES) + reasoning(model, args.pairs, args.seed)
        score_heads(model, probes, required=("retrieval",), pairs_at_most=args.pairs, shards=folder / "shards", verbose=True).save(folder)
        rmtree(folder / "shards")
    scores = HeadScores.load(folder)
    if scores.model.fingerprint != model.info.fingerprint:
        raise InputError(
            f"the head scores in {folder} are of {scores.model.id}, the model is {model.info.id}; give the folder of its own scores, or an empty one"
        )
    if not scores.receivers:
        raise InputError(f"the head scores in {folder} hold no direct effects; make them with: hydralens score MODEL --out {folder}")
    return scores


def by_paper(scores: HeadScores) -> HeadScores:
    """The paper's composite of the direct effects behind ``scores`` (Eq. 11-12 without senders)."""
    return replace(scores, method="paper", measured={}, senders={}, composite=paper_score(scores.receivers, {}))


def held_out(model: LensModel, n_prompts: int, n_tokens: int, seed: int) -> list[Probe]:
    """``n_prompts`` of each task, from seeds that no scoring used."""
    return retrieval(model, n_prompts, n_tokens, seed + HELD_OUT, shapes=TASKS, corruptions=("value",))


def scored_on(scores: HeadScores) -> str:
    """What the scores were measured on, for the head of a table."""
    entries = [f"{probe['name']} ({probe['n_pairs']})" for probe in scores.probes]
    return f"Scores: method {scores.method}, prompts of up to {max(probe['n_tokens'] for probe in scores.probes)} tokens; probes (pairs): {', '.join(entries)}."


def write_results(
    out: Path, name: str, model: LensModel, frames: Mapping[str, pd.DataFrame], figures: Mapping[str, go.Figure], title: str, lines: Sequence[str]
) -> None:
    """``name.md``, which is also printed, a CSV for every frame, and the figures in ``figures/``."""
    for stem, frame in frames.items():
        write_atomically(out / f"{stem}.csv", lambda path, frame=frame: frame.to_csv(path, index=False, float_format="%.4g"))
    save_figures(figures, out / "figures")
    text = "\n".join([f"# {title}: {model.info.id}", "", made_with(model), "", *lines, ""])
    write_text(out / f"{name}.md", text)
    print(text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def interval(mean: float, low: float, high: float) -> str:
    return f"{mean:.2f} [{low:.2f} {high:.2f}]"


def run_script(name: str, main: Callable[[], None]) -> None:
    """Run ``main``; wrong input is one line and exit code 2."""
    try:
        main()
    except InputError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
