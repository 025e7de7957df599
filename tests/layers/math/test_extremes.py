"""Largest and smallest elements, their indices and gradients, against one process."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

EXTREMES = {
    "aminmax": lambda x: x.aminmax(dim=2)[1] - torch.aminmax(x).min,
    "argmax with dimensions kept": lambda x: torch.argmax(x, keepdim=True),
}


def values(kind: str) -> torch.Tensor:
    ties = (normal(*SHAPE) * 1.2).round()
    if kind == "nan":
        x = normal(*SHAPE)
        x[0, 1, 2, 3], x[2, :, 5] = torch.nan, torch.nan
        return x
    if kind == "infinite":
        x = normal(*SHAPE)
        x[:, 1], x[0, 2, 3], x[1, :, :, 1] = torch.inf, -torch.inf, -torch.inf
        return x
    return ties


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("kind", ["ties", "nan", "infinite"])
@UP_TO_FOUR_RANKS
def test_extremes_equal_one_process(comm, name, kind):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, EXTREMES[name], values(kind))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bfloat16, torch.float16])
def test_extremes_of_other_dtypes(comm, dtype):
    for dist in uneven_layouts(comm, SHAPE):
        x = values("ties").to(dtype)
        same_as_one_process(dist, lambda x: x.max(2)[0] - x.detach().amin(2) + x.argmax(2), x)
        same_as_one_process(dist, lambda x: x.amax((1, 2)), x)


def test_extremes_of_truth_values(comm):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, lambda x: x.amax((1, 2)) | x.max(2)[0].amin(1), normal(*SHAPE) > 1)


def test_the_larger_of_two_tensors(comm):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(
            dist, lambda x, p: torch.max(x, -x) + torch.min(p, x), normal(*SHAPE), plain=(normal(4, 7, 1),)
        )


def test_the_extreme_of_nothing_raises_torchs_error(comm):
    x = dc.scatter(normal(3, 0, 4), grid_over(comm, n=comm.size))
    raises_everywhere(comm, IndexError, "Expected reduction dim 1 to have non-zero size", lambda: x.max(1))
