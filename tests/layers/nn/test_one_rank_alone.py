"""A single rank has a value that layers reject: the same error on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.distconv.layouts import normal
from tests.distconv.one_rank_alone import Case, Rank, check

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]

WHOLE, ONES = torch.arange(18).reshape(2, 9), torch.ones(2, 9, dtype=torch.int64)
WEIGHTS = normal(5, 2)


VALUES: dict[str, Case] = {
    "embedding": (lambda r: F.embedding(r.last(ONES, 5), WEIGHTS), "index out of range"),
    "cross entropy": (
        lambda r: F.cross_entropy(r.split(normal(1, 3, 9)), r.last(ONES[:1], 3)),
        "3",
    ),
    "one_hot": (lambda r: F.one_hot(r.last(ONES, 5), 5), "."),
    "max_unpool2d": (
        lambda r: F.max_unpool2d(r.split(normal(1, 1, 2, 9)), r.last(torch.arange(18).view(1, 1, 2, 9), 999), 2),
        "999",
    ),
}


@pytest.mark.cpu
@pytest.mark.fault(92)
@pytest.mark.parametrize("name", VALUES)
def test_values_that_torch_checks(rank: Rank, name: str) -> None:
    check(rank, *VALUES[name])
