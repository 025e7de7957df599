"""Some operators of all folders against one process: what they have in common is here."""

from __future__ import annotations

import itertools

import pytest

from tests.layers.conformance import sampled_cases, table_cases, wrong_lines


@pytest.mark.usefixtures("fallback")
@pytest.mark.ranks(2)
def test_some_operators_of_each_folder_equal_torch(comm):
    cases = itertools.chain.from_iterable(map(sampled_cases, ("math", "tensor", "nn")))
    assert wrong_lines(comm, itertools.islice(cases, 0, None, 10)) == []


@pytest.mark.ranks(3)
def test_operators_with_operands_of_all_kinds_equal_torch(comm):
    assert wrong_lines(comm, table_cases("operands")) == []
