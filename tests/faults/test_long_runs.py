"""Long runs whose shapes, grids and plans vary: memory, descriptors and communicators stay as many as they were.

An MPI library has some two thousand communicators: what made more without freeing any could not go on.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.communication.transfer import transfer_plan
from distconv.grid import CACHE_LIMIT
from tests.distconv.layouts import cut, grid_over, normal

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2, 4), pytest.mark.time_limit(900)]

GRIDS = 10_000
STEPS = 10_000
PLANS = 20_000
ALLOWED_BYTES = 32 * 2**20
"""An allocator's own coming and going."""


def flat(count: int, act: Callable[[int], None]) -> None:
    """``act`` so many times; what the process has after a fifth of them may not grow."""
    before = (0, 0)
    for number in range(count):
        act(number)
        if number == count // 5:
            before = _held()
    memory, descriptors = _held()
    assert memory < before[0] + ALLOWED_BYTES, (before, memory)
    assert descriptors <= before[1]


def _held() -> tuple[int, int]:
    """Resident bytes and open descriptors."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE"), len(os.listdir("/proc/self/fd"))


def test_grids_are_made_used_and_dropped_ten_thousand_times(comm: Any) -> None:
    draw = random.Random(0)

    def use(_: int) -> None:
        grid = dc.ProcessGrid(comm, **{draw.choice("nchw"): comm.size})
        total = dc.scatter(torch.ones(4, 4, 4, 4, dtype=torch.float64), grid).sum()
        assert float(total) == 256.0

    flat(GRIDS, use)


def test_steps_whose_shapes_and_grids_vary_ten_thousand_times_stay_exact(comm: Any) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Conv2d(3, 4, 3, padding=1).double()
    models = {}
    for axis in "nhw":
        models[axis] = torch.nn.Conv2d(3, 4, 3, padding=1).double()
        models[axis].load_state_dict(plain.state_dict())
        dc.parallelize(models[axis], grid_over(comm, **{axis: comm.size}))
    draw = random.Random(0)

    def step(number: int) -> None:
        axis = draw.choice("nhw")
        x = normal(*(draw.randint(1, 5), 3), *(draw.randint(comm.size, 16) for _ in range(2)), seed=number)
        model = models[axis]
        model.zero_grad()
        model(dc.scatter(x, grid_over(comm, **{axis: comm.size}))).square().sum().backward()
        if number % 500 == 0:
            plain.zero_grad()
            plain(x).square().sum().backward()
            torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=1e-10, atol=1e-10)

    flat(STEPS, step)


def test_twenty_thousand_plans_of_groups_that_share_ranks_never_disagree(comm: Any) -> None:
    """Ranks are in two or three grids, forget the plans of one, and look some up that others do not."""
    pairs = [(rank, rank + 1) for rank in range(comm.size - 1)]
    groups = [comm, *(comm.Split(0 if comm.rank in pair else MPI.UNDEFINED) for pair in pairs)]
    grids = [None if group == MPI.COMM_NULL else dc.ProcessGrid(group, n=group.size) for group in groups]
    alike, own = random.Random(0), random.Random(comm.rank)
    often = [5, *(2 for _ in pairs)]

    for _ in range(PLANS):
        (grid,), rows = alike.choices(grids, often), alike.randint(1, 3 * CACHE_LIMIT)
        if grid is None:
            continue
        dist, whole = dc.Distribution(grid, ("n",)), torch.arange(rows)
        plan = transfer_plan(dist, dist.replicate(), (rows,))
        assert torch.equal(plan.move(cut(whole, dist)), whole)
        if own.random() < 0.3:
            assert transfer_plan(dist, dist.replicate(), (rows,)) is plan
