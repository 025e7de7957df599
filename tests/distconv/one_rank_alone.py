"""One rank alone passes something else: an error with one text is raised on all ranks, and none waits.

Tests with the fixture ``rank`` use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over


class Rank:
    """One rank of a case: the last one passes something else."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.size = comm, comm.size
        self.odd = comm.rank == comm.size - 1
        self.grid = grid_over(comm, h=comm.size)
        self.grid.scatter_count = 0
        torch.manual_seed(0)

    def pick(self, usual: Any, other: Any) -> Any:
        return other if self.odd else usual

    def split(self, x: torch.Tensor) -> dc.DistTensor:
        """``x`` with its last dimension split."""
        return dc.scatter(x, dc.Distribution(self.grid, (None,) * (x.dim() - 1) + ("h",)))

    def last(self, x: torch.Tensor, value: float) -> dc.DistTensor:
        """``x`` split, its last element, which the last rank owns, ``value``."""
        changed = x.clone()
        changed.view(-1)[-1] = value
        return self.split(changed)


Case = tuple[Callable[[Rank], object], str]
"""A collective call, and what the error says, on all ranks."""


def check(rank: Rank, call: Callable[[Rank], object], text: str) -> None:
    with pytest.raises((dc.DistconvError, IndexError, RuntimeError), match=text) as caught:
        call(rank)
    assert len(set(rank.comm.allgather(f"{type(caught.value)} {caught.value}"))) == 1


def with_weight(change: Callable[[torch.Tensor], object]) -> torch.nn.Module:
    """Return a linear layer of ones, changed."""
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        change(model.weight.fill_(1))
    return model
