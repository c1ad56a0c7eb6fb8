"""Sphinx: these pages as a site. `make site` builds it; on a forge the same files read as they are."""

import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tools")]
os.environ.setdefault("NETCL_DEVICE", "cpu")  # examples print the same values on every machine
import reference_pages  # noqa: E402

from netcl import __version__  # noqa: E402

project = "netcl"
copyright = "netcl authors"
version = release = __version__
extensions = ["myst_parser", "sphinx_copybutton", "sphinx_design"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"netcl {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Links that leave the pages (examples, CONTRIBUTING, results) are files of the checkout, not of the site.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]


def contents(source):
    """Add a toctree per table of an index page, captioned with the table's heading. A forge has no use for toctrees."""
    source, trees = source.rstrip("\n"), ""
    listed = re.sub(r"<!-- cards.*?end cards -->", "", source, flags=re.S)
    for heading, section in re.findall(r"^##? (\w[^\n]*)\n(.*?)(?=^##? |\Z)", listed, re.M | re.S):
        pages = re.findall(r"^\| \[([^]]+)\]\(([\w/-]+)\.md\) \|", section, re.M)
        caption = f":caption: {heading}\n" if listed.count("\n## ") > 2 else ""
        if pages:
            trees += f"\n\n```{{toctree}}\n:hidden:\n{caption}\n" + "\n".join(f"{title} <{page}>" for title, page in pages) + "\n```"
    return source + trees + "\n"


def tabs(found):
    """`<!-- tabs -->`: a tab per heading of the third level."""
    parts = re.split(r"^### (.+)\n", found[1], flags=re.M)[1:]
    items = "".join(f":::{{tab-item}} {title}\n{body.strip()}\n:::\n" for title, body in zip(parts[::2], parts[1::2], strict=True))
    return f"::::{{tab-set}}\n{items}::::\n"


def cards(found):
    """`<!-- cards -->`: a card per row of a table with a link and a text."""
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\.md\) \| (.+?) \|$", found[1], re.M)
    items = "".join(f":::{{grid-item-card}} {title}\n:link: {page}\n:link-type: doc\n\n{text}\n:::\n" for title, page, text in rows)
    return f"::::{{grid}} 1 2 2 2\n:gutter: 3\n\n{items}::::\n"


def setup(app):
    """Make tabs, cards and contents of what a forge shows as headings and tables."""

    def rewrite(_, name, source):
        if name in ("reference", "ops"):
            source[0] = reference_pages.linked(source[0], HERE / "api")
        elif name.endswith("index"):
            text = contents(source[0])
            text = re.sub(r"<!-- tabs -->\n(.*?)<!-- end tabs -->\n", tabs, text, flags=re.S)
            source[0] = re.sub(r"<!-- cards -->\n(.*?)<!-- end cards -->\n", cards, text, flags=re.S)

    app.add_config_value("reference_packages", "", "env", str)  # -D reference_packages=netcl.io: only the names of these packages
    app.connect("builder-inited", lambda app: reference_pages.write(HERE / "api", app.config.reference_packages))
    app.connect("source-read", rewrite)
