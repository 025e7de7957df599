"""Comparison of the states of random generators between ranks."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.layers.common.random_state import check_same_generator_state, random_states
from tests.distconv.layouts import grid_over, normal, raises_everywhere


@pytest.mark.ranks(at_least=2)
def test_the_generator_that_is_given_is_compared_and_no_other(comm):
    x = dc.scatter(normal(4, 3), grid_over(comm, n=comm.size))
    with torch.random.fork_rng():
        torch.manual_seed(comm.rank)
        check_same_generator_state(x, torch.Generator().manual_seed(7))
        raises_everywhere(comm, dc.MismatchError, "seed all ranks identically", lambda: check_same_generator_state(x))
        torch.manual_seed(0)
        check_same_generator_state(x)
        own = torch.Generator().manual_seed(comm.rank)
        raises_everywhere(
            comm, dc.MismatchError, "seed all ranks identically", lambda: check_same_generator_state(x, own)
        )


def test_a_draw_from_any_of_the_generators_is_seen():
    generators = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)]
    before = random_states(torch.device("cpu"), generators)
    assert random_states(torch.device("cpu"), generators) == before
    torch.rand(1, generator=generators[1])
    assert random_states(torch.device("cpu"), generators)[:2] == before[:2]
    assert random_states(torch.device("cpu"), generators)[2] != before[2]
