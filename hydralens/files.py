"""Files are written whole or not at all: a temporary file beside the target, then a rename. What cannot be read is refused in one line."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hydralens.errors import InputError


def write_atomically(path: str | Path, write: Callable[[Path], None]) -> Path:
    """Call ``write(temporary_path)`` and rename the result to ``path``; on any failure nothing is left behind.

    The temporary file has the target's suffix, lies in the target's folder (so that the rename cannot cross a file
    system) and is removed on every exception, ``KeyboardInterrupt`` included.

    Raises:
        InputError: the folder cannot be written or the disk is full.
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise InputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}; choose a writable folder with free space") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return path


def write_text(path: str | Path, text: str) -> Path:
    """Write ``text`` as UTF-8, whole or not at all."""
    return write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: str | Path, value: Any) -> Path:
    """Write ``value`` as indented JSON ending in a newline, whole or not at all."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_text(path: str | Path) -> str:
    """A UTF-8 text file as it is.

    Raises:
        InputError: it cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; give the path of a readable file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start}); give a text file") from error


def read_json(path: str | Path) -> Any:
    """A JSON file in which no object names a key twice.

    Raises:
        InputError: it cannot be read, is not JSON (truncated, damaged), or has a duplicate key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict:
        values = {}
        for key, value in pairs:
            if key in values:
                raise InputError(f"{path}: {key}: appears twice in one object; remove one of them")
            values[key] = value
        return values

    text = read_text(path)
    try:
        return json.loads(text, object_pairs_hook=unique)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # besides damage: integers of thousands of digits and endless nesting
        raise InputError(f"{path}: is not valid JSON: {error}; the file is cut off or damaged, write it anew") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
