"""Sphinx: these pages as a site. `make site` builds it; on a forge the same files read as they are."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from netcl import __version__

project = "netcl"
copyright = "netcl authors"
version = release = __version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"netcl {version}"
html_copy_source = False
myst_heading_anchors = 3

# Links that leave the pages (examples, CONTRIBUTING, results) are files of the checkout, not of the site.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]


def setup(app):
    """The contents of the site are the tables of the index pages, in their order: a forge has no use for a toctree."""

    def add_contents(_, name, source):
        pages = re.findall(r"^\| \[[^]]+\]\(([\w/-]+)\.md\)", source[0], re.M)
        if name.endswith("index") and pages:
            source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"

    app.connect("source-read", add_contents)
