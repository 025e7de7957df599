"""Tensors with the distribution of a DistTensor, and random numbers that do not depend on the grid."""

from __future__ import annotations

import pytest
import torch
from torch.nn import init

import distconv as dc
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)


def test_new_tensors_equal_one_process(comm):
    def made(x):
        plain = x.new_zeros(5) + x.new_full((4, 1, 1), 2.0) + x.new_tensor([1.0, 2, 3, 4, 5])
        return x * x.new_ones(3, 4, 7, 5) + plain + x.new_empty((7, 1)).fill_(3)

    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, made, normal(*SHAPE))
        x = dc.scatter(normal(*SHAPE), dist)
        assert x.new_zeros(SHAPE).dist == dist
        assert x.new_ones(2, 2, dtype=torch.int64).dtype == torch.int64
        assert x.new(x.shape).dist == x.new(*SHAPE).dist == dist
        assert x.new(torch.Size([2, 5])).shape == x.new(2, 5).shape == (2, 5)


@pytest.mark.ranks(at_least=2)
def test_new_tensors_are_split_along_the_dimensions_of_the_same_extent(comm):
    dist = dc.Distribution(grid_over(comm, h=comm.size), ("n", "c", "h", "w"), boundaries={"h": (*(0,) * comm.size, 7)})
    x = dc.scatter(normal(*SHAPE), dist)
    for made in (x.new_zeros, x.new_ones, x.new_empty, lambda shape: x.new_full(shape, 2.0)):
        assert made((3, 1, 7, 9)).dist == dist and made((5, 4, 7)).dist.axes == (None, None, "h")
        assert not any(made(shape).dist.split_axes for shape in ((3, 4), (7,), (3, 4, 8, 5), (), (7, 7)))


@pytest.mark.usefixtures("fallback")
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
def test_new_tensors_of_values_equal_one_process(comm):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, lambda x: x * x.new([1.0, 2, 3, 4, 5]) + x.new((7, 5)).sum(), normal(*SHAPE))


DRAWN = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 5),
    "bernoulli": torch.bernoulli,
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(),
    "init.normal_": lambda x: init.normal_(x, 0, 2),
    "init.constant_": lambda x: init.constant_(x, 2),
    "init.kaiming_normal_": init.kaiming_normal_,
    "init.kaiming_uniform_": init.kaiming_uniform_,
    "init.xavier_uniform_": init.xavier_uniform_,
    "init.trunc_normal_": init.trunc_normal_,
}


@pytest.mark.parametrize("name", DRAWN)
@UP_TO_FOUR_RANKS
def test_random_numbers_are_those_of_one_process(comm, name):
    odds = normal(*SHAPE).abs().clamp(max=1)
    torch.manual_seed(3)
    expected = DRAWN[name](odds.clone())
    after = torch.get_rng_state()
    for dist in uneven_layouts(comm, SHAPE):
        torch.manual_seed(3)
        found = DRAWN[name](dc.scatter(odds, dist))
        assert found.dist == dist
        assert torch.equal(dc.gather(found), expected)
        assert torch.equal(torch.get_rng_state(), after)


def test_a_parameter_is_initialized_in_place(comm):
    weight = dc.scatter(normal(*SHAPE), grid_over(comm, c=comm.size)).requires_grad_()
    assert init.zeros_(weight) is weight
    assert init.normal_(weight) is weight
    assert weight.requires_grad


@pytest.mark.ranks(at_least=2)
def test_the_generator_that_is_given_is_the_one_that_has_to_be_alike(comm):
    x = dc.scatter(normal(6, 4), grid_over(comm, n=comm.size))
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(comm.rank)
    found = dc.gather(x.clone().uniform_(generator=generator))
    assert torch.equal(found, normal(6, 4).uniform_(generator=torch.Generator().manual_seed(5)))
