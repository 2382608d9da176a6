import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.head_mask import HeadMask
from hydralens.mask_formats import export_mask, guess_format, import_mask
from tests.toy_masks import masks, toy_info

files = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
SUFFIX = {"hydralens": "json", "duo": "tsv", "retrieval_head": "json", "qrhead": "txt", "head_mask": "json", "prune_heads": "json"}
QUERY_FORMATS = ["retrieval_head", "qrhead", "head_mask", "prune_heads"]
INFO = toy_info(2, 4, 2)


def toy_mask(rows=((1, 0, 0, 0), (0, 1, 1, 1)), scores=None) -> HeadMask:
    return HeadMask.of(torch.tensor(rows).bool(), INFO, rule="global", scores=scores)


def there_and_back(mask: HeadMask, format: str, folder) -> HeadMask:
    path = export_mask(mask, folder / f"file.{SUFFIX[format]}", format)
    assert guess_format(path) == format
    return import_mask(path, mask.model, threshold=0.5 if format == "retrieval_head" else None)


def write(folder, name: str, content) -> object:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


# --- round trips ---


@pytest.mark.parametrize("format", QUERY_FORMATS)
@files
@given(mask=masks(space="query"))
def test_query_masks_survive_query_formats(mask, format, tmp_path):
    again = there_and_back(mask, format, tmp_path)
    assert (again.mask, again.space, again.model, again.scores) == (mask.mask, "query", mask.model, None)


@files
@given(mask=masks(space="kv"))
def test_kv_masks_and_uniform_query_masks_survive_duo(mask, tmp_path):
    again = there_and_back(mask, "duo", tmp_path)
    assert (again.mask, again.space, again.model, again.scores) == (mask.mask, "kv", mask.model, None)
    repeated = mask.to_query()
    assert there_and_back(repeated, "duo", tmp_path).to_query().mask == repeated.mask


@files
@given(mask=masks())
def test_own_format_loses_nothing(mask, tmp_path):
    assert there_and_back(mask, "hydralens", tmp_path) == mask


def test_files_are_exactly_these(tmp_path):
    mask = toy_mask(scores=torch.tensor([[0.25, 0.0, 0.0, 0.0], [0.0, 0.25, 0.5, 0.125]]))
    texts = {format: export_mask(mask, tmp_path / format, format).read_text(encoding="utf-8") for format in QUERY_FORMATS}
    assert texts == {
        "retrieval_head": '{"0-0": [1.0], "0-1": [0.0], "0-2": [0.0], "0-3": [0.0], "1-0": [0.0], "1-1": [1.0], "1-2": [1.0], "1-3": [1.0]}\n',
        "qrhead": "1-2,0-0,1-1,1-3\n",
        "head_mask": "[\n  [1, 0, 0, 0],\n  [0, 1, 1, 1]\n]\n",
        "prune_heads": '{"0": [1, 2, 3], "1": [0]}\n',
    }
    assert export_mask(mask.to_kv("any"), tmp_path / "duo", "duo").read_text(encoding="utf-8") == "1.0\t0.0\n1.0\t1.0\n"


def test_formats_refuse_the_space_they_cannot_hold(tmp_path):
    with pytest.raises(InputError, match=r"mask\[0\] splits the group of KV head 0, .*to_kv"):
        export_mask(toy_mask(), tmp_path / "x.tsv", "duo")
    for format in QUERY_FORMATS:
        with pytest.raises(InputError, match=f"space is 'kv', and {format} files hold query heads; .*to_query"):
            export_mask(toy_mask().to_kv(), tmp_path / "x", format)
    with pytest.raises(InputError, match="format 'yaml' is unknown; choose one of hydralens, duo"):
        export_mask(toy_mask(), tmp_path / "x", "yaml")
    assert not list(tmp_path.iterdir())


# --- files as other projects write them ---


def test_duo_gates_are_cut_and_kept(tmp_path):
    path = write(
        tmp_path, "full_attention_heads.tsv", "-9.584426879882812500e-05\t5.000000000000000000e-01\n1.002000000000000000e+00\t4.277343750000000000e-01\n"
    )
    mask = import_mask(path, INFO)
    assert (mask.space, mask.mask, mask.selection.k) == ("kv", [[0, 1], [1, 0]], 2)
    assert mask.scores == [[0.0, 0.0, 0.5, 0.5], [1.0, 1.0, 0.427734, 0.427734]]  # clipped, one per query head
    assert mask.selection.n_with_signal == 2 and mask.selection.rule == "import(duo, threshold=0.5)"
    assert import_mask(path, INFO, threshold=0.4).mask == [[0, 1], [1, 1]]
    assert import_mask(path, INFO, k=1).mask == [[0, 0], [1, 0]]


