"""Tables of contents: a package's docstring lists what the package has."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

import pytest

from tests.structure.modules import BELOW, SOURCES, parsed


def entries() -> dict[str, set[str]]:
    """Return the modules and packages in each package; the areas beside the core are none of its own."""
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
    text = ast.get_docstring(parsed(package)) or ""
    listed = [line.split()[0] for line in re.findall(r"^ {4}(\w+  +\S.*)$", text, re.MULTILINE)]
    assert sorted(listed) == sorted(ENTRIES[package])
    assert listed == sorted(listed)
