"""Text to train on without a network of one's own: the pages of HTML documentation, such as Debian's packages bring, as one file of JSON lines.

    apt-get download debian-handbook debian-reference-en gimp-help-en libreoffice-help-en-us linux-doc-6.1 postgresql-doc-15 python3.11-doc rust-doc sqlite3-doc
    for package in *.deb; do dpkg -x $package pages/${package%%_*}; done
    pip install inscriptis
    python analyses/documentation_text.py pages --out text/documentation.jsonl

A page is a document; only English ones, and only what its main part says. Of every folder in PAGES at most ``--most`` characters are taken, pages in an order
that depends on nothing but their text, which is also the order of the file, so that a part held out at its end is of all kinds.
"""

import argparse
import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from inscriptis import get_text
from lxml import etree, html
from shared import run_script

from hydralens.errors import InputError
from hydralens.files import write_atomically

OTHER_LANGUAGE = re.compile(r"/(?!en\b)[a-z]{2}([-_][A-Z]{2})?/")
MAIN = ('//*[@role="main"]', "//main", "//article", "//body")
SHORTEST = 500  # characters; shorter pages are redirects, indices and stubs


def pages(folder: Path) -> Iterator[str]:
    """The text of every English page below."""
    for path in sorted(folder.rglob("*.htm*")):
        if not path.is_file() or OTHER_LANGUAGE.search(f"/{path.relative_to(folder)}"):
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        try:
            tree = html.fromstring(data)
        except (etree.ParserError, ValueError):  # nothing in it
            continue
        for useless in tree.xpath("//nav|//script|//style|//header|//footer|//form|//svg|//rustdoc-search|//noscript"):
            useless.drop_tree()
        main = next((found[0] for query in MAIN if (found := tree.xpath(query))), tree)
        text = "\n".join(line.rstrip() for line in get_text(etree.tostring(main, encoding="unicode", method="html")).replace("¶", "").splitlines())
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
        if len(text) >= SHORTEST:
            yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, help="a folder with a folder for every package")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=int, default=9_000_000, help="characters from one package")
    args = parser.parse_args()
    if not args.pages.is_dir():
        raise InputError(f"no folder {str(args.pages)!r}; unpack documentation there, a folder for every package")
    texts: dict[str, str] = {}
    for package in sorted(folder for folder in args.pages.iterdir() if folder.is_dir()):
        own = {hashlib.sha256(text.encode()).hexdigest(): text for text in pages(package)}
        taken = 0
        for key in sorted(own.keys() - texts.keys()):
            if taken + len(own[key]) <= args.most:
                texts[key], taken = own[key], taken + len(own[key])
        print(f"{package.name}: {len(own)} pages, {taken:,} characters taken")
    if not texts:
        raise InputError(f"no page of HTML with text in {str(args.pages)!r}")
    lines = "".join(json.dumps({"text": texts[key]}, ensure_ascii=False) + "\n" for key in sorted(texts))
    write_atomically(args.out, lambda path: path.write_text(lines, encoding="utf-8"))
    print(f"{args.out}: {len(texts)} documents, {sum(map(len, texts.values())):,} characters")


if __name__ == "__main__":
    run_script("documentation_text", main)
