import errno
import os
import resource
import stat
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hydralens.errors import InputError
from hydralens.files import write_atomically, write_json, write_text


@contextmanager
def full_disk(n_bytes: int = 4096):
    """No file may grow beyond ``n_bytes``: what a full disk looks like from within a process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(params=["new", "old"])
def target(request, tmp_path):
    """A file that does not exist yet, or one that holds the word old."""
    path = tmp_path / "folder" / "file.txt"
    if request.param == "old":
        write_text(path, "old")
    return path


def assert_untouched(target):
    """The folder holds what it held: the old file, or nothing."""
    files = list(target.parent.iterdir()) if target.parent.exists() else []
    assert files in ([], [target])
    assert all(file.read_text() == "old" for file in files)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back_as_it_was(text, tmp_path_factory):
    path = write_text(tmp_path_factory.mktemp("text") / "deep" / "file.txt", text)
    assert path.read_bytes().decode() == text
    assert list(path.parent.iterdir()) == [path]


def test_json_is_readable_and_ends_in_a_newline(tmp_path):
    assert write_json(tmp_path / "a.json", {"name": "Größe", "rows": [1]}).read_text("utf-8") == '{\n  "name": "Größe",\n  "rows": [\n    1\n  ]\n}\n'


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_interrupted_write_changes_nothing(error, target):
    def write(path):
        path.write_text("half of the n")
        assert path.suffix == ".txt" and path.parent == target.parent
        raise error

    with pytest.raises(error):
        write_atomically(target, write)
    assert_untouched(target)


@pytest.mark.parametrize("call", ["tempfile.mkstemp", "os.replace"])
@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_system_that_refuses_is_wrong_input_with_the_reason(call, reason, target, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(call, refuse)
    with pytest.raises(InputError) as error:
        write_text(target, "new")
    assert str(error.value) == f"cannot write {target}: {os.strerror(reason)}; choose a writable folder with free space"
    assert_untouched(target)


@pytest.mark.parametrize("write", [lambda path: path.write_text("x" * 10_000), lambda path: save_file({"x": torch.zeros(10_000)}, path)])
def test_a_full_disk_is_wrong_input(write, target):
    with full_disk(), pytest.raises(InputError, match="cannot write .*: .*; choose a writable folder with free space"):
        write_atomically(target, write)
    assert_untouched(target)


def test_a_folder_under_a_file_is_wrong_input(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(InputError, match="file/deeper/x.txt: Not a directory"):
        write_text(tmp_path / "file" / "deeper" / "x.txt", "new")
    assert (tmp_path / "file").read_text() == "old"


def test_tensors_and_permissions_are_as_if_written_plainly(tmp_path):
    path = write_atomically(tmp_path / "a.safetensors", lambda temporary: save_file({"x": torch.arange(3)}, temporary))
    (tmp_path / "plain").write_text("")
    assert torch.equal(load_file(path)["x"], torch.arange(3))
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
