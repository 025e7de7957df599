"""Operators that compute each output from a window of the input: what every rank needs, and the box itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from distconv.communication.collectives import gather_region
from distconv.communication.routes import Needs
from distconv.communication.transfer import transfer_plan
from distconv.distribution import Distribution, Interval
from distconv.grid import cached_on_grid
from distconv.kernels.convolution import Range
from distconv.tensor import DistTensor

ChannelNeeds = tuple[int, tuple[Interval, ...]]
"""The dimension of the channels, and what each coordinate along its axis needs of them."""


class InputWindows(Hashable, Protocol):
    """Which inputs outputs are computed from; hashable by value, because plans are cached by it."""

    def needed(self, dim: int, out: Range) -> Range:
        """Input range of spatial dimension ``dim`` (from 0) that the outputs ``out`` need; may leave the input."""


def spread(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """``value`` for each of ``count`` spatial dimensions."""
    return (value,) * count if isinstance(value, int) else tuple(value) * (count if len(value) == 1 else 1)


def window_needs(
    dist: Distribution, out_shape: Sequence[int], windows: InputWindows, channels: ChannelNeeds | None = None
) -> Needs:
    """Input that each rank needs for its block of an output of ``out_shape`` under ``dist``.

    Of the channels it needs what it owns, or as ``channels`` says.
    """
    needs = [] if channels is None else [channels]
    for dim, axis in enumerate(dist.split):
        if dim >= 2 and axis is not None:
            blocks = [dist.intervals(dim, index, out_shape[dim])[0] for index in range(dist.grid.shape[axis])]
            needs.append((dim, tuple(Interval(*windows.needed(dim - 2, block)) for block in blocks)))
    return Needs(dist, tuple(needs))


def spatial_box(dist: Distribution, shape: Sequence[int]) -> tuple[Range, ...]:
    """Spatial part of what this rank owns of ``shape``."""
    return tuple((i.start, i.stop) for i in dist.box(None, shape)[2:])


@cached_on_grid
def _needs(dist: Distribution, out_shape: torch.Size, windows: InputWindows, channels: ChannelNeeds | None) -> Needs:
    return window_needs(dist, out_shape, windows, channels)


def needed_block(
    x: DistTensor,
    out_shape: torch.Size,
    windows: InputWindows,
    fill: float = 0.0,
    channels: ChannelNeeds | None = None,
) -> torch.Tensor:
    """Exactly the input box, ghosts and padding (of value ``fill``) included, for this rank's block of the output.

    With no output here the box is empty but still takes part in the exchange.
    """
    needs = _needs(x.dist, out_shape, windows, channels)
    local = gather_region(x.local, transfer_plan(x.dist, needs, tuple(x.shape))) if needs.needed else x.local
    wanted = [windows.needed(dim, out) for dim, out in enumerate(spatial_box(x.dist, out_shape))]
    return fitted(local, needs.box(x.shape)[2:], wanted, fill)


def fitted(block: torch.Tensor, have: Sequence[Interval], wanted: Sequence[Range], fill: float = 0.0) -> torch.Tensor:
    """``block``, whose spatial dimensions cover ``have``, cut or padded to the ranges ``wanted``."""
    around: list[int] = []
    for interval, needed in zip(have, wanted, strict=True):
        around[:0] = _around(interval, needed)
    return F.pad(block, around, value=fill) if any(around) else block


def _around(have: Interval, needed: Range) -> list[int]:
    """Padding (negative: cropping) in front and behind that makes ``have`` into ``needed``."""
    start, stop = needed
    if stop <= start:
        return [0, -have.extent]
    return [have.start - start, stop - have.stop] if have.extent else [stop - start, 0]


def no_outputs(block: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The result on a rank without outputs: empty, of ``shape``, and part of the graph like any other rank's."""
    # A copy: in-place operators that follow must not touch the version of what the block is saved for.
    return block.reshape(-1)[:0].reshape(tuple(shape)).clone()
