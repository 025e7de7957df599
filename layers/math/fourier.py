"""Fourier transforms along split dimensions.

An axis that splits a dimension moves to another dimension for the transform of the first one
(``Distribution.transposed``), so each rank transforms its part of the lines. Dimensions are transformed together if
all of them can be complete at once, otherwise one after the other.

A spectrum keeps the distribution that the last step has left. The inverse starts from it, and moves the axes back to
the dimensions that it transforms. So a spectral convolution moves half of the data that it would move if each transform
restored the distribution of its input.

Source: the pencils of distributed Fourier transforms, e.g. Dalcin, Mortensen, Keyes 2019, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from distconv.dispatch import implements
from distconv.distribution import Distribution
from distconv.layers.common.alignment import all_to_all_transpose, result_shape
from distconv.layers.common.empty_blocks import run_like_other_ranks
from distconv.tensor import DistTensor

Transform = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class _TransformKind:
    """A transform of several dimensions, and the transforms of single dimensions of which it consists.

    All dimensions have a complex transform except for the last one, which may be real.
    """

    all_dims: Transform
    """The transform of all dimensions at once."""
    other_dims: Transform
    """The transform of each dimension but the last."""
    last_dim: Transform
    """The transform of the last dimension."""
    starts_with_last: bool = False
    """True if the last dimension is transformed first, since its input is real. Otherwise it is transformed last."""
    inverse: bool = False
    """True to move axes back to the transformed dimensions. Otherwise the result keeps the last distribution."""

    def steps(self, x: DistTensor, dims: Sequence[int]) -> list[tuple[Transform, list[int]]]:
        """Return the transforms in order, each with the indices into ``dims`` that it transforms together."""
        indices = list(range(len(dims)))
        # Together, if all `dims` can be complete without losing an axis, whose ranks would transform the same lines.
        if len(dims) == 1 or len(x.dist.transposed(dims, x.shape).split_axes) == len(x.dist.split_axes):
            return [(self.all_dims, indices)]
        # One after the other: dimensions that are complete already first, in one call, then each split one.
        complete = [i for i in indices[:-1] if x.dist.split[dims[i]] is None]
        split = [i for i in indices[:-1] if i not in complete]
        rest = [(self.other_dims, group) for group in (complete, *([i] for i in split)) if group]
        last = [(self.last_dim, indices[-1:])]
        return last + rest if self.starts_with_last else rest + last


_FFT = torch.fft
_SPATIAL_AXES = ("d", "h", "w")
"""Axes that split spatial dimensions by default."""
_KINDS = {
    "fft": _TransformKind(_FFT.fftn, _FFT.fftn, _FFT.fftn),
    "ifft": _TransformKind(_FFT.ifftn, _FFT.ifftn, _FFT.ifftn, inverse=True),
    "rfft": _TransformKind(_FFT.rfftn, _FFT.fftn, _FFT.rfftn, starts_with_last=True),
    "irfft": _TransformKind(_FFT.irfftn, _FFT.ifftn, _FFT.irfftn, inverse=True),
    "hfft": _TransformKind(_FFT.hfftn, _FFT.fftn, _FFT.hfftn, inverse=True),
    "ihfft": _TransformKind(_FFT.ihfftn, _FFT.ifftn, _FFT.ihfftn, starts_with_last=True),
}


def _transform_complete_dims(
    function: Transform, x: DistTensor, dims: list[int], sizes: list[int], norm: str | None
) -> DistTensor:
    """Transform ``dims``, which are made complete first. Collective."""
    x = all_to_all_transpose(x, dims)
    options = (tuple(sizes), tuple(dims), norm)
    shape = result_shape(function, x, *options)
    local = run_like_other_ranks(lambda block: function(block, *options), x.dist.local_shape(shape), x.local)
    return DistTensor(local, x.dist, shape)


def _transform(kind: _TransformKind, x: DistTensor, dims: Sequence[int], sizes: Sequence[int], norm: Any) -> DistTensor:
    """Transform ``dims`` to ``sizes`` elements; -1 leaves a size unchanged. Collective."""
    first_dist, shape = x.dist, x.shape
    dims = [d % x.dim() for d in dims]
    for function, indices in kind.steps(x, dims):
        x = _transform_complete_dims(function, x, [dims[i] for i in indices], [sizes[i] for i in indices], norm)
    # An axis is lost if no other dimension can be split by it: its ranks then compute the same lines. The result is
    # split as the input is, so that later operators are not computed by all of them.
    if x.dist.split_axes != first_dist.split_axes:
        return x.redistribute(first_dist if x.shape == shape else first_dist.balanced())
    return x.redistribute(_restored_distribution(x, dims)) if kind.inverse else x


def _restored_distribution(x: DistTensor, dims: Sequence[int]) -> Distribution:
    """Return the distribution of ``x`` with axes moved back to ``dims``.

    These are axes of space that a transform had moved to other dimensions. The last of ``dims`` gets ``w``, the one
    before it ``h``, and so on.
    """
    axes = list(x.dist.split)
    default_axes = dict(zip(sorted(dims)[::-1], _SPATIAL_AXES[::-1], strict=False))
    for dim, axis in enumerate(x.dist.split):
        if dim in dims or axis not in _SPATIAL_AXES:
            continue
        # Dimensions with at least one index for each rank.
        free = [d for d in sorted(dims) if axes[d] is None and x.shape[d] >= x.grid.shape[axis]]
        if free:
            axes[dim], axes[next((d for d in free if default_axes.get(d) == axis), free[0])] = None, axis
    return x.dist if axes == list(x.dist.split) else x.dist.with_axes(axes, keep_irregular=False)


def _transform_one_dim(
    kind: _TransformKind, function: Transform, input: Any, n: int | None = None, dim: int = -1, norm: Any = None
) -> Any:
    """Transform one dimension."""
    result_shape(function, input, n, dim, norm)
    return _transform(kind, input, [dim], [-1 if n is None else n], norm)


def _transform_several_dims(
    kind: _TransformKind, function: Transform, default: Any, input: Any, s: Any = None, dim: Any = (), norm: Any = None
) -> Any:
    """Transform several dimensions."""
    # () is the default, because None is a valid argument: all dimensions, or the last ones that `s` names.
    dim = default if dim == () else dim
    result_shape(function, input, s, dim, norm)
    if dim is None:
        dim = range(-(input.dim() if s is None else len(s)), 0)
    dims = [dim] if isinstance(dim, int) else list(dim)
    sizes = [-1] * len(dims) if s is None else [s] if isinstance(s, int) else list(s)
    return _transform(kind, input, dims, sizes, norm)


for _name, _kind in _KINDS.items():
    for _rule, _function, _rest in (
        (_transform_one_dim, getattr(_FFT, _name), ()),
        (_transform_several_dims, getattr(_FFT, f"{_name}2"), ((-2, -1),)),
        (_transform_several_dims, getattr(_FFT, f"{_name}n"), (None,)),
    ):
        implements(_function, passes=None)(partial(_rule, _kind, _function, *_rest))


def _shift(sign: int, input: DistTensor, dim: int | Sequence[int] | None = None) -> torch.Tensor:
    """Compute ``fftshift`` or its inverse: a roll by half of each size."""
    dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    return torch.roll(input, [sign * (input.shape[d] // 2) for d in dims], list(dims))


implements(_FFT.fftshift)(partial(_shift, 1))
implements(_FFT.ifftshift)(partial(_shift, -1))
