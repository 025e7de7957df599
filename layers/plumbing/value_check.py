"""Checks of values: all ranks learn of one that fails, since torch would raise on that rank alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from distconv import recording
from distconv.communication import agreement
from distconv.communication.transport import allreduce
from distconv.dispatch import name_of
from distconv.errors import NumericalError
from distconv.grid import ProcessGrid

_NONE = -(1 << 62)


def check_within(
    values: torch.Tensor,
    extent: int,
    grid: ProcessGrid,
    error: Callable[[int], Exception],
    ignored: int | None = None,
) -> None:
    """Raise the ``error`` of an element of any rank's ``values`` that is not in ``range(extent)`` nor ``ignored``.

    Collective. Not on a GPU: torch asserts it there.
    """
    if not values.is_cuda:
        recording.call(partial(_check, extent, grid, error, ignored), values)


def _check(
    extent: int, grid: ProcessGrid, error: Callable[[int], Exception], ignored: int | None, values: torch.Tensor
) -> None:
    wrong = (values < 0) | (values >= extent)
    offending = values[wrong if ignored is None else wrong & (values != ignored)]
    example = int(offending[0]) if offending.numel() else _NONE
    highest = int(allreduce(grid.world, torch.tensor([example]), "check of indices", MPI.MAX).item())
    if highest != _NONE:
        raise error(highest)


class LinearAlgebraError(NumericalError, torch.linalg.LinAlgError):  # type: ignore[name-defined, misc]
    """Matrices that a function of ``torch.linalg`` cannot take, on whatever rank they are."""


def decided_together(grid: ProcessGrid, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function`` of blocks whose values torch checks. Collective.

    Raises
    ------
    NumericalError
        With torch's text, if it refuses the values of any rank.
    """
    if grid.size == 1:
        return function(*args, **kwargs)
    error = LinearAlgebraError if name_of(function).startswith("torch.linalg.") else NumericalError

    def attempt() -> Any:
        if recording.active is None:
            return function(*args, **kwargs)
        return recording.active.try_on_all_ranks(grid.world, lambda: function(*args, **kwargs))

    return agreement.try_on_all_ranks(grid.world, attempt, error)
