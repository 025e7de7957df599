"""The directive ``support-matrix`` of Markdown pages: operator families and the axes that split them.

The family of an operator is the module in ``layers`` with its rule. The data file has a result for each operator and
each kind of grid (``distconv verify conformance --page``).
"""

import csv
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from distconv import dispatch

DATA = Path(__file__).resolve().parents[1] / "evidence" / "conformance.csv"
AXES = ("n", "c", "d", "h", "w")
MEANINGS = {"=": "rule", "~": "rule", "r": "replicated", "!": "rejected"}
NAMED = {"sparse": "sparse tensors", "optimizers": "optimizers", "networks": "networks and losses"}
"""Families of the conformance table that are families of this table."""


class SupportMatrix(SphinxDirective):
    """A table of operator families by axes."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        self.env.note_dependency(str(DATA))
        lines = [f"| family | {' | '.join(AXES)} |", "|---" * (1 + len(AXES)) + "|"]
        for family, cells in matrix().items():
            lines.append(f"| {family} | {' | '.join(describe(cells[axis]) for axis in AXES)} |")
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive to Sphinx."""
    app.add_directive("support-matrix", SupportMatrix)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def matrix() -> dict[str, dict[str, Counter[str]]]:
    """Return the number of operators with a rule, replicated and rejected, by family and axis.

    An operator counts as rejected, or else as replicated, if one of its options is.
    """
    worst: dict[tuple[str, str, str], str] = {}
    order = ("rule", "replicated", "rejected")
    with DATA.open(newline="") as file:
        for row in csv.DictReader(file):
            family = NAMED.get(row["family"]) or family_of(row["operator"])
            for axis in AXES:
                found = MEANINGS.get(row[axis].split(" ")[0])
                key = family, row["operator"], axis
                if found:
                    worst[key] = max(found, worst.get(key, found), key=order.index)
    table: dict[str, dict[str, Counter[str]]] = {}
    for (family, _, axis), found in sorted(worst.items()):
        table.setdefault(family, {name: Counter() for name in AXES})[axis][found] += 1
    return table


def describe(found: Counter[str]) -> str:
    """Return the text of a cell."""
    if len(found) < 2:
        return next(iter(found), "none")
    return ", ".join(f"{kind} {found[kind]}" for kind in ("rule", "replicated", "rejected") if found[kind])


@functools.cache
def _modules() -> dict[Any, str]:
    """Return the module with the rule of each function."""
    found = {}
    for function, rule in dispatch.rules().items():
        operator = rule.operator
        while isinstance(operator, functools.partial):
            operator = operator.func
        found[function] = operator.__module__
    return found


def family_of(operator: str) -> str:
    """Return the family of an operator of torch, by the module of its rule."""
    names = operator.removeprefix("nn.functional.").removeprefix("nn.").split(".")
    for owner in (F, torch, torch.Tensor):
        function: Any = owner
        for name in names:
            function = getattr(function, name, None)
        if function in _modules():
            package, module = _modules()[function].split(".")[-2:]
            return module.replace("_", " ") if package != "layers" else module
    if operator.startswith("nn.") and operator[3:4].isupper():
        return "modules of torch.nn"
    return "other functions"
