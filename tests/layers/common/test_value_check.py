"""Checks of values: if torch rejects the values of one rank, all ranks raise."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere

SHAPE = (5, 3, 7, 9)


def _with_invalid_last_value(values: torch.Tensor, value: float, grid: dc.ProcessGrid) -> torch.Tensor:
    values[(-1,) * values.dim()] = value
    return dc.scatter(values, grid)


@pytest.mark.fault(92)
@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("value", [1.5, float("nan")])
def test_a_probability_outside_of_zero_to_one_raises_on_all_ranks(comm: Any, value: float) -> None:
    for axis in "nhc":
        grid = grid_over(comm, **{axis: comm.size})
        p, q = normal(*SHAPE).sigmoid(), normal(*SHAPE, seed=1).sigmoid()
        wrong = _with_invalid_last_value(p.clone(), value, grid)
        match = r"all elements of input should be between 0 and 1 \(on rank"
        target = dc.scatter(q, grid)
        loss = partial(F.binary_cross_entropy, wrong, target)
        raises_everywhere(comm, dc.NumericalError, match, loss)
        found = F.binary_cross_entropy(dc.scatter(p, grid), target)
        torch.testing.assert_close(dc.gather(found), F.binary_cross_entropy(p, q))
