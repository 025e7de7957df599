"""Operators of this folder against one process: torch's own samples of them, and their conformance cases."""

from __future__ import annotations

import pytest

from tests.layers.conformance import PARTS, further_sampled_cases, sampled_cases, table_cases, wrong_lines


@pytest.mark.time_limit(240)
@pytest.mark.usefixtures("fallback")
@pytest.mark.ranks(2)
def test_operators_equal_torch_on_its_own_samples(comm):
    assert wrong_lines(comm, sampled_cases("math")) == []


@pytest.mark.long
@pytest.mark.time_limit(240)
@pytest.mark.usefixtures("fallback")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_equal_torch_on_further_samples(comm, part):
    assert wrong_lines(comm, further_sampled_cases("math", part)) == []


@pytest.mark.time_limit(240)
@pytest.mark.ranks(3)
def test_operators_equal_torch_with_all_options(comm):
    assert wrong_lines(comm, table_cases("values")) == []