def test_retrieval_scores_are_means_of_trials(tmp_path):
    scores = {f"{layer}-{head}": [0, 0] for layer in range(2) for head in range(4)} | {"0-3": [0, 0.5, 0.25], "1-1": [0.3], "1-2": [0.25, 0.25]}
    path = write(tmp_path, "model.json", scores)
    with pytest.raises(InputError, match="holds scores, not a choice; give k"):
        import_mask(path, INFO)
    assert import_mask(path, INFO, threshold=0.26).mask == [[0, 0, 0, 0], [0, 1, 0, 0]]
    mask = import_mask(path, INFO, k=2)  # 0-3 and 1-2 tie at 0.25: the lower layer wins
    assert mask.mask == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert mask.scores == [[0.0, 0.0, 0.0, 0.25], [0.0, 0.3, 0.25, 0.0]]
    assert import_mask(path, INFO, k=5).selection.n_with_signal == 3


@pytest.mark.parametrize(
    "text",
    ["1-3,0-2", "1-3, 0-2\n", '"1-3,0-2"\n', 'attn_head_set: "1-3,0-2"\nmodel_base_class: "Llama-3.1-8B-Instruct"\n', "model: x\n  attn_head_set: '1-3,0-2'\n"],
)
def test_qrhead_lists_are_read_bare_and_from_yaml(text, tmp_path):
    assert import_mask(write(tmp_path, "heads.yaml", text), INFO).mask == [[0, 0, 1, 0], [0, 0, 0, 1]]


def test_old_tensors_may_hold_floats(tmp_path):
    assert import_mask(write(tmp_path, "m.json", [[1.0, 0.0, 1.0, 0.0], [0, 0, 0, 1]]), INFO).mask == [[1, 0, 1, 0], [0, 0, 0, 1]]


def test_pruned_heads_are_the_linear_ones(tmp_path):
    assert import_mask(write(tmp_path, "m.json", {"1": [0, 3]}), INFO).mask == [[1, 1, 1, 1], [0, 1, 1, 0]]
    assert import_mask(write(tmp_path, "none.json", {}), INFO).n_full == 8


# --- refusals ---

ALL = {f"{layer}-{head}": [0.5] for layer in range(2) for head in range(4)}


