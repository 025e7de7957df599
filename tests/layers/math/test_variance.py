"""Variances and standard deviations, against one process."""

from __future__ import annotations

import warnings

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import normal
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

STATISTICS = {
    "var of a population": lambda x: torch.var(x, 2, False),
    "std of a population": lambda x: x.std(False),
    "std by name": lambda x: torch.std(x, dim=2, unbiased=True, keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, 1)[0] * torch.std_mean(x, 2, keepdim=True)[1][:, 0],
    "float32": lambda x: x.float().var((1, 2)).double().round(decimals=4),
}


@pytest.mark.parametrize("name", STATISTICS)
@UP_TO_FOUR_RANKS
def test_statistics_equal_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, STATISTICS[name], normal(*SHAPE))


def test_where_nothing_varies_the_gradient_of_std_is_zero(comm):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, lambda x: x.std((1, 2)), torch.full(SHAPE, 0.1, dtype=torch.float64))


def test_too_few_elements_have_no_variance(comm):
    for dist in uneven_layouts(comm, SHAPE):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of it where nothing is split
            assert dc.gather(dc.scatter(normal(*SHAPE), dist)[:, :1].var(1)).isnan().all()
