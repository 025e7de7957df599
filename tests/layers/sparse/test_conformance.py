"""Operators of this folder against one process, with all options."""

from __future__ import annotations

import pytest

from tests.layers.conformance import table_cases, wrong_lines


@pytest.mark.time_limit(240)
@pytest.mark.ranks(3)
def test_operators_equal_torch_with_all_options(comm):
    assert wrong_lines(comm, table_cases("sparse")) == []