@pytest.mark.parametrize(
    ("format", "content", "line"),
    [
        ("duo", "0.1\t0.2\n", "has 1 lines, the model has n_layers 2"),
        ("duo", "0.1\t0.2\n0.1\t0.2\t0.3\n", "line 2 has 3 columns, the model has n_kv_heads 2"),
        ("duo", "0.1\t0.2\n0.1 0.2\n", "line 2 has 1 columns"),
        ("duo", "0.1\t0.2\n0.1\tx\n", "line 2, column 2: 'x' is not a finite number"),
        ("duo", "nan\t0.2\n0.1\t0\n", "line 1, column 1: 'nan' is not a finite number"),
        ("retrieval_head", [], "holds a JSON list; the form is"),
        ("retrieval_head", ALL | {"2-0": [1]}, "'2-0': 2 is outside the model, whose n_layers is 2"),
        ("retrieval_head", ALL | {"0-4": [1]}, "'0-4': 4 is outside the model, whose n_heads is 4"),
        ("retrieval_head", ALL | {"0:1": [1]}, "'0:1' is not of the form layer-head"),
        ("retrieval_head", ALL | {"00-1": [1]}, "'00-1': '00' is not a layer or head number"),
        ("retrieval_head", ALL | {"1-1": []}, "'1-1' is []; give a list"),
        ("retrieval_head", ALL | {"1-1": 0.3}, "'1-1' is 0.3; give a list"),
        ("retrieval_head", ALL | {"1-1": [0.3, True]}, "'1-1'[1]: True is not a finite number"),
        ("retrieval_head", ALL | {"1-1": [0.3, None]}, "'1-1'[1]: None is not a finite number"),
        ("retrieval_head", {"0-0": [1]}, "'0-1' is missing, one of 7"),
        ("retrieval_head", '{"0-0": [1], "0-0": [0]}', "0-0: appears twice in one object"),
        ("qrhead", "0-1,0_2", "entry 2 ('0_2') is not of the form layer-head"),
        ("qrhead", "0-1,", "entry 2 ('') is not of the form layer-head"),
        ("qrhead", "0-1,1-9", "entry 2 ('1-9'): 9 is outside the model, whose n_heads is 4"),
        ("qrhead", "0-1,1-1,0-1", "entry 3 ('0-1') is listed twice"),
        ("qrhead", "0--1", "entry 1 ('0--1'): '-1' is not a layer or head number"),
        ("head_mask", [[1, 0, 0, 0]], "has 1 rows, the model has n_layers 2"),
        ("head_mask", {"a": 1}, "has no rows"),
        ("head_mask", [[1, 0, 0, 0], [1, 0]], "row 1 has 2 columns, the model has n_heads 4"),
        ("head_mask", [[1, 0, 0, 0], 1], "row 1 has no columns"),
        ("head_mask", [[1, 0, 0, 0], [0, 0, 2, 0]], "[1][2] is 2; write 1"),
        ("head_mask", [[1, 0, 0, 0], [0, 0, True, 0]], "[1][2] is True; write 1"),
        ("head_mask", [[1, 0, 0, 0], [0, 0, "1", 0]], "[1][2] is '1'; write 1"),
        ("head_mask", [[1, 0, 0, 0], [0, 0, [1], 0]], "[1][2] is [1]; write 1"),
        ("prune_heads", {"2": [0]}, "layer '2': 2 is outside the model, whose n_layers is 2"),
        ("prune_heads", {"x": [0]}, "layer 'x': 'x' is not a layer or head number"),
        ("prune_heads", {"1": [4]}, "layer '1', head 4: 4 is outside the model, whose n_heads is 4"),
        ("prune_heads", {"1": [-1]}, "layer '1', head -1: '-1' is not a layer or head number"),
        ("prune_heads", {"1": 0}, "layer '1' is 0; give a list"),
        ("prune_heads", {"1": [0.0]}, "layer '1' lists 0.0; give head numbers"),
        ("prune_heads", {"1": [0, 0]}, "layer '1' lists head 0 twice"),
        ("prune_heads", '{"1": [0', "is not valid JSON"),
    ],
)
def test_wrong_files_are_refused_by_place(format, content, line, tmp_path):
    path = write(tmp_path, f"file.{SUFFIX[format]}", content)
    with pytest.raises(InputError) as error:
        import_mask(path, INFO, format, k=1 if format == "retrieval_head" else None)
    message = str(error.value)
    assert message.startswith(f"{path}: {line}") and ("; " in message) and "\n" not in message


@files
@given(mask=masks(space="query"), format=st.sampled_from(QUERY_FORMATS), data=st.data())
def test_files_of_a_larger_model_are_refused(mask, format, data, tmp_path):
    mask = HeadMask.of(torch.zeros_like(mask.array), mask.model, rule="none") if format == "prune_heads" else mask
    mask = HeadMask.of(torch.ones_like(mask.array), mask.model, rule="all") if format == "qrhead" else mask
    path = export_mask(mask, tmp_path / f"file.{SUFFIX[format]}", format)
    field = data.draw(st.sampled_from(["n_layers", "n_heads"]))
    size = getattr(mask.model, field)
    if size == 1:
        return
    smaller = mask.model.model_copy(update={field: size - 1, "n_kv_heads": 1})
    with pytest.raises(InputError, match=f"{field} (is )?{size - 1}"):
        import_mask(path, smaller, format, threshold=0.5 if format == "retrieval_head" else None)


def test_wrong_arguments_are_refused(tmp_path):
    heads, gates = write(tmp_path, "heads.txt", "0-1"), write(tmp_path, "gates.tsv", "0.1\t0.2\n0.1\t0.2\n")
    with pytest.raises(InputError, match="does not say which model"):
        import_mask(heads)
    with pytest.raises(InputError, match="leave them out"):
        import_mask(heads, INFO, k=3)
    with pytest.raises(InputError, match="two cuts"):
        import_mask(gates, INFO, k=3, threshold=0.5)
    with pytest.raises(InputError, match="k is 5, the file has 4 heads"):
        import_mask(gates, INFO, k=5)
    with pytest.raises(InputError, match="threshold is nan"):
        import_mask(gates, INFO, threshold=float("nan"))
    with pytest.raises(InputError, match="format 'csv' is unknown"):
        import_mask(gates, INFO, "csv")
    for name, content in (("heads.csv", "0-1"), ("a.json", "3"), ("b.json", {"a": 1})):
        with pytest.raises(InputError, match="cannot tell its format; say which: hydralens, duo"):
            guess_format(write(tmp_path, name, content))
    with pytest.raises(InputError, match="cannot be read"):
        import_mask(tmp_path / "nowhere.json", INFO)
