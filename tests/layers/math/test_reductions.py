"""Sums, means, products and truth values, against one process."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import counting, grid_over, normal, twenty_layouts
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)


def with_gaps(x):
    return x.masked_fill(x > 1, torch.nan)


REDUCED = {
    "positional arguments": lambda x: x.mean((2, 3), True) + x.sum(2, True) + x.sum(-1).mean(2)[:, :, None, None],
    "no dimensions": lambda x: x.sum(()),
    "numpy's names": lambda x: (
        x.sum(axis=2, keepdims=True) + x.amax(axis=2, keepdims=True) * x.std(axis=1).mean(axis=0)
    ),
    "another dtype": lambda x: x.float().sum(2, dtype=torch.float64),
    "nansum": lambda x: with_gaps(x).nansum(1),
    "nanmean": lambda x: torch.nanmean(with_gaps(x), (1, 2)),
    "prod with zeros": lambda x: (x * (x > -1)).prod(1, keepdim=True),
    "any of bytes": lambda x: (x > 0).to(torch.uint8).any(1),
    "float16": lambda x: x.half().sum(2).double(),
    "bfloat16": lambda x: x.bfloat16().mean(1).double(),
    "float16 beyond its range": lambda x: (x.half() * 0 + 30000).mean((1, 2)).double(),
}


@pytest.mark.parametrize("name", REDUCED)
@UP_TO_FOUR_RANKS
def test_reductions_equal_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, REDUCED[name], normal(*SHAPE))


def test_integers_are_reduced_as_such(comm):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, lambda x: x.sum() + x.int().sum(1, dtype=torch.int16), counting(*SHAPE).long())
        same_as_one_process(dist, lambda x: (x > 7).sum((0, 2)) + (x % 3).prod(1)[0, 0, 1], counting(*SHAPE).long())


def test_complex_numbers_are_summed(comm):
    values = torch.complex(normal(*SHAPE), normal(*SHAPE, seed=1))
    for dist in uneven_layouts(comm, SHAPE):
        assert torch.allclose(dc.gather(dc.scatter(values, dist).sum((1, 2))), values.sum((1, 2)), rtol=1e-12)


@pytest.mark.ranks(at_least=2)
def test_what_a_reduction_shrinks_is_replicated_from_then_on(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    assert x.mean((2, 3)).dist.axes == ("n", "c")
    assert x.sum(2, keepdim=True).dist.axes == ("n", "c", None, "w")


def test_a_sum_over_any_layout_counts_each_element_once(comm):
    for dist in twenty_layouts(comm, (5, 7, 3)):
        assert dc.scatter(counting(5, 7, 3), dist).sum().item() == counting(5, 7, 3).sum().item()
