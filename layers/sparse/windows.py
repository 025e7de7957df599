"""Checks of arguments of layers with windows: kernels, strides, offsets, inputs.

Convolution and pooling call them. No communication.
"""

from __future__ import annotations

from collections.abc import Sequence

from distconv.errors import ShapeError, UnsupportedOperation
from distconv.kernels.sparse.coordinates import MAX_DIMENSION, Offsets

from .tensor import SparseTensor


def sizes_per_dim(
    size: int | Sequence[int] | None, dimension: int, name: str = "kernel_size", least: int = 1
) -> tuple[int, ...]:
    """Return a size for each dimension.

    Parameters
    ----------
    size : int, sequence of int or None
        One size for all dimensions, or one for each.
    dimension : int
        Number of spatial dimensions.
    name : str
        Name of the argument, for the message.
    least : int
        Smallest valid size.

    Returns
    -------
    tuple of int

    Raises
    ------
    ValueError
        If ``size`` is not one integer, or one for each dimension, of at least ``least``.
    """
    sizes = (size,) * dimension if isinstance(size, int) else tuple(size or ())
    if len(sizes) != dimension or not all(isinstance(k, int) and k >= least for k in sizes):
        raise ValueError(
            f"{name}={size}: pass an integer of at least {least}, or one for each of {dimension} dimensions"
        )
    return sizes


def check_dimension(dimension: int) -> None:
    """Check the number of dimensions of a layer.

    Parameters
    ----------
    dimension : int

    Raises
    ------
    ValueError
        If the number of dimensions is not supported.
    """
    if not 1 <= dimension <= MAX_DIMENSION:
        raise ValueError(f"dimension={dimension}: sparse layers have 1 to {MAX_DIMENSION} dimensions")


def to_offsets(offsets: Sequence[Sequence[int]], dimension: int) -> Offsets:
    """Return offsets as tuples.

    Parameters
    ----------
    offsets : sequence of sequence of int
    dimension : int
        Number of spatial dimensions.

    Returns
    -------
    tuple of tuple of int

    Raises
    ------
    ValueError
        If there are no offsets, one occurs twice, or one does not have ``dimension`` integers.
    """
    steps = tuple(tuple(int(o) for o in offset) for offset in offsets)
    if not steps or len(set(steps)) < len(steps) or any(len(offset) != dimension for offset in steps):
        raise ValueError(f"offsets={list(steps)}: give distinct offsets of {dimension} integers each, at least one")
    return steps


def check_input(x: SparseTensor, dimension: int | None = None) -> None:
    """Check that a layer supports its input.

    Parameters
    ----------
    x : SparseTensor
    dimension : int, optional
        Number of spatial dimensions of the layer (default: any).

    Raises
    ------
    UnsupportedOperation
        If ``x`` is not a SparseTensor.
    ShapeError
        If ``x`` has another number of dimensions.
    """
    if not isinstance(x, SparseTensor):
        raise UnsupportedOperation(
            f"a sparse layer requires a SparseTensor, not {type(x).__name__}. Convert a dense tensor with from_dense."
        )
    if dimension not in (None, x.dimension):
        raise ShapeError(f"a sparse layer of dimension={dimension} received coordinates of {x.dimension} dimensions")
