"""Pairs of a communication and its adjoint, against slicing and sums by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distconv as dc
from distconv.communication import collectives, gradient_reduction
from distconv.communication.transfer import transfer_plan
from distconv.communication.transport import count_traffic
from tests.distconv.communication.drawn_layouts import FEW, layouts, needs, shapes
from tests.distconv.layouts import counting, cut, grid_over, grids, normal


@FEW
@given(st.data())
def test_redistribution_gives_what_slicing_the_whole_gives_and_its_adjoint_is_the_way_back(comm, data):
    shape = data.draw(shapes)
    src, dst = data.draw(layouts(comm, shape)), data.draw(layouts(comm, shape))
    whole = counting(*shape)
    assert torch.equal(collectives.redistribute(cut(whole, src), src, dst, shape), cut(whole, dst))
    x = cut(whole, src).requires_grad_()
    moved = collectives.redistribute(x, src, dst, shape)
    assert torch.equal(moved, cut(whole, dst))
    # A gradient that is whole on every replica comes back whole: nothing is added.
    moved.backward(cut(whole * 3, dst))
    assert torch.equal(x.grad, cut(whole * 3, src))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_gradient_that_torch_leaves_undefined_stays_so(comm, rows):
    grid = grid_over(comm, h=comm.size)
    src, dst = dc.Distribution(grid, ("h", None)), dc.Distribution(grid, (None, "h"))
    x = cut(counting(rows, 7), src).requires_grad_()
    # torch says that the derivative of this number of elements is no tensor at all.
    torch.linalg.vector_norm(collectives.redistribute(x, src, dst, (rows, 7)), 0).backward()
    assert x.grad is None


@pytest.mark.fault(26)
def test_redistribution_to_the_same_layout_moves_nothing(comm):
    dist = dc.Distribution(grid_over(comm, h=comm.size), ("h", None))
    local = cut(counting(7, 3), dist)
    assert collectives.redistribute(local, dist, dist, (7, 3)) is local


@FEW
@given(st.data())
def test_assembling_and_accumulating_are_adjoint(comm, data):
    shape = data.draw(shapes)
    layout = data.draw(needs(comm, shape))
    whole = normal(*shape)
    x = cut(whole, layout.base).requires_grad_()
    found = collectives.gather_region(x, transfer_plan(layout.base, layout, shape))
    y = normal(*found.shape, seed=comm.rank + 1)
    found.backward(y)
    # Replicas of x each assemble by themselves, so both sides count every replica alike.
    forward, backward = (
        comm.allreduce(float((found.detach() * y).sum())),
        comm.allreduce(float((x.detach() * x.grad).sum())),
    )
    assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12)


def test_the_sum_over_an_axis_has_the_identity_as_adjoint(comm):
    for grid in grids(comm, "nh"):
        x = torch.full((3,), float(comm.rank), dtype=torch.float64, requires_grad=True)
        total = collectives.allreduce_sum(x, grid, ("h",))
        assert torch.equal(total, torch.full((3,), float(sum(grid.comm("h").allgather(comm.rank)))).double())
        total.backward(torch.tensor([1.0, 2.0, 3.0]).double())
        assert x.grad.tolist() == [1.0, 2.0, 3.0]


def test_what_enters_split_work_gets_its_gradient_summed_over_just_these_axes(comm):
    for grid in grids(comm, "nhw"):
        w = torch.ones(2, dtype=torch.float64, requires_grad=True)
        collectives.with_grad_allreduce(w, grid, ("h", "w")).backward(torch.full((2,), comm.rank + 1.0).double())
        expected = sum(rank + 1.0 for rank in grid.comm(("h", "w")).allgather(comm.rank))
        assert w.grad.tolist() == [expected] * 2


@pytest.mark.ranks(at_least=2)
def test_no_result_is_the_memory_of_what_went_in(comm):
    grid, shape = grid_over(comm, h=comm.size), (8, 3)
    whole = counting(*shape)
    # Rank 0 has the same under both layouts, others have not.
    src = dc.Distribution(grid, (None, None))
    dst = dc.Distribution(grid, ("h", None), boundaries={"h": (0, *(8,) * comm.size)})
    local = cut(whole, src)
    collectives.redistribute(local, src, dst, shape).zero_()
    assert torch.equal(local, whole)
    for made in (
        collectives.allreduce_sum(local, grid, ("h",)),
        collectives.with_grad_allreduce(local, grid, ("h",)).clone(),
    ):
        made.zero_()
        assert torch.equal(local, whole)


USES = {
    "both": (lambda w, b: 3 * w + b, (3, 1)),
    "the first alone": (lambda w, b: 3 * w, (3, None)),
    "the second alone": (lambda w, b: b.exp(), (None, 1)),
    "one tensor for both": (lambda w, b: w + b, (1, 1)),
}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("use", "slopes"), USES.values(), ids=USES)
def test_two_that_enter_at_once_get_what_each_would_get_by_itself(comm, use, slopes, marked):
    """Marked ones wait for a sum in buckets; what nobody has used has no gradient, as in one process."""
    for grid in grids(comm, "nh"):
        pair = [torch.zeros(5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        for leaf in pair if marked else ():
            gradient_reduction.defer_grad_reduction(leaf, "a weight")
        use(*collectives.both_with_grad_allreduce(*pair, grid, ("n", None))).backward(
            torch.full((5,), comm.rank + 1.0).double()
        )
        total = sum(rank + 1.0 for rank in grid.comm("n").allgather(comm.rank))
        for leaf, slope in zip(pair, slopes, strict=True):
            assert (leaf.grad is None) if slope is None else leaf.grad.tolist() == [slope * total] * 5


@pytest.mark.ranks(at_least=2)
def test_of_two_that_enter_at_once_the_frozen_one_costs_no_message(comm):
    grid = grid_over(comm, n=comm.size)
    frozen, weight = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64, requires_grad=True)
    for pair, slope in ((frozen, weight), 2.0), ((weight, frozen), 5.0):
        weight.grad = None
        one, other = collectives.both_with_grad_allreduce(*pair, grid, ("n",))
        with count_traffic() as traffic:
            (5 * one + 2 * other).backward(torch.ones(3, dtype=torch.float64))
        assert weight.grad.tolist() == [slope * comm.size] * 3
        assert frozen.grad is None
        assert dict(traffic.reduced) == {("sum over n", comm.size): 3 * 8}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.ranks(at_least=2)
def test_a_gradient_that_is_to_be_differentiated_is_summed_at_once(comm):
    grid = grid_over(comm, n=comm.size)
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    gradient_reduction.defer_grad_reduction(weight, "weight")
    total = comm.size * (comm.size + 1) / 2
    # The sum over ranks of (rank + 1) w^3.
    loss = collectives.allreduce_sum(
        (comm.rank + 1) * collectives.with_grad_allreduce(weight, grid, ("n",)) ** 3, grid, ("n",)
    )
    assert loss.item() == 8 * total
    loss.backward(create_graph=True)
    assert weight.grad.item() == 12 * total
    (second,) = torch.autograd.grad(weight.grad, weight)
    assert second.item() == 12 * total
