"""Private names of torch that the package uses: one table, which tells the versions of torch that have them."""

from __future__ import annotations

VERSIONS = ("2.4.0", "2.13.0")
"""The versions for which the table was checked: the bounds of ``pyproject.toml``."""
