"""What the site adds: formulas as MathML, made when the site is built, and the plain tables and grouped names of docstrings."""

import re
from xml.etree.ElementTree import Element, SubElement

import griffe
from latex2mathml.converter import convert_to_element
from markdown import Extension, Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor


def on_config(config):
    """MkDocs calls this once; docstrings are rendered with the same extensions as pages."""
    config.markdown_extensions.append(Markup())
    return config


class Markup(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_PlainTable(md), "plain_table", 20)  # after code fences
        md.parser.blockprocessors.register(_DisplayedFormula(md.parser), "displayed_formula", 90)
        md.inlinePatterns.register(_Formula(r"(?<![\\$\w])\$([^$\n]+)\$(?![\d$])", md), "formula", 185)  # before emphasis, after `code`


class _Formula(InlineProcessor):
    """``$x$``"""

    def handleMatch(self, match: re.Match, data: str):
        return convert_to_element(match[1]), match.start(0), match.end(0)


class _DisplayedFormula(BlockProcessor):
    """``$$ ... $$`` as a block of its own."""

    def test(self, parent: Element, block: str) -> bool:
        return bool(re.fullmatch(r"\s*\$\$.+\$\$\s*", block, re.DOTALL))

    def run(self, parent: Element, blocks: list[str]) -> None:
        formula = SubElement(parent, "div", {"class": "formula"})
        formula.append(convert_to_element(blocks.pop(0).strip()[2:-2].strip(), display="block"))


class _PlainTable(Preprocessor):
    """A table whose columns are ruled with ``=``, as docstrings have them, becomes a Markdown table."""

    def run(self, lines: list[str]) -> list[str]:
        text = re.sub(r"(?m)^ *=+(?: +=+)+\n(?:.+\n)+? *=+(?: +=+)+$(?!\n *\S)", _piped, "\n".join(lines))
        return text.split("\n")


def _piped(table: re.Match) -> str:
    rule, *rows = table[0].split("\n")
    starts = [column.start() for column in re.finditer("=+", rule)]
    indent = " " * starts[0]
    cut = [[row[a:b].strip().replace("|", "\\|") for a, b in zip(starts, [*starts[1:], None], strict=True)] for row in rows if set(row) - set("= ")]
    ruled = [set(row) <= set("= ") for row in rows]
    head = cut.pop(0) if ruled.index(True) == 1 else [""] * len(starts)
    return "\n".join(f"{indent}| {' | '.join(cells)} |" for cells in [head, ["---"] * len(starts), *cut])


class OneNameALine(griffe.Extension):
    """``a, b: text`` in a docstring documents both names; the parser takes ``b`` for the type of ``a``, so each gets a line that names both."""

    def on_function(self, *, func: griffe.Function, **_) -> None:
        _split(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_) -> None:
        _split(cls, set(cls.members))


def _split(thing: griffe.Object, names: set[str]) -> None:
    def each(item: re.Match) -> str:
        grouped = item["names"].split(", ")
        together = ", ".join(f"``{name}``" for name in grouped)
        return "".join(f"{item['indent']}{name}: {together}:{item['text']}" for name in grouped) if names.issuperset(grouped) else item[0]

    if thing.docstring is not None:
        items = r"(?m)^(?P<indent> +)(?P<names>\w+(?:, \w+)+):(?P<text> .*\n?(?:(?P=indent) +\S.*\n?)*)"
        thing.docstring.value = re.sub(items, each, thing.docstring.value)
