"""Counts of values and look-ups without gathering."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere

LABELS = (normal(5, 7, 9, seed=40) * 2).long().abs() % 5


@pytest.mark.ranks(2, 3, 4)
def test_counts_are_those_of_one_process(comm: Any) -> None:
    x = normal(5, 3, 7, 9)
    for grid in grids(comm, "nhw"):
        d, t = dc.scatter(x, grid), dc.scatter(LABELS, grid, "nhw")
        torch.testing.assert_close(
            dc.gather(torch.bincount(t.flatten(), minlength=9)), torch.bincount(LABELS.flatten(), minlength=9)
        )
        weighted = t.view(-1).bincount(d[:, 0].reshape(-1))
        torch.testing.assert_close(dc.gather(weighted), LABELS.view(-1).bincount(x[:, 0].reshape(-1)))
        for options in ((7,), (5, -1, 1), (3, 0, 0)):
            torch.testing.assert_close(dc.gather(torch.histc(d, *options)), torch.histc(x, *options))
        torch.testing.assert_close(dc.gather(torch.histc(d * 0 + 3, 4)), torch.histc(x * 0 + 3, 4))
        assert torch.equal(dc.gather(t[:, :0].flatten().bincount()), LABELS[:, :0].flatten().bincount())


@pytest.mark.ranks(2, 3, 4)
def test_distinct_values_are_those_of_one_process(comm: Any) -> None:
    for grid in grids(comm, "nhw"):
        t = dc.scatter(LABELS, grid, "nhw")
        found = torch.unique(t, return_inverse=True, return_counts=True)
        for each, expected in zip(found, torch.unique(LABELS, return_inverse=True, return_counts=True), strict=True):
            assert torch.equal(dc.gather(each), expected)
        assert found[1].dist == t.dist
        assert t.unique().tolist() == LABELS.unique().tolist()


@pytest.mark.ranks(2, 3)
def test_values_are_found_among_others_where_they_are(comm: Any) -> None:
    x, edges = normal(5, 3, 7, 9), torch.linspace(-2, 2, 9, dtype=torch.float64)
    for grid in grids(comm, "nch"):
        d, t = dc.scatter(x, grid), dc.scatter(LABELS, grid, "nhw")
        for right in (False, True):
            found = torch.bucketize(d, edges, right=right)
            assert found.dist == d.dist
            assert torch.equal(dc.gather(found), torch.bucketize(x, edges, right=right))
        assert torch.equal(dc.gather(torch.searchsorted(edges, d)), torch.searchsorted(edges, x))
        assert torch.equal(dc.gather(torch.isin(t, torch.tensor([1, 3]))), torch.isin(LABELS, torch.tensor([1, 3])))


@pytest.mark.ranks(2)
def test_a_negative_number_raises_on_all_ranks(comm: Any) -> None:
    labels = LABELS.flatten().clone()
    labels[-1] = -1
    t = dc.scatter(labels, grids(comm, "n")[0], "n")
    raises_everywhere(comm, dc.NumericalError, "non-negative", lambda: torch.bincount(t))


def test_values_on_a_boundary_belong_to_the_side_that_is_asked_for(comm):
    x = dc.scatter(torch.tensor([[1.0, 2.0, 2.5], [3.0, 0.0, 4.0]]).double(), grid_over(comm, n=comm.size))
    edges = torch.tensor([1.0, 2.0, 3.0]).double()
    for function in (torch.bucketize, lambda x, e, **o: torch.searchsorted(e, x, **o)):
        assert dc.gather(function(x, edges)).tolist() == [[0, 1, 2], [2, 0, 3]]
        assert dc.gather(function(x, edges, right=True)).tolist() == [[1, 2, 2], [3, 0, 3]]
        assert function(x, edges, out_int32=True).dtype == torch.int32
