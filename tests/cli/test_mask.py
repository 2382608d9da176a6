import pytest
import torch
from typer.testing import CliRunner

from hydralens.cli.mask import app
from hydralens.errors import InputError
from hydralens.head_mask import HeadMask
from tests.tiny import tiny_hf
from tests.toy_masks import toy_info

FULL = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1]]).bool()


@pytest.fixture
def file(tmp_path):
    return HeadMask.of(FULL, toy_info(2, 4, 2), rule="global").save(tmp_path / "head_mask.json")


def run(*arguments) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_show_prints_the_map(file):
    assert run("show", file).splitlines() == [
        "HeadMask(toy: 4 of 8 query heads full by rule global, 0 with signal; 3 of 4 KV heads survive)",
        "    01 23",
        "L0  ■· ··   1 full, 1 of 2 KV",
        "L1  ·■ ■■   3 full, 2 of 2 KV",
        "50.0% of the query heads and 75.0% of the KV cache survive (0.1 MiB per 1,024 tokens at 16 bits). ■ full attention, · linear",
    ]


def test_convert_there_and_back(file, tmp_path):
    run("convert", file, tmp_path / "heads.txt", "--to", "qrhead")
    assert (tmp_path / "heads.txt").read_text() == "0-0,1-1,1-2,1-3\n"
    run("convert", tmp_path / "heads.txt", tmp_path / "again.json", "--like", file)
    assert torch.equal(HeadMask.load(tmp_path / "again.json").array, FULL)


def test_convert_to_kv_heads(file, tmp_path):
    run("convert", file, tmp_path / "gates.tsv", "--to", "duo", "--space", "kv", "--group-reduce", "mean")
    assert (tmp_path / "gates.tsv").read_text() == "1.0\t0.0\n1.0\t1.0\n"
    run("convert", tmp_path / "gates.tsv", tmp_path / "pruned.json", "--to", "prune_heads", "--space", "query", "--like", file)
    assert (tmp_path / "pruned.json").read_text() == '{"0": [2, 3]}\n'


def test_model_is_opened_for_its_shape_and_weights(file, tmp_path):
    tiny_hf("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "heads.txt").write_text("3-1")
    run("convert", tmp_path / "heads.txt", tmp_path / "mask.json", "--model", tmp_path / "model")
    assert "valid, HeadMask(" in run("validate", tmp_path / "mask.json", "--model", tmp_path / "model")
    with pytest.raises(InputError, match="model.n_layers is 2, but the model has 4"):
        run("validate", file, "--model", tmp_path / "model")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--to", "duo"], "mask[0] splits the group of KV head 0"),
        (["--to", "csv"], "format 'csv' is unknown"),
        (["--space", "keys"], "--space 'keys' is unknown"),
        (["--space", "kv", "--group-reduce", "median"], "group_reduce 'median' is unknown"),
        (["--model", "m", "--like", "l"], "--model and --like both say"),
        (["--k", "3"], "threshold and k are for scores"),
    ],
)
def test_wrong_options_leave_no_file(arguments, line, file, tmp_path):
    with pytest.raises(InputError) as error:
        run("convert", file, tmp_path / "out", *arguments)
    assert line in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["show", "convert", "validate"])
def test_every_verb_has_an_example(verb):
    assert f"Example: hydralens mask {verb} " in " ".join(run(verb, "--help").split())
