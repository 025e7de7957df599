"""A few layouts of (N, C, H, W) that together split every dimension, also unevenly, and have replicas."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from mpi4py import MPI

import distconv as dc
from tests.distconv.layouts import grid_over

UP_TO_FOUR_RANKS = pytest.mark.ranks(at_most=4)
"""For tables of many functions: more ranks on two cores take long and add no case."""


def uneven_layouts(comm: MPI.Intracomm, shape: Sequence[int]) -> list[dc.Distribution]:
    """Return layouts: channels; rows with an empty block, and samples if possible; cyclic columns with replicas."""
    size, axes = comm.size, ("n", "c", "h", "w")
    if size == 1:
        return [dc.Distribution(grid_over(comm, n=1), axes)]
    rest = 2 if size % 2 == 0 and size > 2 else 1
    parts = size // rest
    uneven = (0, *sorted((5 * i) % (shape[2] + 1) for i in range(parts - 1)), shape[2])
    return [
        dc.Distribution(grid_over(comm, c=size), axes),
        dc.Distribution(grid_over(comm, n=rest, h=parts), axes, boundaries={"h": uneven}),
        dc.Distribution(grid_over(comm, w=parts, r=rest), axes, cyclic={"w": 1}),
    ]
