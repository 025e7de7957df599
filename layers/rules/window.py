"""Windows: the input indices of a dimension from which an output index is computed.

Arithmetic without communication. :mod:`~distconv.layers.rules.rule` turns windows into halos.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distconv.distribution import Interval


@dataclass(frozen=True)
class Window:
    """The input indices that each output index of a dimension needs.

    Output index ``i`` needs ``size`` input indices, ``dilation`` apart, from ``i * stride - padding`` on. Without
    arguments that is the same index only.

    Parameters
    ----------
    size : int
        Number of input indices.
    stride : int
        Distance between the windows of neighbouring outputs.
    padding : int or pair of int
        Padding on both sides, or a pair: before and after.
    dilation : int
        Distance between the indices of a window.

    Raises
    ------
    ValueError
        If ``size``, ``stride`` or ``dilation`` is below 1, or ``padding`` below 0.
    """

    size: int = 1
    stride: int = 1
    padding: int | tuple[int, int] = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        if min(self.size, self.stride, self.dilation) < 1 or min(self.around) < 0:
            raise ValueError(f"{self}: size, stride and dilation must be 1 or more, and padding 0 or more")

    @property
    def around(self) -> tuple[int, int]:
        """Padding before and after."""
        return (self.padding, self.padding) if isinstance(self.padding, int) else self.padding

    @property
    def reach(self) -> int:
        """Number of input indices from the first to the last index of a window."""
        return (self.size - 1) * self.dilation + 1

    def outputs(self, extent: int) -> int:
        """Return the number of outputs of a dimension; below 1 if it is shorter than the window.

        Parameters
        ----------
        extent : int
            Number of input indices.

        Returns
        -------
        int
        """
        return (extent + sum(self.around) - self.reach) // self.stride + 1

    def needed(self, out: Interval) -> Interval:
        """Return the input indices, including padding, from which some outputs are computed.

        Parameters
        ----------
        out : Interval
            Range of output indices.

        Returns
        -------
        Interval
            Indices outside the input are padding. Empty if there are no outputs.

        Examples
        --------
        >>> Window(3, padding=1).needed(Interval(4, 8)), Window(2, stride=2).needed(Interval(1, 3))
        (Interval(start=3, stop=9), Interval(start=2, stop=6))
        """
        if out.start >= out.stop:
            return Interval(0, 0)
        start = out.start * self.stride - self.around[0]
        return Interval(start, start + (out.extent - 1) * self.stride + self.reach)


def nonnegative_dims(windows: Mapping[int, Window], dims: int) -> dict[int, Window]:
    """Return windows with dimensions counted from 0.

    Parameters
    ----------
    windows : mapping of int to Window
        Negative dimensions count from the last one.
    dims : int
        Number of dimensions of the tensor.

    Returns
    -------
    dict of int to Window
        Without dimensions that the tensor does not have.
    """
    return {dim % dims: window for dim, window in windows.items() if -dims <= dim < dims}


def pad_argument(dims: int, around: Mapping[int, tuple[int, int]]) -> list[int]:
    """Return the argument ``pad`` of ``F.pad``, which begins with the last dimension.

    Parameters
    ----------
    dims : int
        Number of dimensions of the tensor.
    around : mapping of int to pair of int
        Padding before and after, by dimension.

    Returns
    -------
    list of int

    Examples
    --------
    >>> pad_argument(3, {1: (2, 3)})
    [0, 0, 2, 3, 0, 0]
    """
    return [n for dim in reversed(range(dims)) for n in around.get(dim, (0, 0))]
