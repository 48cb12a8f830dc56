"""Configuration of the documentation site, for `make docs`.

The source folder is the repository, so that the links of README, CHANGELOG, the benchmarks' pages and these pages are the same on
the site and in the checkout. Links to other files of the repository become downloads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[1]

project = "Meshwright"
author = "The Meshwright authors"
copyright = "Apache-2.0"
version = release = next(
    line.split('"')[1]
    for line in (ROOT / "src" / "meshwright" / "__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "tests/README.md",
    "tests/parity/cells.md",
    "benchmarks/**.md",
]
# Folders that are not searched for pages.
exclude_patterns = [".*", "build", "dist", "runs", "src", "**/__pycache__", "**/results"]

nitpicky = True
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = f"Meshwright {release}"
html_extra_path = ["site"]  # its index.html leads from the site's root to docs/index.html
html_show_sphinx = False
html_copy_source = False
html_theme_options: dict[str, Any] = {"navigation_with_keys": True}


def _unlink_folders(app: Any, doctree: nodes.document) -> None:
    """Show a link to a folder of the repository as its text: a site has no page for it."""
    page = ROOT / app.env.doc2path(app.env.docname)
    for link in list(doctree.findall(addnodes.pending_xref)):
        target = Path(os.path.normpath(page.parent / link["reftarget"]))
        if target.is_relative_to(ROOT) and target.is_dir():
            link.replace_self(link.children)


def setup(app: Any) -> dict[str, Any]:
    """Register what Sphinx calls while it builds."""
    app.connect("doctree-read", _unlink_folders)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
