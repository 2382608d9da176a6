"""The front door: light to import, every public name behind it."""

import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest

import hydralens


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_is_light():
    heavy = run("import sys, hydralens; print(*sorted({'torch', 'transformers', 'numpy', 'pandas', 'plotly', 'pydantic'} & set(sys.modules)))")
    assert heavy.split() == []


@pytest.mark.parametrize("name", hydralens.__all__)
def test_every_public_name_resolves_to_its_own_module(name):
    value = getattr(hydralens, name)
    assert name in dir(hydralens)
    home = hydralens._HOME.get(name)
    assert value.__name__ == (name if home else f"hydralens.{name}")
    assert home is None or value.__module__ == home


def test_modules_are_reached_without_importing_them_by_name():
    assert run("import hydralens as hl; print(hl.probes.__name__)").strip() == "hydralens.probes"


def test_star_import_and_wrong_names():
    assert run("from hydralens import *; print(load_model.__name__, probes.__name__)").split() == ["load_model", "hydralens.probes"]
    with pytest.raises(AttributeError, match="no_such_name"):
        hydralens.no_such_name  # noqa: B018


def test_the_installed_package_has_this_version_and_a_command():
    assert version("hydralens") == hydralens.__version__
    (command,) = entry_points(group="console_scripts", name="hydralens")
    assert command.value == "hydralens.cli:main"
