"""Excerpts of search results without a server: the text of all pages in a script that the search page loads.

Sphinx fetches pages for its excerpts, which browsers do not allow for ``file://``.
"""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

FILE = "page_texts.js"


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the texts after the build, and load them on the search page alone."""
    app.connect("html-page-context", add_scripts)
    app.connect("build-finished", write_texts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def add_scripts(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Load the scripts on the search page."""
    if page == "search":
        app.add_js_file(FILE)
        app.add_js_file("excerpts.js")


def write_texts(app: Sphinx, error: Exception | None) -> None:
    """Write the paragraphs of each page. Code and tables are left out."""
    if error is not None or app.builder.format != "html":
        return
    texts = {}
    for page in sorted(app.env.all_docs):
        paragraphs = app.env.get_doctree(page).findall(nodes.paragraph)
        texts[page] = " ".join(" ".join(paragraph.astext().split()) for paragraph in paragraphs)
    script = f"const PAGE_TEXTS = {json.dumps(texts)};\n"
    (Path(app.outdir) / "_static" / FILE).write_text(script)
