"""Conversion of stored values to the dtype of a tensor without losing any.

Integers and booleans keep their exact value. Floating-point values may be rounded to a floating-point dtype, but must
not overflow. Everything else raises.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distconv.errors import DataError


def default_dtype(stored: np.dtype) -> torch.dtype:
    """Return the dtype of a tensor of ``stored`` values if the user chose none.

    Integers become int64, which losses take as class indices; booleans stay booleans; all others become float32.
    """
    if stored.kind == "b":
        return torch.bool
    return torch.int64 if stored.kind in "iu" else torch.float32


def convert_values(values: NDArray[np.generic], dtype: torch.dtype, what: str) -> torch.Tensor:
    """Return ``values`` as a tensor of ``dtype`` on the CPU.

    Parameters
    ----------
    values : ndarray
        Numbers of any dtype and byte order.
    dtype : torch.dtype
        Dtype of the tensor.
    what : str
        Origin of the values; the error begins with it.

    Returns
    -------
    Tensor
        The values. The tensor shares the memory of ``values`` if that is writable and needs no conversion. Otherwise it
        is a copy.

    Raises
    ------
    DataError
        If the values are not numbers, or ``dtype`` cannot hold one of them.
    """
    if values.dtype.kind not in ("biufc" if dtype.is_complex else "biuf"):
        raise DataError(f"{what} has values of {values.dtype}, which {dtype} cannot hold. Store real numbers.")
    # torch has no extended precision, and takes values in the byte order of the machine.
    native = values.dtype.newbyteorder("=") if values.dtype.itemsize <= 8 or dtype.is_complex else np.dtype("f8")
    # A copy of read-only memory: torch warns about it, because a tensor may be written to.
    source: NDArray[Any] = np.array(values, native, order="C", copy=None if values.flags.writeable else True)
    if any(stride < 0 for stride in source.strides):
        source = source.copy()  # NumPy counts a flipped dimension of size 1 as contiguous; torch rejects its stride
    result = torch.from_numpy(source).to(dtype)
    # Compared after the conversion: torch converts values that do not fit without an error.
    lost = _lossy_mask(source, result)
    if lost is not None and lost.any():
        raise DataError(
            f"{what} has the value {source[lost][0]!s} of {values.dtype}, which {dtype} cannot hold. Give its Field "
            "another dtype, or correct the data."
        )
    return result


def _lossy_mask(source: NDArray[Any], result: torch.Tensor) -> NDArray[Any] | None:
    """Return a mask of the values that ``result`` does not hold; None if no value of this dtype can be lost."""
    kind, dtype = source.dtype.kind, result.dtype
    if kind == "b" or torch.from_numpy(np.empty(0, source.dtype)).dtype == dtype:
        return None
    if dtype == torch.bool:
        return np.asarray((source != 0) & (source != 1))
    if kind in "fc" and (dtype.is_floating_point or dtype.is_complex):
        # Infinite values stay infinite. Finite ones must not become infinite.
        return np.asarray(np.isfinite(source) & ~torch.isfinite(result).numpy())
    if kind == "f":
        info = torch.iinfo(dtype)
        wide = source.astype(np.float64)
        # max + 1 is a power of 2, which float64 represents. max itself of int64 would be rounded.
        return np.asarray(~((np.trunc(wide) == wide) & (wide >= float(info.min)) & (wide < float(info.max) + 1)))
    if dtype.is_complex:
        dtype = dtype.to_real()
    # Up to this size a floating-point dtype holds all integers.
    most = int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
    least = -most if dtype.is_floating_point else torch.iinfo(dtype).min
    stored = np.iinfo(source.dtype)
    if least <= stored.min and stored.max <= most:
        return None
    # Bounds outside of the stored dtype are not compared: NumPy before 2 would convert them, and wrap around.
    lost = np.zeros(source.shape, bool)
    if stored.max > most:
        lost |= source > source.dtype.type(most)
    if stored.min < least:
        lost |= source < source.dtype.type(least)
    return lost
