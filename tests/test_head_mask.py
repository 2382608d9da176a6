import copy
import json
import re

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.head_mask import SCHEMA_FILE, HeadMask, parse_ratio, schema
from tests.toy_masks import PROBE, masks, toy_info

files = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def toy_mask(scores: bool = True) -> HeadMask:
    """Three layers of four heads in two KV groups; five full heads, four of them with signal."""
    full = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    values = torch.tensor([[0.9, 0, 0, 0], [0.5, 0, 0.1, 0], [0, 0.25, 1 / 3, 0]])
    return HeadMask.of(full, toy_info(3, 4, 2), rule="global", tie_break="score desc", ratio="7:1", scores=values if scores else None, probes=[PROBE])


def refused(values, tmp_path) -> str:
    """The one line with which a file of these values is refused, without the path."""
    path = tmp_path / "head_mask.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    with pytest.raises(InputError) as error:
        HeadMask.load(path)
    line = str(error.value)
    assert line.startswith(f"{path}: ") and "; " in line and "\n" not in line
    return line.removeprefix(f"{path}: ")


# --- the file ---


def test_file_is_exactly_this(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    text = toy_mask().save(tmp_path / "head_mask.json").read_text(encoding="utf-8")
    text = re.sub(r'"created_with": \{"hydralens": "[^"]+", "torch": "[^"]+", "transformers": "[^"]+"', '"created_with": {', text)
    assert text == (
        "{\n"
        '  "schema_version": 1,\n'
        '  "model": {"id": "toy", "revision": null, "fingerprint": "f00d", "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8},\n'
        '  "space": "query",\n'
        '  "mask": [\n    [1, 0, 0, 0],\n    [1, 1, 0, 0],\n    [0, 1, 1, 0]\n  ],\n'
        '  "ratio": "7:1",\n'
        '  "selection": {"rule": "global", "k": 5, "tie_break": "score desc", "n_with_signal": 4},\n'
        '  "scores": [\n    [0.9, 0.0, 0.0, 0.0],\n    [0.5, 0.0, 0.1, 0.0],\n    [0.0, 0.25, 0.333333, 0.0]\n  ],\n'
        '  "probes": [\n    {"name": "niah/value", "capability": "retrieval", "n_pairs": 8, "n_tokens": 512, "seed": 0, "direction": "noise", '
        '"metric": "logit difference"}\n  ],\n'
        '  "created_with": {, "date": "1970-01-02"}\n'
        "}\n"
    )


@files
@given(mask=masks())
def test_any_mask_survives_its_file(mask, tmp_path):
    path = mask.save(tmp_path / "head_mask.json")
    again = HeadMask.load(path, mask.model)
    assert again == mask
    assert again.to_text() == path.read_text(encoding="utf-8")


def test_equal_inputs_give_equal_bytes(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert toy_mask().to_text() == toy_mask().to_text()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(InputError, match="SOURCE_DATE_EPOCH is 'yesterday'"):
        toy_mask()


def test_score_with_nan_is_stored_as_null_but_signal_is_counted():
    scores = torch.tensor([[0.5, torch.nan, 0.0]])
    mask = HeadMask.of(torch.tensor([[True, True, True]]), toy_info(1, 3), rule="r", scores=scores)
    assert mask.scores is None and mask.selection.n_with_signal == 1


def test_published_schema_is_current():
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == schema(), "run python -m hydralens.head_mask"


def test_schema_lists_the_contract():
    keys = ["schema_version", "model", "space", "mask", "ratio", "selection", "scores", "probes", "created_with"]
    assert list(schema()["properties"]) == keys == schema()["required"]
    assert schema()["additionalProperties"] is False
    assert schema()["properties"]["schema_version"]["const"] == 1
    nested = {name: list(schema()["$defs"][name]["properties"]) for name in ("Selection", "CreatedWith", "ProbeEntry")}
    assert nested == {
        "Selection": ["rule", "k", "tie_break", "n_with_signal"],
        "CreatedWith": ["hydralens", "torch", "transformers", "date"],
        "ProbeEntry": ["name", "capability", "n_pairs", "n_tokens", "seed", "direction", "metric"],
    }


# --- the strict reader ---


def places(value, path=()):
    """Every place of a JSON tree as a tuple of keys and indices."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def dotted(path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def at(tree, path):
    for part in path:
        tree = tree[part]
    return tree


@files
@given(mask=masks(), data=st.data())
def test_missing_and_extra_keys_are_named(mask, data, tmp_path):
    values = json.loads(mask.to_text())
    objects = [path for path in places(values) if isinstance(at(values, path), dict)]
    where = data.draw(st.sampled_from(objects))
    for key in at(values, where):
        mangled = copy.deepcopy(values)
        del at(mangled, where)[key]
        assert refused(mangled, tmp_path).startswith(f"{dotted((*where, key))}: is missing; ")
    at(values, where)["extra"] = 1
    assert refused(values, tmp_path).startswith(f"{dotted((*where, 'extra'))}: is not a key of schema_version 1; ")


@files
@given(mask=masks(), data=st.data())
def test_wrong_types_are_named(mask, data, tmp_path):
    values = json.loads(mask.to_text())
    where = data.draw(st.sampled_from([path for path in places(values) if path]))
    old = at(values, where)
    strangers = [True, "x", 1, 0.5, float("nan"), [], {}, [{}], None]
    nullable = ("ratio", "scores", "revision")
    new = data.draw(
        st.sampled_from(
            [value for value in strangers if type(value) is not type(old) and not (where[-1] in nullable and type(value) in (str, list, type(None)))]
        )
    )
    assume(not (type(old) is float and type(new) is int))  # a whole number is a score
    at(values, where[:-1])[where[-1]] = new
    assert refused(values, tmp_path).startswith(f"{dotted(where)}: ")


@files
@given(mask=masks(), data=st.data())
def test_truncated_file_is_refused(mask, data, tmp_path):
    text = mask.to_text()
    assert "not valid JSON" in refused(text[: data.draw(st.integers(0, len(text) - 2))], tmp_path)


@pytest.mark.parametrize("value", [2, -1, 0.5, 1.0, "1", True, None])
def test_only_0_and_1_in_the_mask(value, tmp_path):
    values = json.loads(toy_mask().to_text())
    values["mask"][1][2] = value
    assert refused(values, tmp_path).startswith(f"mask[1][2]: must be 0 (linear attention) or 1 (full attention), not {value!r}; ")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda v: v.update(schema_version=2), "schema_version: is 2, but this version of hydralens reads schema_version 1; "),
        (lambda v: v.update(schema_version=True), "schema_version: is True, "),
        (lambda v: v["mask"].pop(), "mask has 2 rows, model.n_layers is 3; "),
        (lambda v: v["mask"][1].append(0), "mask[1] has 5 columns, model.n_heads is 4 (space is 'query'); "),
        (lambda v: v.update(space="kv"), "mask[0] has 4 columns, model.n_kv_heads is 2 (space is 'kv'); "),
        (lambda v: v["scores"].pop(), "scores has 2 rows, model.n_layers is 3; "),
        (lambda v: v["scores"][2].pop(), "scores[2] has 3 columns, model.n_heads is 4 "),
        (lambda v: v["scores"][0].__setitem__(0, float("nan")), "scores[0][0]: input should be a finite number, not nan; "),
        (lambda v: v["scores"][0].__setitem__(0, None), "scores[0][0]: input should be a valid number, not None; "),
        (lambda v: v["mask"][0].__setitem__(3, 1), "selection.k is 5, but mask has 6 ones; "),
        (lambda v: v["selection"].update(n_with_signal=5), "selection.n_with_signal is 5, but 4 chosen heads have a non-zero score; "),
        (lambda v: (v["selection"].update(n_with_signal=6), v.update(scores=None)), "selection.n_with_signal is 6, more than selection.k 5; "),
        (lambda v: v["model"].update(n_kv_heads=3), "model.n_heads is 4, not a multiple of model.n_kv_heads 3; "),
        (lambda v: v["model"].update(n_layers=0), "model.n_layers: input should be greater than or equal to 1, not 0; "),
        (lambda v: v.update(ratio="0:1"), "ratio: ratio '0:1' is not of the form r:1 "),
        (lambda v: v.update(ratio="7"), "ratio: "),
        (lambda v: v.update(space="key"), "space: input should be 'query' or 'kv', not 'key'; "),
        (lambda v: v["created_with"].update(date="2026-02-30"), "created_with.date: '2026-02-30' is no date; "),
        (lambda v: v["created_with"].update(date="2026-2-3"), "created_with.date: "),
    ],
)
def test_what_is_wrong_is_named(change, line, tmp_path):
    values = json.loads(toy_mask().to_text())
    change(values)
    assert refused(values, tmp_path).startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "is not valid JSON: "),
        ("[]", "holds a JSON list, not a head mask; "),
        ("1", "holds a JSON int, not a head mask; "),
        ("[" * 100_000, "is not valid JSON: "),
        ('{"schema_version": ' + "1" * 5000 + "}", "is not valid JSON: "),
        ('{"schema_version": 1, "schema_version": 1}', "schema_version: appears twice in one object; "),
        ('{"model": {"id": "a", "id": "b"}}', "id: appears twice in one object; "),
    ],
)
def test_other_texts_are_refused(text, line, tmp_path):
    assert refused(text, tmp_path).startswith(line)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere.json: cannot be read: No such file or directory; "):
        HeadMask.load(tmp_path / "nowhere.json")
    with pytest.raises(InputError, match="cannot be read: Is a directory; "):
        HeadMask.load(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"model": "caf\xe9"}')
    with pytest.raises(InputError, match=r"latin.json: is not UTF-8 text \(byte 14\); "):
        HeadMask.load(tmp_path / "latin.json")


def test_file_for_another_model_is_refused(tmp_path):
    mask = toy_mask()
    path = mask.save(tmp_path / "head_mask.json")
    for field, value in (("n_layers", 4), ("n_heads", 8), ("n_kv_heads", 4), ("head_dim", 16), ("fingerprint", "beef")):
        other = mask.model.model_copy(update={field: value, "id": "other"})
        with pytest.raises(
            InputError, match=f"head_mask.json: model.{field} is {getattr(mask.model, field)}, but the model has {value}: .*'toy', not for 'other'; "
        ):
            HeadMask.load(path, other)
    assert HeadMask.load(path, mask.model.model_copy(update={"id": "copy", "revision": "main"})) == mask


def test_arrays_that_do_not_fit_the_model_are_refused():
    with pytest.raises(InputError, match=r"mask has shape \(3, 2\), the model needs \(3, 4\) \(space is 'query'\); "):
        HeadMask.of(torch.zeros(3, 2, dtype=torch.bool), toy_info(3, 4, 2), rule="r")
    with pytest.raises(InputError, match=r"scores has shape \(3, 2\), the model needs \(3, 4\) \(space is 'kv'\); "):
        HeadMask.of(torch.zeros(3, 2, dtype=torch.bool), toy_info(3, 4, 2), rule="r", space="kv", scores=torch.zeros(3, 2))
    with pytest.raises(InputError, match=r"scores\[0\]\[0\]: input should be a finite number, not inf"):
        HeadMask.of(torch.zeros(1, 1, dtype=torch.bool), toy_info(1, 1), rule="r", scores=torch.tensor([[torch.inf]]))


@pytest.mark.parametrize("ratio", ["0:1", "0.0:1", "1:0", "7:2", "7", "abc", "", ":1", "-1:1", "7:1\n", "9" * 5000 + ":1", "1e3:1", "٧:1", 7])
def test_ratio_nonsense_is_refused(ratio):
    with pytest.raises(InputError, match="is not of the form r:1"):
        parse_ratio(ratio)


# --- query heads and KV heads ---


def test_kv_cache_that_survives():
    mask = toy_mask()
    assert mask.kept_kv_heads.tolist() == [[True, False], [True, False], [True, True]]
    assert mask.kv_share == pytest.approx(4 / 6)
    assert mask.kv_bytes(100) == 4 * 2 * 8 * 100 * 2
    assert mask.to_kv("any").kv_bytes(100, 4) == 4 * 2 * 8 * 100 * 4


@pytest.mark.parametrize(
    ("group_reduce", "full"),
    [
        ("any", [[1, 0], [1, 0], [1, 1]]),
        ("mean", [[1, 0], [1, 0], [1, 1]]),
        ("max", [[1, 0], [1, 0], [0, 1]]),  # 5 of 12 heads are 2.5, so 3, groups: best single scores 0.9, 0.5, 0.333
    ],
)
def test_groups_reduce_as_stated(group_reduce, full):
    kv = toy_mask().to_kv(group_reduce)
    assert (kv.space, kv.mask, kv.selection.k) == ("kv", full, sum(map(sum, full)))
    assert kv.selection.rule == f"global, groups reduced by {group_reduce}"


def test_mean_is_at_least_half():
    full = torch.tensor([[1, 0, 0, 1, 1, 0]], dtype=torch.bool)
    assert HeadMask.of(full, toy_info(1, 6, 2), rule="r").to_kv("mean").mask == [[0, 1]]
    assert HeadMask.of(full, toy_info(1, 6, 3), rule="r").to_kv("mean").mask == [[1, 1, 1]]


def test_max_needs_scores_and_reduction_a_known_name():
    with pytest.raises(InputError, match="scores null"):
        toy_mask(scores=False).to_kv("max")
    with pytest.raises(InputError, match="group_reduce 'median' is unknown; use 'any', 'max' or 'mean'"):
        toy_mask().to_kv("median")


@given(mask=masks(space="kv"))
@settings(deadline=None, max_examples=60)
def test_kv_mask_repeated_and_reduced_is_itself(mask):
    query = mask.to_query()
    assert query.array.tolist() == [[full for full in row for _ in range(mask.model.group)] for row in mask.array.tolist()]
    assert torch.equal(query.kept_kv_heads, mask.array) and query.kv_share == mask.kv_share
    for group_reduce in ("any", "mean"):
        assert query.to_kv(group_reduce).mask == mask.mask


@given(mask=masks(space="query"))
@settings(deadline=None, max_examples=60)
def test_any_never_loses_a_full_head(mask):
    assert bool((mask.to_kv("any").to_query().array | ~mask.array).all())
    assert torch.equal(mask.to_kv("any").array, mask.kept_kv_heads)
