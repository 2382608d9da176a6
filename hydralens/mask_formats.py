"""Head lists of other projects, read and written.

========================  ============  =====================================================================================
format                    space         the file
========================  ============  =====================================================================================
``hydralens``             both          ``head_mask.json``
``duo``                   KV heads      DuoAttention ``full_attention_heads.tsv``: ``[layer, kv_head]`` gates in 0..1, 1 = full
``retrieval_head``        query heads   Retrieval_Head JSON ``{"layer-head": [score per trial]}``: a head's score is the mean
``qrhead``                query heads   QRHead ``21-31,21-18`` (layer-head, best first), alone or as ``attn_head_set`` in a YAML file
``head_mask``             query heads   the ``head_mask`` tensor of transformers before 5 as JSON ``[layer][head]``: 1 = keep
``prune_heads``           query heads   the argument of ``prune_heads`` of transformers before 5 as JSON ``{"layer": [heads to REMOVE]}``
========================  ============  =====================================================================================

Exporting to a foreign format and importing again (``duo`` and ``retrieval_head`` at threshold 0.5) gives the same array. Model, rule, ratio and
probes are in none of them (nor DuoAttention's window sizes, which lie in a ``config.json`` beside its file), and scores are not exported: the two score
formats are written as 1 and 0, so that every reader's cut finds this mask.
"""

import json
import math
import re
from pathlib import Path
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hydralens.errors import InputError
from hydralens.files import read_json, read_text, write_text
from hydralens.head_mask import HeadMask
from hydralens.models.info import ModelInfo
from hydralens.models.lens import LensModel

Format = Literal["hydralens", "duo", "retrieval_head", "qrhead", "head_mask", "prune_heads"]
FORMATS: tuple[str, ...] = get_args(Format)
DUO_THRESHOLD = 0.5  # DuoAttention's own default


def export_mask(mask: HeadMask, path: str | Path, format: Format) -> Path:
    """Write ``mask`` in another project's format.

    A query mask whose groups are all full or all linear is written as ``duo`` without loss; a KV mask must be repeated first (``mask.to_query()``).

    Raises:
        InputError: unknown format, the format cannot hold the mask's space, or the path cannot be written.
    """
    _known(format)
    if format == "hydralens":
        return mask.save(path)
    if format == "duo":
        if mask.space == "query":
            groups = mask.array.unflatten(-1, (-1, mask.model.group))
            split = (groups.any(-1) != groups.all(-1)).nonzero().tolist()
            if split:
                layer, kv_head = split[0]
                raise InputError(
                    f"mask[{layer}] splits the group of KV head {kv_head}, duo files hold KV heads; reduce groups first: mask.to_kv('any'), or --space kv"
                )
        return write_text(path, "".join("\t".join(f"{gate:.1f}" for gate in row) + "\n" for row in mask.kept_kv_heads.double().tolist()))
    if mask.space == "kv":
        raise InputError(f"mask: space is 'kv', and {format} files hold query heads; repeat it over its groups first: mask.to_query(), or --space query")
    rows = mask.mask
    heads = [(layer, head) for layer, row in enumerate(rows) for head, full in enumerate(row) if full]
    match format:
        case "retrieval_head":
            text = json.dumps({f"{layer}-{head}": [float(full)] for layer, row in enumerate(rows) for head, full in enumerate(row)})
        case "qrhead":
            scores = mask.scores or [[0.0] * len(row) for row in rows]
            text = ",".join(f"{layer}-{head}" for layer, head in sorted(heads, key=lambda at: (-scores[at[0]][at[1]], at)))
        case "head_mask":
            text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]"
        case "prune_heads":
            removed = {str(layer): [head for head, full in enumerate(row) if not full] for layer, row in enumerate(rows)}
            text = json.dumps({layer: heads for layer, heads in removed.items() if heads})
    return write_text(path, text + "\n")


