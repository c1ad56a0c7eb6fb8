"""Reports prose that is hard to read, in code and docs: a report with counts, never a failure.

It counts sentences over 30 words, paraphrases where a technical term exists, error messages that name no rule (must, expected,
got, cannot), docstrings whose first line does not end in a period, and pages over 250 lines or 1,800 words.

``python tools/prose_report.py [PATH ...]`` lists them (default: ``netcl``, ``docs`` and the pages of the root); ``--counts`` prints the
counts alone.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DEFAULT = ("netcl", "docs", "README.md", "CONTRIBUTING.md", "SECURITY.md")
WORDS, LINES, PAGE_WORDS = 30, 250, 1800
#: Words that stand where a technical term would be clearer.
PARAPHRASES = re.compile(
    r"\b(is (?:said|told|asked|heard)|(?:it|they|who) (?:says?|tells?|asks?|hears?)|told about|habits?|story|lessons?|mend(?:ed|s)?"
    r"|is followed by hand|kinds? of calls?|those that are there|lies on shelves|whoever|begun anew)\b",
    re.I,
)
RULE = re.compile(r"\b(must|expected|got|cannot|can't|needs?|requires?|is not|are not|has no|have no|no such|unknown|missing)\b", re.I)
KINDS = ("long sentence", "paraphrase", "error without a rule", "first line without a period", "long page")


class Finding(NamedTuple):
    """A place and what is wrong there."""

    kind: str
    path: Path
    line: int
    text: str


def in_prose(path: Path, line: int, text: str) -> Iterator[Finding]:
    """Long sentences and paraphrases of a text that starts at a line."""
    for paragraph in re.finditer(r"(?:[^\n]|\n(?!\s*\n|\s*[-*|\d]))+", text):
        at = line + text.count("\n", 0, paragraph.start())
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph[0].split())):
            if len(sentence.split()) > WORDS:
                yield Finding("long sentence", path, at, f"{len(sentence.split())} words: {sentence[:80]}")
        for found in PARAPHRASES.finditer(paragraph[0]):
            yield Finding("paraphrase", path, at, found[0])


def in_page(path: Path) -> Iterator[Finding]:
    """Findings of a Markdown page; code, tables and generated parts are not prose."""
    text = path.read_text(encoding="utf-8")
    generated = re.compile(r"<!-- (?:table: \w+|measured) -->.*?<!-- end -->", re.S)
    written = generated.sub("", text)
    if written.count("\n") > LINES or len(written.split()) > PAGE_WORDS:
        yield Finding("long page", path, 1, f"{written.count(chr(10))} lines, {len(written.split())} words")

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    for pattern in (generated, re.compile(r"^```.*?^```$", re.M | re.S), re.compile(r"^\|.*$", re.M)):
        text = pattern.sub(blank, text)
    yield from in_prose(path, 1, text)


def in_module(path: Path) -> Iterator[Finding]:
    """Findings of docstrings and of messages of exceptions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (doc := ast.get_docstring(node)):
            line = node.body[0].lineno
            prose = re.split(r"^\s*>>> ", doc, maxsplit=1, flags=re.M)[0]
            yield from in_prose(path, line, prose)
            if not doc.splitlines()[0].rstrip().endswith((".", "?", ":")) and not doc.startswith(">>>"):
                yield Finding("first line without a period", path, line, doc.splitlines()[0][:80])
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = [part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            if sum(len(text.split()) for text in texts) > 3 and not RULE.search(" ".join(texts)):
                yield Finding("error without a rule", path, node.lineno, " ".join(texts)[:80])


def findings(paths: list[Path]) -> Iterator[Finding]:
    """What is found in files and folders."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".md", ".py") and file.parent != ROOT / "docs" / "api":
                yield from in_page(file) if file.suffix == ".md" else in_module(file)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / name for name in DEFAULT])
    parser.add_argument("--counts", action="store_true", help="print the counts alone")
    options = parser.parse_args(arguments)
    found = list(findings(options.paths))
    for kind, path, line, text in [] if options.counts else sorted(found, key=lambda one: KINDS.index(one.kind)):
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        print(f"{shown}:{line}: {kind}: {text}")
    print("prose: " + ", ".join(f"{sum(one.kind == kind for one in found)} x {kind}" for kind in KINDS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
