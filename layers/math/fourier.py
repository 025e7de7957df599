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
from distconv.layers.common.alignment import result_shape, transposed
from distconv.layers.common.empty_blocks import run_like_other_ranks
from distconv.tensor import DistTensor

Transform = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class _TransformKind:
    """A transform of several dimensions, and the transforms of single dimensions of which it consists.

    All dimensions have a complex transform except for the last one, which may be real.
    """

    whole: Transform
    """The transform of all dimensions at once."""
    each: Transform
    """The transform of each dimension but the last."""
    last: Transform
    """The transform of the last dimension."""
    last_comes_first: bool = False
    """True if the last dimension is transformed first, since its input is real. Otherwise it is transformed last."""
    inverse: bool = False
    """True to move axes back to the transformed dimensions. Otherwise the result keeps the last distribution."""

    def steps(self, x: DistTensor, dims: Sequence[int]) -> list[tuple[Transform, list[int]]]:
        """Return the transforms in order, each with the positions in ``dims`` that it transforms together."""
        places = list(range(len(dims)))
        if len(dims) == 1 or _at_once(x, dims):
            return [(self.whole, places)]
        here = [i for i in places[:-1] if x.dist.split[dims[i]] is None]
        moved = [i for i in places[:-1] if i not in here]
        rest = [(self.each, group) for group in (here, *([i] for i in moved)) if group]
        last = [(self.last, places[-1:])]
        return last + rest if self.last_comes_first else rest + last


_FFT = torch.fft
_SPACE = ("d", "h", "w")
"""Axes that split spatial dimensions by default."""
_KINDS = {
    "fft": _TransformKind(_FFT.fftn, _FFT.fftn, _FFT.fftn),
    "ifft": _TransformKind(_FFT.ifftn, _FFT.ifftn, _FFT.ifftn, inverse=True),
    "rfft": _TransformKind(_FFT.rfftn, _FFT.fftn, _FFT.rfftn, last_comes_first=True),
    "irfft": _TransformKind(_FFT.irfftn, _FFT.ifftn, _FFT.irfftn, inverse=True),
    "hfft": _TransformKind(_FFT.hfftn, _FFT.fftn, _FFT.hfftn, inverse=True),
    "ihfft": _TransformKind(_FFT.ihfftn, _FFT.ifftn, _FFT.ihfftn, last_comes_first=True),
}


def _at_once(x: DistTensor, dims: Sequence[int]) -> bool:
    """Return True if all ``dims`` can be complete without two ranks transforming the same lines."""
    return len(x.dist.transposed(dims, x.shape).split_axes) == len(x.dist.split_axes)


def _along(function: Transform, x: DistTensor, dims: list[int], sizes: list[int], norm: str | None) -> DistTensor:
    """Transform ``dims``, which are made complete first. Collective."""
    x = transposed(x, dims)
    options = (tuple(sizes), tuple(dims), norm)
    shape = result_shape(function, x, *options)
    local = run_like_other_ranks(lambda block: function(block, *options), x.dist.local_shape(shape), x.local)
    return DistTensor(local, x.dist, shape)


def _transformed(
    kind: _TransformKind, x: DistTensor, dims: Sequence[int], sizes: Sequence[int], norm: Any
) -> DistTensor:
    """Transform ``dims`` to ``sizes`` elements; -1 leaves a size unchanged. Collective."""
    home, shape = x.dist, x.shape
    dims = [d % x.dim() for d in dims]
    for function, places in kind.steps(x, dims):
        x = _along(function, x, [dims[i] for i in places], [sizes[i] for i in places], norm)
    if x.dist.split_axes != home.split_axes:
        return x.redistribute(home if x.shape == shape else home.balanced())
    return x.redistribute(_brought_back(x, dims)) if kind.inverse else x


def _brought_back(x: DistTensor, dims: Sequence[int]) -> Distribution:
    """Return the distribution of ``x`` with axes moved back to ``dims``.

    These are axes of space that a transform had moved to other dimensions. The last of ``dims`` gets ``w``, the one
    before it ``h``, and so on.
    """
    axes = list(x.dist.split)
    own = dict(zip(sorted(dims)[::-1], _SPACE[::-1], strict=False))
    for dim, axis in enumerate(x.dist.split):
        if dim in dims or axis not in _SPACE:
            continue
        free = [d for d in sorted(dims) if axes[d] is None and x.shape[d] >= x.grid.shape[axis]]
        if free:
            axes[dim], axes[next((d for d in free if own.get(d) == axis), free[0])] = None, axis
    return x.dist if axes == list(x.dist.split) else x.dist.with_axes(axes, keep_irregular=False)


def _one(
    kind: _TransformKind, function: Transform, input: Any, n: int | None = None, dim: int = -1, norm: Any = None
) -> Any:
    """Transform one dimension."""
    result_shape(function, input, n, dim, norm)
    return _transformed(kind, input, [dim], [-1 if n is None else n], norm)


def _many(
    kind: _TransformKind, function: Transform, default: Any, input: Any, s: Any = None, dim: Any = (), norm: Any = None
) -> Any:
    """Transform several dimensions."""
    dim = default if dim == () else dim
    result_shape(function, input, s, dim, norm)
    if dim is None:
        dim = range(-(input.dim() if s is None else len(s)), 0)
    dims = [dim] if isinstance(dim, int) else list(dim)
    sizes = [-1] * len(dims) if s is None else [s] if isinstance(s, int) else list(s)
    return _transformed(kind, input, dims, sizes, norm)


for _name, _kind in _KINDS.items():
    for _rule, _function, _rest in (
        (_one, getattr(_FFT, _name), ()),
        (_many, getattr(_FFT, f"{_name}2"), ((-2, -1),)),
        (_many, getattr(_FFT, f"{_name}n"), (None,)),
    ):
        implements(_function, passes=None)(partial(_rule, _kind, _function, *_rest))


def _shifted(sign: int, input: DistTensor, dim: int | Sequence[int] | None = None) -> torch.Tensor:
    """Compute ``fftshift`` or its inverse: a roll by half of each size."""
    dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    return torch.roll(input, [sign * (input.shape[d] // 2) for d in dims], list(dims))


implements(_FFT.fftshift)(partial(_shifted, 1))
implements(_FFT.ifftshift)(partial(_shifted, -1))
