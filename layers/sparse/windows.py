"""Checks of what layers over windows are given: kernels, strides, offsets, inputs."""

from __future__ import annotations

from collections.abc import Sequence

from distconv.errors import ShapeError, UnsupportedOperation
from distconv.kernels.sparse.coordinates import MAX_DIMENSION, Offsets

from .tensor import SparseTensor


def extents(
    size: int | Sequence[int] | None, dimension: int, name: str = "kernel_size", least: int = 1
) -> tuple[int, ...]:
    """``size`` along each dimension.

    Raises
    ------
    ValueError
        If it is not one integer, or one for each dimension, of at least ``least``.
    """
    sizes = (size,) * dimension if isinstance(size, int) else tuple(size or ())
    if len(sizes) != dimension or not all(isinstance(k, int) and k >= least for k in sizes):
        raise ValueError(f"{name}={size}: an integer of at least {least}, or one for each of {dimension} dimensions")
    return sizes


def check_window(dimension: int, *, stride: int, dilation: int = 1) -> None:
    """See that a layer can be.

    Raises
    ------
    ValueError
        If there are no such dimensions, or stride or dilation are no positive integers.
    """
    if not 1 <= dimension <= MAX_DIMENSION:
        raise ValueError(f"dimension={dimension}: sparse layers have 1 to {MAX_DIMENSION} dimensions")
    for name, value in (("stride", stride), ("dilation", dilation)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value}: it is one positive integer, for all dimensions")


def checked_offsets(offsets: Sequence[Sequence[int]], dimension: int) -> Offsets:
    """``offsets`` as tuples.

    Raises
    ------
    ValueError
        If there are none, one occurs twice, or one is not of ``dimension`` integers.
    """
    steps = tuple(tuple(int(o) for o in offset) for offset in offsets)
    if not steps or len(set(steps)) < len(steps) or any(len(offset) != dimension for offset in steps):
        raise ValueError(f"offsets={list(steps)}: give distinct offsets of {dimension} integers each, at least one")
    return steps


def check_input(x: SparseTensor, dimension: int | None = None) -> None:
    """See that a layer can take ``x``.

    Raises
    ------
    UnsupportedOperation
        If it is no SparseTensor.
    ShapeError
        If it has another dimension than a layer for one alone.
    """
    if not isinstance(x, SparseTensor):
        raise UnsupportedOperation(f"a sparse layer takes a SparseTensor, not {type(x).__name__}; see from_dense")
    if dimension not in (None, x.dimension):
        raise ShapeError(f"a sparse layer of dimension={dimension} got coordinates of {x.dimension} dimensions")
