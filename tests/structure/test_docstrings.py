"""What docstrings say: examples that are right, and tables of contents."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.structure.modules import SOURCES


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_examples_in_docstrings_are_right(module: str) -> None:
    if ">>>" not in SOURCES[module].read_text():
        return
    failures, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failures
