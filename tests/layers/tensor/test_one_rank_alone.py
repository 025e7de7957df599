"""A single rank has a different value, or generator, for a function: the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, normal
from tests.distconv.one_rank_alone import Case, Rank, check

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]

WHOLE, ONES = torch.arange(18).reshape(2, 9), torch.ones(2, 9, dtype=torch.int64)


VALUES: dict[str, Case] = {
    "bernoulli": (lambda r: torch.bernoulli(r.last(normal(2, 9).sigmoid(), 2.0)), r"p_in"),
    "index": (
        lambda r: dc.scatter(normal(9), grid_over(r.comm, n=r.size))[r.last(ONES, 9)],
        "index 9 is out of bounds",
    ),
    "index_select": (lambda r: r.split(normal(2, 9)).index_select(0, r.last(ONES[0], 2)), "index 2 is out of bounds"),
    "gather": (lambda r: torch.gather(r.split(normal(2, 9)), 0, r.last(ONES, 2)), "index 2 is out of bounds"),
    "scatter": (lambda r: torch.scatter(r.split(normal(2, 9)), 0, r.last(ONES, 2), 1.0), "index 2 is out of bounds"),
    "index_add": (
        lambda r: r.split(normal(2, 9)).index_add(1, r.last(ONES[0], 9), r.split(normal(2, 9))),
        "index 9 is out of bounds",
    ),
}


@pytest.mark.cpu
@pytest.mark.fault(92)
@pytest.mark.parametrize("name", VALUES)
def test_values_that_torch_checks(rank: Rank, name: str) -> None:
    check(rank, *VALUES[name])


def generator(r: Rank) -> torch.Generator:
    return torch.Generator().manual_seed(r.pick(0, 1))


def seeded(r: Rank) -> None:
    torch.manual_seed(r.pick(0, 1))


DRAWN: dict[str, Callable[[Rank, dc.DistTensor], object]] = {
    "dropout": lambda r, x: [seeded(r), F.dropout(x, 0.5)],
    "rand_like": lambda r, x: [seeded(r), torch.rand_like(x)],
    "poisson of full tensors": lambda r, x: [seeded(r), torch.poisson(x)],
    "poisson of full tensors, a generator": lambda r, x: torch.poisson(x, generator(r)),
    "multinomial of full tensors, a generator": lambda r, x: torch.multinomial(x, 2, generator=generator(r)),
    "bernoulli, a generator": lambda r, x: torch.bernoulli(x, generator=generator(r)),
    "uniform_, a generator": lambda r, x: x.clone().uniform_(generator=generator(r)),
    "normal_, a generator": lambda r, x: x.clone().normal_(generator=generator(r)),
}


@pytest.mark.filterwarnings("ignore::distconv.errors.ReplicationWarning")
@pytest.mark.parametrize("name", DRAWN)
def test_generators(rank: Rank, fallback: None, name: str) -> None:
    x = rank.split(normal(4, 9).sigmoid())
    check(rank, lambda r: DRAWN[name](r, x), "random generator: ranks disagree.*seed all ranks identically")
