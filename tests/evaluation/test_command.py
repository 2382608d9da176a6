"""``hydralens evaluate`` from the outside: a saved model beside a saved hybrid, and what is refused."""

import json
import re
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import hydralens as hl
from hydralens import cli
from hydralens.figures import saving
from tests.hybrid.examples import TEACHER, mask_of
from tests.planted import RETRIEVER, planted_model, save_planted


@pytest.fixture
def command(monkeypatch, capsys):
    """``command("MODEL", "--out", path)`` -> exit code, stdout, stderr."""
    monkeypatch.setattr(saving, "BROWSERS", ())

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["hydralens", "evaluate", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    return save_planted(tmp_path_factory.mktemp("models") / "planted")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    """Of the planted model, all heads full but the one that retrieves, saved as ``hydralens build`` does."""
    folder, full = tmp_path_factory.mktemp("models") / "hybrid", torch.ones(3, 4, dtype=torch.bool)
    full[RETRIEVER] = False
    hl.build_hybrid(planted_model(), mask_of(planted_model(), full), **TEACHER).save_pretrained(folder)
    planted_model().tokenizer.save_pretrained(folder)
    return folder


def test_a_hybrid_beside_its_base_and_more_of_it_later(command, planted, hybrid, tmp_path):
    asked = [hybrid, "--against", planted, "--depths", "0.2,0.8", "--prompts", "6", "--out", tmp_path / "out"]
    code, out, err = command(*asked, "--tasks", "niah_single_2, speed", "--lengths", "100")
    found = pd.read_csv(tmp_path / "out" / "evaluation.csv").groupby("model", sort=False)["accuracy"].mean()
    assert code == 0 and "evaluating" in err and found[str(planted)] > 0.6 and found[str(hybrid)] == 0
    assert re.search(r"niah_single_2, 100 tokens +[456] of 6, .*   0 of 6, 0% \[0%, 39%\]\n", out) and out.endswith("evaluation.html\n")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cells").iterdir()}
    assert len(kept) == 4
    code, out, err = command(*asked, "--tasks", "niah_single_2", "--lengths", "100,130", "--quiet")
    now = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cells").iterdir()}
    assert (code, out, err) == (0, "", "") and len(now) == 6 and kept.items() <= now.items()
    assert set(pd.read_csv(tmp_path / "out" / "evaluation.csv")["length"]) == {100, 130}
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["depths"] == [0.2, 0.8]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "niah_single_2,magic"], "task 'magic' is unknown; choose from niah_single_1, "),
        (["--lengths", "100,many"], "--lengths '100,many' are not numbers with commas between them, such as 512,1024"),
        (["--depths", "top"], "--depths 'top' are not numbers"),
        (["--depths", "2"], "depth=2.0 is not in 0..1"),
        (["--lengths", "100,20"], "n_tokens=20 has no room for needle and question"),
        (["--tasks", "perplexity", "--text", "nowhere"], "no file or directory 'nowhere'"),
        (["--against", "tests"], "directory 'tests' has no config.json"),
    ],
)
def test_wrong_input_is_one_line(arguments, said, command, planted, tmp_path):
    code, out, err = command(planted, "--out", tmp_path / "out", *arguments)
    assert (code, out) == (2, "") and re.fullmatch(r"hydralens: [^\n]+\n", err) and said in err
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_hybrid_without_tokenizer(command, planted, tmp_path):
    hl.build_hybrid(planted_model(), mask_of(planted_model(), torch.ones(3, 4, dtype=torch.bool))).save_pretrained(tmp_path / "bare")
    code, _, err = command(tmp_path / "bare", "--against", planted, "--out", tmp_path / "out")
    assert code == 2 and re.fullmatch(r"hydralens: .*bare has no tokenizer; put the base model's tokenizer files into its folder\n", err)
