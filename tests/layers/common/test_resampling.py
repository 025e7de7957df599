"""Outputs that pick one input position or blend two: any indices, on any grid, as in one process."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.layers.common.resampling import Resampling, Resamplings, copy_if_shared, resample
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import close

PICKED = Resampling(*[(8, 8, 0, 3, 5, 1, 2)] * 2, ())
BLENDED = Resampling((0, 4, 2, 2, 7), (1, 4, 2, 6, 8), (0.25, 0.5, 0.0, 1.0, 0.125))


def by_index(sampling, x, dim):
    low, high = (x.index_select(dim, torch.tensor(index)) for index in (sampling.low, sampling.high))
    if not sampling.weight:
        return low
    weight = torch.tensor(sampling.weight, dtype=x.dtype).view(-1, *(1,) * (x.dim() - dim - 1))
    return low * (1 - weight) + high * weight


@pytest.mark.parametrize("sampling", [PICKED, BLENDED])
def test_a_part_of_the_outputs_comes_from_the_part_of_the_inputs_that_it_needs(sampling):
    x = normal(2, 9, 3)
    whole = by_index(sampling, x, 1)
    for start in range(len(sampling.low)):
        for stop in range(start + 1, len(sampling.low) + 1):
            first, last = sampling.needed((start, stop))
            assert torch.equal(sampling.apply(x[:, first:last], 1, (start, stop)), whole[:, start:stop])


def test_no_outputs_need_no_inputs():
    assert PICKED.needed((3, 3)) == (0, 0)


def test_the_result_has_memory_of_its_own(comm):
    x = dc.scatter(normal(2, 2, 3, 4), grid_over(comm, n=comm.size))
    resample(x, x.shape, Resamplings((None, None))).zero_()
    close(dc.gather(x), normal(2, 2, 3, 4), "input")
    block = normal(2)
    assert copy_if_shared(block, x) is block


def test_where_values_and_gradients_come_from_different_places_both_count():
    """As torch's nearest interpolation has it where its float32 indices disagree."""
    x = normal(1, 1, 4).requires_grad_()
    y = Resampling((0, 1, 3), (1, 1, 3), ()).apply(x, 2, (0, 3))
    assert torch.equal(y.detach(), x.detach()[..., [0, 1, 3]])
    y.backward(torch.tensor([[[1.0, 10.0, 100.0]]]).double())
    assert x.grad.flatten().tolist() == [0, 11, 0, 100]