def import_mask(
    path: str | Path,
    model: LensModel | ModelInfo | None = None,
    format: Format | None = None,
    *,
    threshold: float | None = None,
    k: int | None = None,
) -> HeadMask:
    """Read another project's head list as a mask for ``model``.

    Args:
        model: whose heads they are; foreign files do not say (for ``hydralens`` files it is checked when given).
        format: guessed from the name and the content when left out.
        threshold: for ``duo`` (default 0.5) and ``retrieval_head``: heads at or above it are full.
        k: for the same two, instead of a threshold: how many heads are full, best first; ties by lower layer, then lower head.

    Raises:
        InputError: names the file and the field or line, what is wrong and how to mend it.
    """
    format = guess_format(path) if format is None else format
    _known(format)
    if format not in ("duo", "retrieval_head") and (threshold is not None or k is not None):
        raise InputError(f"{path}: threshold and k are for scores, but a {format} file says which heads are full; leave them out")
    if format == "hydralens":
        return HeadMask.load(path, model)
    if model is None:
        raise InputError(f"{path}: a {format} file does not say which model it is for; give the model or a head mask made for it")
    info = model if isinstance(model, ModelInfo) else model.info
    if format not in ("duo", "retrieval_head"):
        read = {"qrhead": _qrhead, "head_mask": _head_mask, "prune_heads": _prune_heads}[format]
        return HeadMask.of(read(path, info), info, rule=f"import({format})")

    scores = read_duo_gates(path, info) if format == "duo" else _retrieval_head(path, info)
    if threshold is not None and k is not None:
        raise InputError(f"{path}: threshold {threshold} and k={k} are two cuts; give one of them")
    if threshold is None and k is None:
        if format == "retrieval_head":
            raise InputError(f"{path}: a retrieval_head file holds scores, not a choice; give k (how many heads stay full) or a threshold")
        threshold = DUO_THRESHOLD
    if threshold is not None and not math.isfinite(threshold):
        raise InputError(f"{path}: threshold is {threshold}; give a finite number")
    if k is not None:
        if not 1 <= k <= scores.numel():
            raise InputError(f"{path}: k is {k}, the file has {scores.numel()} heads; give a number from 1 to {scores.numel()}")
        full = torch.zeros(scores.numel(), dtype=torch.bool)
        full[scores.flatten().argsort(descending=True, stable=True)[:k]] = True
        full, cut, tie_break = full.reshape(scores.shape), f"k={k}", "score desc, lower layer, lower head"
    else:
        full, cut, tie_break = scores >= threshold, f"threshold={threshold}", "none"
    space = "kv" if format == "duo" else "query"
    binary = bool(((scores == 0) | (scores == 1)).all())  # a mask written as scores: there are no scores to keep
    stored = None if binary else scores.repeat_interleave(info.n_heads // scores.shape[-1], -1)
    return HeadMask.of(full, info, rule=f"import({format}, {cut})", tie_break=tie_break, space=space, scores=stored)


def guess_format(path: str | Path) -> Format:
    """The format by file name (``.tsv``, ``.txt``, ``.yaml``) or, for JSON, by content.

    Raises:
        InputError: neither tells.
    """
    suffix = Path(path).suffix
    if suffix == ".tsv":
        return "duo"
    if suffix in (".txt", ".yaml", ".yml"):
        return "qrhead"
    content = read_json(path) if suffix == ".json" else None
    if isinstance(content, list):
        return "head_mask"
    if isinstance(content, dict):
        if "schema_version" in content:
            return "hydralens"
        if content and all("-" in key for key in content):
            return "retrieval_head"
        if all(key.isdecimal() for key in content):
            return "prune_heads"
    raise InputError(f"{path}: cannot tell its format; say which: {', '.join(FORMATS)}")


# --- one reader a format -------------------------------------------------------------------------------------------


def read_duo_gates(path: str | Path, info: ModelInfo) -> Float[Tensor, "layer kv_head"]:
    """Gates, clipped to 0..1 as DuoAttention's loader does (training leaves some just outside)."""
    lines = read_text(path).splitlines()
    if len(lines) != info.n_layers:
        raise InputError(f"{path}: has {len(lines)} lines, the model has n_layers {info.n_layers}; give the file of this model")
    rows = []
    for number, line in enumerate(lines, 1):
        cells = line.split("\t")
        if len(cells) != info.n_kv_heads:
            raise InputError(f"{path}: line {number} has {len(cells)} columns, the model has n_kv_heads {info.n_kv_heads}; duo files hold one gate per KV head")
        rows.append([_number(cell, f"{path}: line {number}, column {column}") for column, cell in enumerate(cells, 1)])
    return torch.tensor(rows, dtype=torch.float64).clamp(0, 1)


def _retrieval_head(path: str | Path, info: ModelInfo) -> Float[Tensor, "layer head"]:
    content = _object(path, '{"layer-head": [score per trial]}')
    scores = torch.full((info.n_layers, info.n_heads), torch.nan, dtype=torch.float64)
    for key, trials in content.items():
        layer, head = _place(key, info, f"{path}: {key!r}")
        if not isinstance(trials, list) or not trials:
            raise InputError(f"{path}: {key!r} is {_short(trials)}; give a list of one score per trial")
        scores[layer, head] = sum(_number(trial, f"{path}: {key!r}[{index}]") for index, trial in enumerate(trials)) / len(trials)
    if scores.isnan().any():
        layer, head = scores.isnan().nonzero()[0].tolist()
        raise InputError(
            f"{path}: '{layer}-{head}' is missing, one of {int(scores.isnan().sum())}; give a score for each of {info.n_layers} x {info.n_heads} heads"
        )
    return scores


def _qrhead(path: str | Path, info: ModelInfo) -> Bool[Tensor, "layer head"]:
    text = read_text(path)
    value = re.search(r"^[ \t]*attn_head_set[ \t]*:[ \t]*(.*)$", text, re.MULTILINE)
    listed = (value[1] if value else text).strip().strip("\"'").strip()
    full = torch.zeros(info.n_layers, info.n_heads, dtype=torch.bool)
    for number, entry in enumerate(listed.split(",") if listed else [], 1):
        where = f"{path}: entry {number} ({_short(entry.strip())})"
        place = _place(entry.strip(), info, where)
        if full[place]:
            raise InputError(f"{where} is listed twice; remove one of them")
        full[place] = True
    return full


def _head_mask(path: str | Path, info: ModelInfo) -> Bool[Tensor, "layer head"]:
    rows = read_json(path)
    if not isinstance(rows, list) or len(rows) != info.n_layers:
        raise InputError(
            f"{path}: has {len(rows) if isinstance(rows, list) else 'no'} rows, the model has n_layers {info.n_layers}; give [layer][head] of 0 and 1"
        )
    for layer, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != info.n_heads:
            columns = len(row) if isinstance(row, list) else "no"
            raise InputError(f"{path}: row {layer} has {columns} columns, the model has n_heads {info.n_heads}; give [layer][head] of 0 and 1")
        for head, value in enumerate(row):
            if isinstance(value, bool) or value not in (0, 1):
                raise InputError(f"{path}: [{layer}][{head}] is {_short(value)}; write 1 for a head to keep and 0 for one to mask")
    return torch.tensor(rows).bool()


def _prune_heads(path: str | Path, info: ModelInfo) -> Bool[Tensor, "layer head"]:
    full = torch.ones(info.n_layers, info.n_heads, dtype=torch.bool)
    for key, heads in _object(path, '{"layer": [heads to remove]}').items():
        layer = _index(key, info.n_layers, "n_layers", f"{path}: layer {key!r}")
        if not isinstance(heads, list):
            raise InputError(f"{path}: layer {key!r} is {_short(heads)}; give a list of the heads to remove")
        for head in heads:
            if type(head) is not int:
                raise InputError(f"{path}: layer {key!r} lists {_short(head)}; give head numbers")
            head = _index(str(head), info.n_heads, "n_heads", f"{path}: layer {key!r}, head {head}")
            if not full[layer, head]:
                raise InputError(f"{path}: layer {key!r} lists head {head} twice; remove one of them")
            full[layer, head] = False
    return full


# --- pieces of them ------------------------------------------------------------------------------------------------


def _known(format: str) -> None:
    if format not in FORMATS:
        raise InputError(f"format {format!r} is unknown; choose one of {', '.join(FORMATS)}")


def _object(path: str | Path, form: str) -> dict:
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a JSON {type(content).__name__}; the form is {form}")
    return content


def _place(entry: str, info: ModelInfo, where: str) -> tuple[int, int]:
    """``"21-18"`` as ``(21, 18)``, inside the model."""
    layer, dash, head = entry.partition("-")
    if not dash:
        raise InputError(f"{where} is not of the form layer-head; write for example 21-18")
    return _index(layer, info.n_layers, "n_layers", where), _index(head, info.n_heads, "n_heads", where)


def _index(text: str, size: int, field: str, where: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,8}", text):
        raise InputError(f"{where}: {_short(text)} is not a layer or head number; count from 0 and write plain digits")
    if int(text) >= size:
        raise InputError(f"{where}: {text} is outside the model, whose {field} is {size}; give the file of this model (numbers run from 0 to {size - 1})")
    return int(text)


def _number(value: str | float, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{where}: {_short(value)} is not a finite number; give a score")
    return number


def _short(value: object) -> str:
    return repr(value)[:60]
