"""A single rank passes a different value to the check of a rule: the same error on all ranks."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import normal
from tests.distconv.one_rank_alone import Case, Rank, check

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


RULES: dict[str, Case] = {
    "rule: example": (
        lambda r: dc.check_rule(dc.rule(x=dc.Window(1))(doubled), [normal(1, 1, 9) + r.odd], r.comm),
        "example of doubled: ranks disagree",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_examples_of_a_rule(rank: Rank, name: str) -> None:
    check(rank, *RULES[name])
