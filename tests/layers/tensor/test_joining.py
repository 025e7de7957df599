"""``cat``, ``stack`` and functions composed of them, against one process."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import counting, grid_over, normal, raises_everywhere, twenty_layouts
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)


@pytest.mark.parametrize("name", ["hstack", "vstack", "dstack", "column_stack"])
@UP_TO_FOUR_RANKS
def test_stacks_along_named_dimensions(comm, name):
    join = getattr(torch, name)
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, lambda x, p: join([x, p, x * 2]), normal(*SHAPE), plain=(normal(*SHAPE, seed=2),))
        same_as_one_process(
            dist, lambda x, p: join([x[0, 0, :, 0], p, x[0, 0, :, 1]]), normal(*SHAPE), plain=(normal(7, seed=2),)
        )


def test_cat_aligns_what_lies_differently(comm):
    shape = (5, 7, 3)
    parts = normal(*shape), normal(*shape, seed=1)
    layouts = twenty_layouts(comm, shape)
    for one, other in zip(layouts, layouts[::-1], strict=True):
        x, y = (dc.scatter(part.clone(), dist).requires_grad_() for part, dist in zip(parts, (one, other), strict=True))
        joined = torch.cat([x, y], 1)
        assert torch.equal(dc.gather(joined), torch.cat(parts, 1)), (one, other)
        joined.backward(counting(5, 14, 3))
        assert torch.equal(dc.gather(x.grad), counting(5, 14, 3)[:, :7])
        assert torch.equal(dc.gather(y.grad), counting(5, 14, 3)[:, 7:])


def test_the_joined_dimension_is_split_in_balanced_blocks(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, c=comm.size))
    whole = x.replicated()
    for parts in ([x, x], [whole, x], [x[:, 1:], x]):
        y = torch.cat(parts, 1)
        assert y.dist == dc.Distribution(x.grid, ("n", "c", "h", "w"))


def test_tensors_of_other_dtypes_and_legacy_empty_ones_join(comm):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(
            dist, lambda x: torch.cat([torch.empty(0), x, x.new_zeros(0), x.float()], 2), normal(*SHAPE)
        )
        same_as_one_process(dist, lambda x: torch.cat([torch.empty(0).double(), x.float()], 1), normal(*SHAPE))
        legacy = dc.scatter(torch.empty(0), dist.grid).requires_grad_()
        torch.cat([legacy, dc.scatter(normal(*SHAPE), dist)], 1).sum().backward()
        assert legacy.grad.shape == (0,)


def test_scalars_of_plain_and_distributed_tensors_stack(comm):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(
            dist, lambda x, p: torch.stack([p, x.sum(), x.amax(), p.detach()]), normal(*SHAPE), plain=(normal(),)
        )


def test_parts_that_do_not_fit_raise_torchs_error(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.ShapeError, "Sizes of tensors must match", lambda: torch.cat([x, x[:, :, 1:]], 1))
    raises_everywhere(comm, dc.ShapeError, "stack expects each tensor to be equal", lambda: torch.stack([x, x[1:]]))
    raises_everywhere(comm, dc.UnsupportedOperation, "out=", lambda: torch.cat([x, x], out=normal(6, 4, 7, 5)))
