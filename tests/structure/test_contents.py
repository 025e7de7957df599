"""Tables of contents: what a package's docstring lists is what the package has; and no room is too full or empty."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

import pytest

from tests.structure.modules import BELOW, SOURCES

SMALLEST, LARGEST = 3, 12

OTHER_SIZES = {
    "distconv": "the core: what users import lies at its top",
    "distconv.communication": "a module for each kind of message, and what keeps ranks in step",
    "distconv.jobs": "a package for each task, and what tasks share",
    "distconv.jobs.commands": "a module for each command",
    "distconv.layers.math": "a module for each family of functions",
    "distconv.layers.nn": "a module for each family of layers of torch.nn",
    "distconv.layers.tensor": "a module for each way to make, shape, index and ask a tensor",
    "distconv.pipeline.reference": "a pipeline in one process, and one stage of it",
}
"""Packages with fewer or more entries, and why."""


def entries() -> dict[str, set[str]]:
    """The modules and packages in each package; the storeys are none of the core's."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in SOURCES:
        package, _, name = module.rpartition(".")
        if package and name != "__main__":
            found[package].add(name)
    found["distconv"] -= set(BELOW)
    return found


ENTRIES = entries()


@pytest.mark.parametrize("package", sorted(ENTRIES))
def test_a_package_lists_what_it_has_a_line_each(package: str) -> None:
    text = ast.get_docstring(ast.parse(SOURCES[package].read_text())) or ""
    listed = [line.split()[0] for line in re.findall(r"^ {4}(\w+  +\S.*)$", text, re.MULTILINE)]
    assert sorted(listed) == sorted(ENTRIES[package])
    assert listed == sorted(listed)


@pytest.mark.parametrize("package", sorted(ENTRIES))
def test_a_package_has_three_to_twelve_entries(package: str) -> None:
    fits = SMALLEST <= len(ENTRIES[package]) <= LARGEST
    assert fits != (package in OTHER_SIZES), f"{package} has {len(ENTRIES[package])} modules and packages"
