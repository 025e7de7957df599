"""Owned and received ranges of a convolution's input on a rank.

distconv convolves the owned block and the ghosts one by one (:mod:`distconv.kernels.convolution`). A table of measured
times therefore distinguishes blocks with ghosts from blocks without.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from distconv.distribution import block_range
from distconv.kernels.convolution import Range
from distconv.parameters.channel_split import ChannelSplit
from distconv.perfmodel.cost.block_geometry import AxisParts, axes_of, widest_halo_index
from distconv.perfmodel.graph.graph import Operation


@dataclass(frozen=True)
class ConvolutionRanges:
    """Ranges of a convolution on one rank, without padding: channels first, then the spatial dimensions.

    Spatial ranges are global. Channels that are split count from the first one that the rank needs, and the owned ones
    come first. Only their numbers matter, because the time does not depend on which channels a rank owns.

    Attributes
    ----------
    own : tuple of (int, int)
        Owned input.
    needed : tuple of (int, int)
        Needed input; contains the owned input.
    out : tuple of (int, int)
        Computed output, spatial dimensions only.
    """

    own: tuple[Range, ...]
    needed: tuple[Range, ...]
    out: tuple[Range, ...]

    @property
    def name(self) -> str:
        """Rows below, in and above the owned block of each dimension; part of the key of a measured time."""
        pairs = zip(self.own, self.needed, strict=True)
        return "x".join(f"{own[0] - need[0]}+{own[1] - own[0]}+{need[1] - own[1]}" for own, need in pairs)

    def ghosts(self) -> Iterator[tuple[Range, ...]]:
        """Yield the received boxes, those at edges and corners of the owned box included."""
        intervals = [
            [own, *(r for r in ((need[0], own[0]), (own[1], need[1])) if r[1] > r[0])]
            for own, need in zip(self.own, self.needed, strict=True)
        ]
        yield from (box for box in itertools.product(*intervals) if box != self.own)


def convolution_ranges(op: Operation, parts: AxisParts, split: ChannelSplit | None) -> ConvolutionRanges | None:
    """Return the ranges of a convolution on the rank that receives the most.

    Parameters
    ----------
    op : Operation
    parts : AxisParts
    split : ChannelSplit or None
        Split of the channels.

    Returns
    -------
    ConvolutionRanges or None
        None if nothing is received, and for other operations and transposed convolutions.
    """
    if op.window is None or op.window.transposed or not op.kind.startswith("conv"):
        return None
    channels = (0, op.x.shape[1])
    own, needed, out = [channels], [channels], []
    if split is not None and op.groups == 1:
        needed = [(0, max(split.input_channels(index).extent for index in range(split.parts)))]
        own = [(0, min(needed[0][1], block_range(op.x.shape[1], split.parts, 0).stop))]
    for dim, axis in enumerate(axes_of(op.x.shape)[2:]):
        extent, out_extent = op.x.shape[dim + 2], op.y.shape[dim + 2]
        count = parts.parts_along(axis)
        index = widest_halo_index(op.window, extent, out_extent, count, dim)
        block, result = block_range(extent, count, index), block_range(out_extent, count, index)
        start, stop = op.window.needed(dim, (result.start, result.stop))
        own.append((block.start, block.stop))
        # Padding is not received. The owned block is needed in full, also where the stride skips its last rows.
        needed.append((min(max(start, 0), block.start), max(min(stop, extent), block.stop)))
        out.append((result.start, result.stop))
    pieces = ConvolutionRanges(tuple(own), tuple(needed), tuple(out))
    return None if pieces.own == pieces.needed else pieces
