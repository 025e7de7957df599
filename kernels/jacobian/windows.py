"""Pairs of inputs and outputs of a window that moves over two dimensions, for convolution and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.modules.utils import _pair

from distconv.errors import ShapeError

Two = int | Sequence[int]


@dataclass(frozen=True)
class Windows:
    """A window of ``kernel`` over inputs of ``extent``; all are pairs (height, width)."""

    extent: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil: bool = False

    @classmethod
    def build(
        cls, extent: Two, kernel: Two, stride: Two, padding: Two, dilation: Two, *, ceil: bool = False
    ) -> Windows:
        """Return windows, given pairs, or numbers for both dimensions.

        Parameters
        ----------
        extent : int or pair of int
            Size of the input (height, width).
        kernel, stride, padding, dilation : int or pair of int
            As in ``torch.nn.functional.conv2d``.
        ceil : bool
            As ``ceil_mode`` in ``torch.nn.functional.max_pool2d``.

        Returns
        -------
        Windows

        Raises
        ------
        ShapeError
            If no window fits.
        """
        windows = cls(_pair(extent), _pair(kernel), _pair(stride), _pair(padding), _pair(dilation), ceil)
        if min(windows.out) < 1 or min(*windows.stride, *windows.dilation) < 1 or min(windows.padding) < 0:
            raise ShapeError(
                f"Jacobian: no window of {windows.kernel} with stride {windows.stride}, padding {windows.padding}, "
                f"dilation {windows.dilation} fits an input of {windows.extent}"
            )
        return windows

    @cached_property
    def out(self) -> tuple[int, int]:
        """Number of outputs (height, width)."""
        first, second = (self._outputs(d) for d in (0, 1))
        return first, second

    def _outputs(self, d: int) -> int:
        i, k, s, p, dilation = (x[d] for x in (self.extent, self.kernel, self.stride, self.padding, self.dilation))
        span = i + 2 * p - dilation * (k - 1) - 1
        if span < 0 or s < 1:
            return 0
        if not self.ceil:
            return span // s + 1
        outputs = -(-span // s) + 1
        return outputs - ((outputs - 1) * s >= i + p)  # torch: the last window starts inside the input

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the window element, input and output of each pair, as flat indices, sorted by window element."""
        (ky, iy, oy), (kx, ix, ox) = self._along(0), self._along(1)
        return tuple(  # type: ignore[return-value]
            # A flat index is that of the row times the width, plus that of the column.
            (a[:, None] * extent + b[None]).flatten()
            for a, b, extent in ((ky, kx, self.kernel[1]), (iy, ix, self.extent[1]), (oy, ox, self.out[1]))
        )

    def _along(self, d: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k, o = torch.meshgrid(torch.arange(self.kernel[d]), torch.arange(self.out[d]), indexing="ij")
        i = o * self.stride[d] - self.padding[d] + k * self.dilation[d]
        # Pairs in the padding have no input.
        inside = (i >= 0) & (i < self.extent[d])
        return k[inside], i[inside], o[inside]
