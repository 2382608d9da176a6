"""What each head loses as a full and as a linear head, measured by a shared alignment, as a way to choose heads."""

from pathlib import Path

import pandas as pd
import torch

from hydralens.detectors.base import whole_effects
from hydralens.errors import InputError
from hydralens.models.info import ModelInfo
from hydralens.models.lens import LensModel
from hydralens.scores import HeadScores, scores_of


def conversion_gap(path: str | Path, model: LensModel | ModelInfo) -> HeadScores:
    """The error a head is left with as a linear head minus the one as a full head: large where full attention is worth keeping.

    Args:
        path: ``align/head_errors.csv`` of a transfer with a shared alignment.

    Raises:
        InputError: the file cannot be read, or does not have one row for each of the model's heads.
    """
    info = model if isinstance(model, ModelInfo) else model.info
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}; give align/head_errors.csv of a transfer with a shared alignment") from None
    missing = {"layer", "head", "full", "linear"} - set(frame.columns)
    if missing:
        raise InputError(f"{path}: has no column {sorted(missing)[0]!r}; give align/head_errors.csv of a transfer with a shared alignment")
    cells = set(zip(frame["layer"], frame["head"], strict=True))
    if len(frame) != len(cells) or cells != {(layer, head) for layer in range(info.n_layers) for head in range(info.n_heads)}:
        raise InputError(f"{path}: has {len(frame)} heads, the model has {info.n_layers} layers of {info.n_heads}; it was made with another model")
    gap = torch.zeros(1, info.n_layers, info.n_heads)
    gap[0, frame["layer"].to_numpy(), frame["head"].to_numpy()] = torch.tensor((frame["linear"] - frame["full"]).tolist())
    return scores_of(info, "conversion_gap", [whole_effects(info, "conversion_gap", gap, "z", "all", "aligned", "retrieval")], [])
