"""Checks of values, such as indices and divisors, whose failure is raised on all ranks.

torch would raise only on the rank whose block has the invalid value, and the other ranks would wait for this rank.
Called by operators that take indices or labels, and by linear algebra.
"""

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

_NO_INVALID_INDEX = -(1 << 62)
"""Stands for "no invalid index" in the maximum over ranks."""


def check_indices(
    values: torch.Tensor,
    extent: int,
    grid: ProcessGrid,
    error: Callable[[int], Exception],
    ignored: int | None = None,
) -> None:
    """Check that the indices of all ranks are in a range.

    Collective: call on every rank. Skipped on a GPU, where torch checks indices in its kernels.

    Parameters
    ----------
    values : Tensor
        This rank's indices.
    extent : int
        Valid indices are in ``range(extent)``.
    grid : ProcessGrid
    error : callable
        Returns the exception for an invalid index. It is raised on all ranks, for the same index.
    ignored : int, optional
        A further valid value.
    """
    if not values.is_cuda:
        # A captured step repeats the check in each replay, since the indices change between steps.
        recording.call(partial(_check_indices, extent, grid, error, ignored), values)


def _check_indices(
    extent: int, grid: ProcessGrid, error: Callable[[int], Exception], ignored: int | None, values: torch.Tensor
) -> None:
    outside = (values < 0) | (values >= extent)
    invalid = values[outside if ignored is None else outside & (values != ignored)]
    example = int(invalid[0]) if invalid.numel() else _NO_INVALID_INDEX
    # Ranks without an invalid index take part, too. The maximum selects one index, so that all messages are equal.
    highest = int(allreduce(grid.world, torch.tensor([example]), "check of indices", MPI.MAX).item())
    if highest != _NO_INVALID_INDEX:
        raise error(highest)


class LinearAlgebraError(NumericalError, torch.linalg.LinAlgError):  # type: ignore[name-defined, misc]
    """Error of a function of ``torch.linalg`` about the values of a matrix, on all ranks."""


def call_or_raise_on_all_ranks(grid: ProcessGrid, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that checks the values of its blocks, and raise on all ranks if it fails on any.

    Collective: call on every rank.

    Parameters
    ----------
    grid : ProcessGrid
    function : callable
        A function of torch.
    *args, **kwargs
        Its arguments.

    Returns
    -------
    object
        The result of ``function`` on this rank.

    Raises
    ------
    NumericalError
        If torch rejects the values of any rank, with torch's message.
    """
    if grid.size == 1:
        return function(*args, **kwargs)
    # A subclass of torch's error, so that `except torch.linalg.LinAlgError` of a single-process program still works.
    error = LinearAlgebraError if name_of(function).startswith("torch.linalg.") else NumericalError

    def attempt() -> Any:
        if recording.active is None:
            return function(*args, **kwargs)
        return recording.active.try_on_all_ranks(grid.world, lambda: function(*args, **kwargs))

    return agreement.try_on_all_ranks(grid.world, attempt, error)
