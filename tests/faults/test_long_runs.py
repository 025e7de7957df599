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

import distconv as dc
from tests.distconv.layouts import grid_over, normal

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2, 4), pytest.mark.time_limit(900)]

STEPS = 10_000
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
