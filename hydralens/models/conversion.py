"""A GGUF file is converted once: into a transformers folder in the cache, under the file's sha256."""

import hashlib
import io
import os
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import torch
from platformdirs import user_cache_path
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from hydralens.errors import InputError, UnsupportedModelError
from hydralens.models.anatomy import check_family


def cache_folder() -> Path:
    """``$HYDRALENS_CACHE``, or else the user's cache folder."""
    chosen = os.environ.get("HYDRALENS_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache_path("hydralens")


def converted(gguf: Path) -> Path:
    """The folder with ``gguf`` as a transformers model (float32) and tokenizer; converts on the first call (half a minute for 135 M parameters).

    Raises:
        InputError: the file is not GGUF or is damaged, or the cache cannot be written.
        UnsupportedModelError: the file holds a family that the engine cannot work with.
    """
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise InputError(f"{gguf} is not a GGUF file (it does not begin with the letters GGUF); give a .gguf file or a directory with config.json")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_folder() / "models" / digest
    if not target.is_dir():
        _convert(gguf, target)
    return target


def _convert(gguf: Path, target: Path) -> None:
    print(f"converting {gguf.name} into {target} (once)", file=sys.stderr, flush=True)
    config, tensors, tokenizer = _read(gguf)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as temporary:
            folder = Path(temporary) / "model"
            config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            _rename(folder, target)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write the converted model to {target}: {reason}; set HYDRALENS_CACHE to a writable folder with free space") from None


def _read(gguf: Path) -> tuple[PreTrainedConfig, dict[str, Tensor], PreTrainedTokenizerBase]:
    """Config, tensors under transformers' names, and tokenizer.

    The tensors are written as they are, without a model in between: ``from_pretrained`` of a GGUF file needs accelerate and gives a model that
    counts as quantised and cannot be saved.
    """
    try:
        with redirect_stderr(io.StringIO()):  # transformers shows a progress bar here that cannot be turned off
            config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
            check_family(config.model_type)
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(config)
            tensors = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=skeleton)["tensors"]
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except UnsupportedModelError:
        raise
    except Exception as error:  # a damaged file fails in the reader in every possible way
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(f"{gguf} cannot be read as a GGUF language model: {type(error).__name__}: {reason}") from None
    config.architectures = [type(skeleton).__name__]
    return config, {name: tensor.contiguous() for name, tensor in tensors.items()}, tokenizer


def _rename(folder: Path, target: Path) -> None:
    """Give a finished folder its name, unless another process was quicker."""
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise
