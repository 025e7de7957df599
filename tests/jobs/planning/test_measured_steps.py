"""Steps on random samples, and their times. (Steps by plans are timed with ``distconv bench scaling``.)"""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.distribution import Distribution
from distconv.jobs.planning.measured_steps import random_tensor, training_step
from distconv.jobs.timing import CPU
from tests.distconv.layouts import grid_over


def test_each_rank_draws_its_own_block(comm) -> None:
    before = torch.get_rng_state()
    found = random_tensor(Distribution(grid_over(comm, h=comm.size), (None, "h")), (2, 9), CPU)
    assert found.shape == (2, 9)
    assert sum(comm.allgather(found.local.shape[1])) == 9
    assert torch.equal(torch.get_rng_state(), before)  # blocks of 9 are uneven, but dropout is to draw alike


def test_a_step_goes_down_the_mean_square() -> None:
    model = torch.nn.Linear(2, 1, bias=False).double()
    x, before = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64), model.weight.detach().clone()
    training_step(model, x)()
    gradient = 2 * (x @ before.T).T @ x / 2
    torch.testing.assert_close(model.weight.detach(), before - 1e-6 * gradient, rtol=1e-14, atol=1e-14)


@pytest.mark.ranks(2, 4)
def test_random_tensors_are_the_same_on_replicas_and_others_elsewhere(comm):
    grid = dc.ProcessGrid(comm, n=comm.size // 2, h=2)
    for axes, shape in ((("n",), (6,)), (("n", None, "h"), (4, 2, 6)), ((None,), (5,))):
        x = random_tensor(dc.Distribution(grid, axes), shape, torch.device("cpu"))
        full = dc.gather(x)
        assert len(set(comm.allgather(full.numpy().tobytes()))) == 1
        assert len(set(full.flatten().tolist())) == full.numel()
