"""Checks a built site without a network: every internal link and anchor exists, and no markup is left in the text.

``python tools/site_check.py build/site`` prints what it finds and fails if there is something.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Markdown, MyST and reStructuredText that a reader must never see outside of code.
RAW = re.compile(
    r"\]\([\w./#-]+\)|```|:::|\{(?:toctree|grid|tab-set|doc|ref)\}|\|\s*-{3,}\s*\||(?<!\S)\*\*\w[^*]*\*\*|<!--|:(?:doc|ref|func|class):"
)
SKIPPED = {"pre", "code", "script", "style", "svg", "title"}
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Page(HTMLParser):
    """The links, anchors and prose of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.prose: list[str] = []
        self._skipping = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for value in (given.get("id"), given.get("name")) if value}
        self.links += [value for value in (given.get("href"), given.get("src")) if value]
        self._skipping += tag not in VOID and (tag in SKIPPED or self._skipping > 0)

    def handle_endtag(self, tag: str) -> None:
        self._skipping -= self._skipping > 0 and tag not in VOID

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self.prose.append(data)


def problems(site: Path) -> Iterator[str]:
    """What is wrong with a site, page by page."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or not target.is_relative_to(site.resolve()):
                yield f"{name}: broken link {link}"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name}: no such anchor {link}"
        for found in RAW.finditer(" ".join(page.prose)):
            yield f"{name}: raw markup {found.string[max(0, found.start() - 30) : found.end() + 30].strip()!r}"


def main() -> int:
    site = Path(sys.argv[1]).resolve()
    found = list(problems(site))
    print("\n".join(found) if found else f"{sum(1 for _ in site.rglob('*.html'))} pages, every link leads somewhere")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
