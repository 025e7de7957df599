"""Docstrings: correct examples, and tables of contents."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.structure.modules import SOURCES


@pytest.mark.parametrize("module", sorted(m for m, path in SOURCES.items() if ">>>" in path.read_text()))
def test_examples_in_docstrings_are_right(module: str) -> None:
    failures, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failures
