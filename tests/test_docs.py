"""The documentation is true: its code runs, its commands exist, every public name and every field is in it, and it builds without a warning."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import hydralens as hl
from hydralens.cli.app import app
from tests.planted import planted_model, save_planted

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """Code blocks of a page: the line each begins on, and its text."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)
    return [(PAGES[page][: block.start(1)].count("\n"), block[1]) for block in found]


def public_names(module) -> list[str]:
    """Those in ``__all__``, or what the module itself defines."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")]
    return getattr(module, "__all__", own)


def resolve(path: str):
    """The object that a dotted path names."""
    module, _, name = path.rpartition(".")
    parent = importlib.import_module(module)
    return getattr(parent, name) if name in vars(parent) else importlib.import_module(path)


def documented() -> dict[str, str]:
    """What the API pages show: the dotted path of a directive, or of every public name of a module -> page."""
    shown = {}
    for page, text in PAGES.items():
        for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
            thing = resolve(path)
            names = public_names(thing) if isinstance(thing, type(sys)) else []
            shown |= {path: page} | {f"{path}.{name}": page for name in names}
    return shown


# --- code and commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_planted(tmp_path / "my-model")
    load = hl.load_model
    monkeypatch.setattr(hl, "load_model", lambda source, *rest, **options: planted_model() if source == "embedded" else load(source, *rest, **options))
    names = {}
    for line, code in blocks(page, "python"):
        exec(compile("\n" * line + code, DOCS / page, "exec"), names)
    check = CHECKS.get(page)
    if check:
        check(names)


def own_probe_finds_the_planted_head(names):
    assert names["probe"].label == "rooms/swap" and names["probe"].n_pairs == 8
    assert names["effect"].values.argmax() == 1 * 4 + 2 and names["scores"].top(1) == [(1, 2)]
    assert names["mask"].array[1, 2]


def parts_equal_the_whole(names):
    whole = hl.score_heads(names["model"], names["probes"], method="restriction")
    assert names["together"].composite.equal(whole.composite) and names["scores"].composite.equal(names["again"].composite)
    assert list(Path("shared").iterdir()) and list(Path("shards").iterdir())


def three_routes_agree(names):
    for other in ("lens", "nnsight"):
        difference = (names["engine"].per_pair - names[other].per_pair)[:, 1, 2:]
        assert difference.abs().max() < 1e-4


def gates_come_back(names):
    assert names["mask"].array.tolist() == [[False, True], [True, False], [False, True]] and names["best"].n_full == 2


def a_mask_keeps_what_it_was_selected_for(names):
    assert names["mask"].array[1, 2] and names["kv"].to_query().array[1].tolist() == [False, False, True, True]


CHECKS = {
    "how-to/own-probe.md": own_probe_finds_the_planted_head,
    "how-to/resuming.md": parts_equal_the_whole,
    "how-to/lens-and-nnsight.md": three_routes_agree,
    "how-to/duo-attention.md": gates_come_back,
    "how-to/reading-a-mask.md": a_mask_keeps_what_it_was_selected_for,
}


def commands(group=None, prefix=()) -> dict[tuple[str, ...], set[str]]:
    """Verb -> its options."""
    found = {}
    for name, command in (group or get_command(app)).commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, (*prefix, name))
        else:
            found[*prefix, name] = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    return found


def test_every_command_that_a_page_shows_exists():
    shown, known = 0, commands()
    for page in PAGES:
        for _, code in blocks(page, "sh"):
            for line in re.findall(r"^hydralens (.*)$", code, re.MULTILINE):
                words = line.split("#")[0].split()
                verb = tuple(words[:2]) if words[0] == "mask" else (words[0],)
                assert {word for word in words if word.startswith("--")} <= known[verb], f"{page}: hydralens {line}"
                shown += 1
    assert shown > 5


def test_the_command_line_page_names_every_verb_and_option():
    listed, elsewhere = PAGES["command-line.md"], PAGES["how-to/duo-attention.md"] + PAGES["how-to/reading-a-mask.md"]
    for verb, options in commands().items():
        assert f"hydralens {' '.join(verb)} " in listed
        if verb[0] != "mask":
            missing = [option for option in options - {"--help"} if f"| `{option}` | " not in listed]
            assert not missing, f"{verb}: {missing}"
    assert not [option for option in commands()["mask", "convert"] - {"--help", "--to", "--group-reduce"} if option not in elsewhere]


# --- reference -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", hl.__all__)
def test_every_public_name_is_in_the_reference(name):
    shown = documented()
    if isinstance(getattr(hl, name), type(sys)):
        assert any(path.startswith(f"hydralens.{name}.") for path in shown)
    else:
        assert f"{hl._HOME[name]}.{name}" in shown or any(resolve(path) is getattr(hl, name) for path in shown)


@pytest.mark.parametrize("module", ["detectors", "figures", "probes", "similarity"])
def test_every_public_name_of_a_module_is_in_the_reference(module):
    shown = documented()
    names = public_names(importlib.import_module(f"hydralens.{module}"))
    assert names and not [name for name in names if f"hydralens.{module}.{name}" not in shown]


def properties(schema: dict, node: dict) -> set[str]:
    """Every key that a JSON schema allows, at any depth."""
    if "$ref" in node:
        return properties(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])
    found = set(node.get("properties", {}))
    for child in [*node.get("properties", {}).values(), *node.get("anyOf", []), *([node["items"]] if "items" in node else [])]:
        found |= properties(schema, child)
    return found


def test_the_files_page_names_every_field():
    from hydralens.head_mask import schema

    named = set(re.findall(r"[\w]+", " ".join(re.findall(r"`([^`]+)`", PAGES["files.md"]))))
    fields = properties(schema(), schema())
    assert {"fingerprint", "n_with_signal", "transformers"} <= fields and not fields - named
    probe = hl.probes.niah(planted_model(), n_pairs=2, n_tokens=100)
    assert not set(hl.score_heads(planted_model(), [probe], method="paper").to_frame().columns) - named


# --- pages ---------------------------------------------------------------------------------------------------------


def test_pages_link_to_pages_that_exist():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", text):
            assert (DOCS / page).parent.joinpath(target).resolve().is_file(), f"{page} links to {target}"


def test_the_site_builds_without_a_warning_and_asks_no_other_host(tmp_path):
    pytest.importorskip("mkdocs", reason="needs pip install 'hydralens[docs]'")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    html = {path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    for path, page in documented().items():
        thing = resolve(path)
        if callable(thing) and thing.__doc__:  # constants have no entry
            ids = {path, f"{thing.__module__}.{thing.__qualname__}"}
            assert any(f'id="{name}"' in html[page.replace(".md", ".html")] for name in ids), f"{path} is not on {page}"
    for page, text in html.items():
        assert not re.findall(r'(?:<script[^>]*src|<img[^>]*src|<link[^>]*rel="stylesheet"[^>]*href)="https?:[^"]*"', text), page
        assert not re.findall(r"\$[\w$\\]+", re.sub(r"(?s)<(code|script).*?</\1>", "", text)), f"{page}: a formula was not rendered"
