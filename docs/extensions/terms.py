"""Links the first use of each glossary term on a page to the glossary.

Only paragraphs and list items of pages for users are changed. Text in links, code and headings stays.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

FOLDERS = ("tutorials/", "how-to/", "explanation/")
GLOSSARY = "reference/glossary"
COMMON = {"rank", "plan", "axis", "block", "rule"}
"""Terms that are also everyday words or names of options: only pages of the explanation link them."""


class TermLinks(SphinxTransform):
    """Replaces the first use of each term by a reference."""

    default_priority = 400

    def apply(self) -> None:
        """Change the document."""
        page = self.env.docname
        if not page.startswith(FOLDERS):
            return
        left = dict(read_terms(Path(self.env.srcdir) / f"{GLOSSARY}.md"))
        if not page.startswith("explanation/"):
            left = {key: term for key, term in left.items() if term not in COMMON}
        for text in list(self.document.findall(nodes.Text)):
            if left and _is_prose(text):
                _link(text, left)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the transform to Sphinx."""
    app.add_transform(TermLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def read_terms(path: Path) -> dict[str, str]:
    """Return the terms of the glossary by each of their forms: as they are, and with a plural s."""
    terms = re.findall(r"^(\w[\w -]*)\n  \S", path.read_text(), re.M)
    return {form: term for term in terms for form in (term, f"{term}s")}


def _is_prose(text: nodes.Text) -> bool:
    """Return True for text directly in a paragraph of the body, outside of headings, tables, links and code."""
    if not isinstance(text.parent, nodes.paragraph):
        return False
    above = text.parent.parent
    while above is not None:
        if isinstance(above, (nodes.table, nodes.title)):
            return False
        above = above.parent
    return True


def _link(text: nodes.Text, left: dict[str, str]) -> None:
    """Split a text node at the first use of each remaining term."""
    pattern = "|".join(re.escape(form) for form in sorted(left, key=len, reverse=True))
    parts: list[nodes.Node] = []
    rest = str(text)
    while left and (found := re.search(rf"(?<![\w-])(?:{pattern})(?![\w-])", rest)):
        term = left.get(found[0])
        if term is None:  # the same term occurred before in this text
            parts.append(nodes.Text(rest[: found.end()]))
        else:
            for form in [form for form, other in left.items() if other == term]:
                del left[form]
            link = addnodes.pending_xref(
                "", nodes.inline("", found[0]), refdomain="std", reftype="term", reftarget=term, refwarn=True
            )
            parts += [nodes.Text(rest[: found.start()]), link]
        rest = rest[found.end() :]
    if parts:
        parent = text.parent
        at = parent.index(text)
        parent.remove(text)
        for offset, node in enumerate([*parts, nodes.Text(rest)]):
            parent.insert(at + offset, node)
