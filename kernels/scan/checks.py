"""Checks of the arguments of a scan: Jacobians, gradient and sources must fit each other on all ranks.

:mod:`.backpropagation` calls :func:`build_problem` before any value is sent. So all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import ScanError
from distconv.kernels.jacobian.csr import SparseJacobian
from distconv.process import watchdog

from .elements import Chain, Identity, Level, Stack, make_level

WHERE = "backpropagate"


@dataclass(frozen=True)
class Size:
    """Size of one or several transposed Jacobians of equal shape."""

    rows: int
    cols: int
    density: float = 1.0
    """Fraction of non-zeros."""
    batch: int = 1
    """Number of samples; 1 if all samples share a Jacobian."""
    count: int = 1
    """Number of Jacobians."""


@dataclass(frozen=True)
class Problem:
    """Shapes of a scan over all ranks, identical on all of them."""

    gradient: tuple[int, int]
    """Shape (B, N)."""
    dtype: str
    """dtype and device type, as in ``"torch.float32 on cpu"``."""
    ranks: tuple[tuple[Size | None, ...], ...]
    """Sizes of the Jacobians of each rank; None for the identity."""
    stacked: bool
    """True if all Jacobians are in tensors (n, B, N, N). Otherwise at least one rank has a sequence."""

    @property
    def n(self) -> int:
        """Number of Jacobians on all ranks."""
        return sum(map(self.count_on_rank, range(len(self.ranks))))

    def count_on_rank(self, rank: int) -> int:
        """Return the number of Jacobians on ``rank``, identities included."""
        return sum(1 if size is None else size.count for size in self.ranks[rank])

    @property
    def active(self) -> list[int]:
        """Ranks that take part: the first one, which has the gradient, and those with Jacobians."""
        return [rank for rank, sizes in enumerate(self.ranks) if sizes or rank == 0]

    def empty_tensor(self) -> torch.Tensor:
        """Return an empty tensor of the dtype and device."""
        dtype, _, device = self.dtype.partition(" on ")
        return torch.empty(0, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)

    @cached_property
    def widths(self) -> list[int]:
        """Size of a sample's gradient after the Jacobians of each rank."""
        widths = [self.gradient[1]]
        for sizes in self.ranks:
            widths.append(next((size.rows for size in reversed(sizes) if size is not None), widths[-1]))
        return widths[1:]


def build_problem(gradient: torch.Tensor | None, jacobians: Any, sources: Any, comm: Any) -> tuple[Level, Problem]:
    """Check the arguments, and return this rank's elements and the problem of all ranks.

    Collective if ``comm`` is given: call on every rank.

    Parameters
    ----------
    gradient, jacobians, sources, comm
        As in :func:`distconv.kernels.scan.backpropagate`.

    Returns
    -------
    tuple of (Level, Problem)
        The problem is identical on all ranks.

    Raises
    ------
    ScanError
        On every rank, if the arguments do not fit each other.
    """
    if comm is None:
        level = _build_level(gradient, jacobians, sources, first=True)
        return level, _join_parts([_describe_arguments(gradient, level)])
    level = try_on_all_ranks(comm, lambda: _build_level(gradient, jacobians, sources, first=comm.rank == 0), ScanError)
    with watchdog.waiting(lambda: "agreement on the Jacobians of a scan"):
        # All ranks check the arguments of all: they raise the same error, or none does.
        parts = comm.allgather(_describe_arguments(gradient, level))
    return level, _join_parts(parts)


@dataclass(frozen=True)
class _RankArguments:
    """Shapes and dtypes of one rank's arguments, as sent to all ranks."""

    gradient: tuple[int, ...] | None
    dtype: str | None
    sizes: tuple[Size | None, ...]
    stacked: bool
    source_samples: tuple[int, ...]
    """Distinct numbers of samples of the sources: empty, or only that of the gradient, if they are valid."""


def _describe_arguments(gradient: torch.Tensor | None, level: Level) -> _RankArguments:
    # One tensor is enough: those of a rank have one dtype and device, which was checked before.
    values = [*_tensors(level)[:1], *([] if gradient is None else [gradient])]
    dtype = f"{values[0].dtype} on {values[0].device.type}" if values else None
    shifts = [level.shifts] if isinstance(level, Stack) else [element.shift for element in level.elements]
    samples = sorted({shift.shape[-2] for shift in shifts if shift is not None})
    shape = None if gradient is None else tuple(gradient.shape)
    return _RankArguments(shape, dtype, tuple(_sizes(level)), isinstance(level, Stack), tuple(samples))


