"""The names of distconv on the site: their docstrings, links to them, and a warning for a public one that lacks.

A signature names a class by the module that defines it (``distconv.grid.ProcessGrid``); its page has the name that
users write (``distconv.ProcessGrid``).
"""

import importlib
import re
from typing import Any, TypeVar

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import distconv as dc

_LOGGER = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect all of it to Sphinx."""
    app.connect("autodoc-process-docstring", without_contents)
    app.connect("missing-reference", resolve)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


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
    """Warn of each public name that no page describes."""
    for name in dc.__all__:
        if f"distconv.{name}" not in env.get_domain("py").objects:
            _LOGGER.warning("distconv.%s is on no page: add it to reference/api.rst", name)
