"""A single rank has a value that functions reject: the same error on all ranks."""

from __future__ import annotations

import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import normal
from tests.distconv.one_rank_alone import Case, Rank, check

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]

WHOLE, ONES = torch.arange(18).reshape(2, 9), torch.ones(2, 9, dtype=torch.int64)


VALUES: dict[str, Case] = {
    **{
        f"{name} 0": (lambda r, f=function: f(r.split(WHOLE), r.last(ONES, 0)), r"ZeroDivisionError.*\(on rank")
        for name, function in {
            "//": operator.floordiv,
            "%": operator.mod,
            "fmod": torch.fmod,
            "7 //": lambda _, y: 7 // y,
            "7 %": lambda _, y: 7 % y,
            "//=": operator.ifloordiv,
            "remainder_": torch.Tensor.remainder_,
            "trunc": partial(torch.div, rounding_mode="trunc"),
            "floor_divide out=": lambda x, y: torch.floor_divide(x, y, out=torch.zeros_like(x)),
        }.items()
    },
    "binary cross entropy": (
        lambda r: F.binary_cross_entropy(r.last(normal(2, 9).sigmoid(), 1.5), r.split(normal(2, 9).sigmoid())),
        "between 0 and 1",
    ),
    "cholesky": (
        lambda r: torch.linalg.cholesky(
            dc.scatter(
                torch.eye(3).repeat(r.size, 1, 1) * torch.tensor([1.0] * (r.size - 1) + [-1.0]).view(-1, 1, 1),
                dc.Distribution(r.grid, ("h", None, None)),
            )
        ),
        "positive-definite",
    ),
}


@pytest.mark.cpu
@pytest.mark.fault(92)
@pytest.mark.parametrize("name", VALUES)
def test_values_that_torch_checks(rank: Rank, name: str) -> None:
    check(rank, *VALUES[name])