def _join_parts(parts: Sequence[_RankArguments]) -> Problem:
    shape = parts[0].gradient
    assert shape is not None
    samples, width = shape
    # A rank without Jacobians does not decide: its empty argument has no kind.
    stacked = all(part.stacked for part in parts if part.sizes)
    # The first rank has the gradient, whose dtype and device hold for all.
    problem = Problem((samples, width), str(parts[0].dtype), tuple(part.sizes for part in parts), stacked)
    if not problem.n:
        raise ScanError(f"{WHERE}: no Jacobians on any of {len(parts)} ranks; pass at least one")
    # The chain continues over the ranks: the first Jacobian of a rank follows the last one of the ranks before it.
    before = f"the gradient {shape}"
    for rank, part in enumerate(parts):
        where = f" on rank {rank}" if len(parts) > 1 else ""
        if part.sizes and part.dtype not in (None, parts[0].dtype):
            raise ScanError(
                f"{WHERE}: values{where} are {part.dtype}, on rank 0 {parts[0].dtype}. Pass one dtype and device"
            )
        if part.source_samples not in ((), (samples,)):
            raise ScanError(
                f"{WHERE}: sources{where} have {part.source_samples} samples, but the gradient has {samples}"
            )
        for index, size in enumerate(part.sizes):
            if size is None:
                continue
            name = f"jacobians[{index}]{where}"
            if size.cols != width:
                raise ScanError(
                    f"{WHERE}: {name} (={size.rows} x {size.cols}) has {size.cols} columns, but {before} results in "
                    f"{width} values. Pass transposed Jacobians (N_in, N_out), the last layer's first"
                )
            if size.batch not in (1, samples):
                raise ScanError(
                    f"{WHERE}: {name} has {size.batch} samples, but the gradient has {samples}. Pass as many, or 1"
                )
            width, before = size.rows, name
    return problem


def _build_level(gradient: torch.Tensor | None, jacobians: Any, sources: Any, first: bool) -> Level:
    level = make_level(jacobians, sources)
    _check_local_arguments(gradient, level, first)
    return level


def _check_local_arguments(gradient: torch.Tensor | None, level: Level, first: bool) -> None:
    """Check this rank's arguments, apart from agreement with other ranks."""
    if gradient is None:
        if first:
            raise ScanError(f"{WHERE}: gradient is None; pass dl/dx_n (B, N)")
    elif not isinstance(gradient, torch.Tensor):
        raise ScanError(f"{WHERE}: gradient is a {type(gradient).__name__}; pass a tensor (B, N)")
    elif gradient.dim() != 2 or not gradient.numel():
        raise ScanError(f"{WHERE}: gradient {tuple(gradient.shape)} is not (B, N) with at least one value")
    _check_stack(level) if isinstance(level, Stack) else _check_chain(level)
    tensors = ([] if gradient is None else [gradient]) + _tensors(level)
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ScanError(f"{WHERE}: values are {tensor.dtype}; pass floating-point tensors")
    kinds = sorted({f"{tensor.dtype} on {tensor.device}" for tensor in tensors})
    if len(kinds) > 1:
        raise ScanError(
            f"{WHERE}: gradient, Jacobians and sources are {' and '.join(kinds)}. Pass one dtype and device"
        )


def _check_stack(level: Stack) -> None:
    shape = tuple(level.matrices.shape)
    if len(shape) != 4 or shape[2] != shape[3]:
        raise ScanError(f"{WHERE}: jacobians {shape} are not (n, B, N, N) or (n, 1, N, N). Pass other shapes as a list")
    shifts = level.shifts
    if shifts is not None and (shifts.dim() != 3 or (len(shifts), shifts.shape[2]) != (shape[0], shape[2])):
        raise ScanError(f"{WHERE}: sources {tuple(shifts.shape)} are not (n, B, N) = ({shape[0]}, B, {shape[2]})")


def _check_chain(level: Chain) -> None:
    for index, element in enumerate(level.elements):
        matrix, shift = element.matrix, element.shift
        if shift is None:
            continue
        if isinstance(matrix, Identity) or shift.dim() != 2 or shift.shape[1] != matrix.shape[1]:
            described = "an identity, which has no source" if isinstance(matrix, Identity) else f"{tuple(matrix.shape)}"
            raise ScanError(
                f"{WHERE}: sources[{index}] {tuple(shift.shape)} does not fit jacobians[{index}], {described}"
            )


def _tensors(level: Level) -> list[torch.Tensor]:
    if isinstance(level, Stack):
        return [tensor for tensor in (level.matrices, level.shifts) if tensor is not None]
    tensors = []
    for element in level.elements:
        if isinstance(element.matrix, SparseJacobian):
            tensors.append(element.matrix.values)
        elif isinstance(element.matrix, torch.Tensor):
            tensors.append(element.matrix)
        if element.shift is not None:
            tensors.append(element.shift)
    return tensors


def _sizes(level: Level) -> list[Size | None]:
    """Return the size of each Jacobian, None for the identity."""
    if isinstance(level, Stack):
        n, batch, rows, cols = level.matrices.shape
        return [Size(rows, cols, batch=batch, count=n)] if n else []
    return [_size(element.matrix) for element in level.elements]


def _size(matrix: Any) -> Size | None:
    if isinstance(matrix, Identity):
        return None
    batch, rows, cols = matrix.shape
    density = 1 - matrix.pattern.sparsity if isinstance(matrix, SparseJacobian) else 1.0
    return Size(rows, cols, density, batch)
