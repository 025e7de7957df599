"""Pages of the public names: a file ``reference/api/NAME.rst`` for each, links to them, and summary tables.

A signature names a class by the module that defines it (``distconv.grid.ProcessGrid``); its page has the name that
users write (``distconv.ProcessGrid``). Sphinx warns of a public name without a page.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, TypeVar

from commands import write_folder
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import distconv as dc

FOLDER = "reference/api"

MEMBERS = {
    "ProcessGrid": "coords, coords_of, rank_of, comm, describe, free",
    "Distribution": "box, local_shape, owners, intervals, same_indices, with_axes, replicate",
    "DistTensor": "local, dist, grid, redistribute, gather",
    "TransferPlan": "",
}
"""Members that the page of a class describes. Without an entry: all public ones."""

INHERITED = {
    "ProcessGrid": (
        "cached, coordinate, factored, reversed_comm, split_axes, stride, comparison_comm, flat, key, scatter_count"
    )
}
"""Classes with inherited members, and those that their page leaves out."""

ALSO = {
    "show": ["distconv.pictures.Picture"],
    "trace": ["distconv.tracing.trace.TraceResult", "distconv.tracing.breakdown.Breakdown"],
    "rule": ["distconv.layers.rules.rule.Rule"],
    "load_checkpoint": ["distconv.checkpoint.state.Loaded"],
    "save_checkpoint": ["distconv.checkpoint.AsyncSave"],
}
"""Classes that a name returns, which its page describes, too."""

_LOGGER = logging.getLogger(__name__)


class NameTable(SphinxDirective):
    """A table of public names with the first sentences of their docstrings and links to their pages."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the table of the names in the content, one in a line."""
        lines = [".. list-table::", "   :header-rows: 1", "", "   * - name", "     - purpose"]
        for name in self.content:
            first = (inspect.getdoc(getattr(dc, name)) or "").split("\n\n")[0].replace("\n", " ")
            lines += [f"   * - :doc:`{name} <api/{name}>`", f"     - {first}"]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect all of it to Sphinx."""
    app.add_directive("name-table", NameTable)
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", without_contents)
    app.connect("missing-reference", resolve)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_pages(app: Sphinx) -> None:
    """Write a page for each public name."""
    write_folder(Path(app.srcdir) / FOLDER, {f"{name}.rst": page(name) for name in dc.__all__})


def page(name: str) -> str:
    """Return the page of a public name as reStructuredText."""
    value = getattr(dc, name)
    lines = [f"distconv.{name}", "=" * len(f"distconv.{name}"), "", ".. currentmodule:: distconv", ""]
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
        lines += [f".. auto{kind}:: {name}"]
        if kind == "class" and MEMBERS.get(name) != "":
            lines += [f"   :members: {MEMBERS.get(name, '')}".rstrip()]
        if name in INHERITED:
            lines += ["   :inherited-members:", f"   :exclude-members: {INHERITED[name]}"]
    elif callable(value):
        lines += [f".. autofunction:: {name}"]
    else:
        lines += [f".. autodata:: {name}"]
    for other in ALSO.get(name, ()):
        lines += ["", f".. autoclass:: {other}", "   :members:"]
    return "\n".join(lines) + "\n"


def without_contents(app: Sphinx, what: str, name: str, value: object, options: Any, lines: list[str]) -> None:  # noqa: PLR0917
    """Remove the list of modules from the docstring of a package."""
    if what == "module":
        text = re.sub(r"^::\n\n    \w+ {2,}.*", "", "\n".join(lines), flags=re.M | re.S)
        lines[:] = text.split("\n")


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> nodes.Node | None:
    """Return the link to the description of ``node``, whichever module it was imported from; None for others."""
    place, _, name = node["reftarget"].rpartition(".")
    if node.get("refdomain") != "py" or not (place.startswith("distconv") or not place):
        return None
    if place and isinstance(getattr(importlib.import_module(place), name, None), TypeVar):
        return content
    objects = env.get_domain("py").objects
    found = min((public for public in objects if public.endswith(f".{name}")), key=len, default=None)
    if found is None:
        return None
    uri = app.builder.get_relative_uri(node["refdoc"], objects[found].docname)
    return nodes.reference("", "", content, internal=True, refuri=f"{uri}#{objects[found].node_id}", reftitle=found)


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name that no page describes or no table lists."""
    listed = (Path(app.srcdir) / "reference" / "api.rst").read_text().split()
    for name in dc.__all__:
        if f"distconv.{name}" not in env.get_domain("py").objects or name not in listed:
            _LOGGER.warning("distconv.%s is in no table of reference/api.rst", name)
