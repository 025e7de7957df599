"""Selection by tensors of indices, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

PICKED = {
    "gather by a distributed index": lambda x: x.gather(2, (x.detach().abs() * 2).long().clamp(max=6)),
    "take_along_dim with negative indices": lambda x: torch.take_along_dim(
        x, torch.tensor([-1, 0]).view(1, 1, 2, 1), 2
    ),
    "gather of nothing": lambda x: x.gather(0, torch.zeros(2, 0, dtype=torch.int64)).sum() + x,
    "gather of a number": lambda x: x.sum().gather(0, torch.tensor([0])) + x[0, 0, 0].gather(0, torch.tensor(2)),
    "take_along_dim of all": lambda x: torch.take_along_dim(x, torch.tensor([5, 3])),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 3).double() * x[..., None],
    "one_hot of as many classes as there are": lambda x: F.one_hot((x.detach().abs() * 2).long()),
}


@pytest.mark.parametrize("name", PICKED)
@UP_TO_FOUR_RANKS
def test_picking_equals_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, PICKED[name], normal(*SHAPE))


def test_a_plain_tensor_is_picked_from_by_a_distributed_index(comm):
    index = (normal(*SHAPE).abs() * 2).long().clamp(max=6)
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, lambda i, x: torch.gather(x, 2, i), index, plain=(normal(*SHAPE, seed=1),))


@pytest.mark.cpu
def test_an_index_that_is_invalid_on_one_rank_raises_on_all_ranks(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    index = torch.zeros(SHAPE, dtype=torch.int64)
    index[0, 0, 6, 0] = 4
    wrong = dc.scatter(index, x.dist)
    match = "index 4 is out of bounds for dimension 1 with size 4"
    raises_everywhere(comm, IndexError, match, lambda: x.gather(1, wrong))
    raises_everywhere(comm, IndexError, match, lambda: x.index_select(1, torch.tensor([0, 4])))
    raises_everywhere(comm, IndexError, "index -1 is out of bounds", lambda: x.gather(1, wrong * 0 - 1))
    raises_everywhere(comm, RuntimeError, "smaller than num_classes", lambda: F.one_hot(wrong, 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.nonzero(),
        pytest.param(lambda x: x.unique(dim=0), marks=pytest.mark.ranks(2, 3, 4)),  # one rank has torch's own
        lambda x: x.masked_scatter(x > 0, x),
    ],
)
def test_functions_that_depend_on_values_raise(comm, call):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "gather the tensor once|leave dim out", lambda: call(x))


@pytest.mark.cpu
def test_negative_indices_count_from_behind(comm):
    for grid in grids(comm, "nc"):
        same_as_one_process(grid, lambda x: x[torch.tensor([-1, 0, -4])], normal(4, 5))
        same_as_one_process(grid, lambda x: x[:, torch.tensor([[-5, 4], [-1, 2]])], normal(4, 5))
        x = dc.scatter(normal(4, 5), grid)
        raises_everywhere(comm, IndexError, "index -5 is out of bounds", lambda x=x: x[torch.tensor([-5, 0])])
