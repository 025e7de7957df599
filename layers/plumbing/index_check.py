"""Indices that must lie in a range: all ranks learn of one that does not, since torch would raise on its rank alone."""

from __future__ import annotations

import torch
from mpi4py import MPI

from distconv.communication.transport import allreduce
from distconv.grid import ProcessGrid

_NONE = -(1 << 62)


def outside(values: torch.Tensor, extent: int, grid: ProcessGrid, ignored: int | None = None) -> int | None:
    """An element of any rank's ``values`` that is not in ``range(extent)``, other than ``ignored``; None if all are.

    Collective. On a GPU it is always None: torch asserts it there.
    """
    if values.is_cuda:
        return None
    wrong = (values < 0) | (values >= extent)
    found = values[wrong if ignored is None else wrong & (values != ignored)]
    example = int(found[0]) if found.numel() else _NONE
    highest = int(allreduce(grid.world, torch.tensor([example]), "check of indices", MPI.MAX).item())
    return None if highest == _NONE else highest
