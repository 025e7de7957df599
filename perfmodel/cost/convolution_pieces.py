"""What a convolution really computes from on a rank: the block that it owns, and what comes from others around it.

distconv convolves the pieces one by one (:mod:`distconv.kernels.convolution`), so a table of measured times keeps
blocks with ghosts apart from blocks without.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from distconv.distribution import block_range
from distconv.kernels.convolution import Range
from distconv.parameters.channel_split import ChannelSplit
from distconv.perfmodel.cost.block_geometry import AxisParts, axes_of, halo_index
from distconv.perfmodel.graph.graph import Operation


@dataclass(frozen=True)
class Pieces:
    """Global ranges, channels first and then the spatial dimensions: what a rank owns, what it needs; and its outputs.

    What it needs is without the padding.
    """

    own: tuple[Range, ...]
    needed: tuple[Range, ...]
    out: tuple[Range, ...]

    @property
    def name(self) -> str:
        """Extents below, in, and above the owned block of each dimension."""
        pairs = zip(self.own, self.needed, strict=True)
        return "x".join(f"{own[0] - need[0]}+{own[1] - own[0]}+{need[1] - own[1]}" for own, need in pairs)

    def ghosts(self) -> Iterator[tuple[Range, ...]]:
        """The boxes that come from others."""
        intervals = [
            [own, *(r for r in ((need[0], own[0]), (own[1], need[1])) if r[1] > r[0])]
            for own, need in zip(self.own, self.needed, strict=True)
        ]
        yield from (box for box in itertools.product(*intervals) if box != self.own)


def pieces_of(op: Operation, parts: AxisParts, split: ChannelSplit | None) -> Pieces | None:
    """The pieces of a convolution on the rank with most ghosts; None if a rank has all that it needs, or of others."""
    if op.window is None or op.window.transposed or not op.kind.startswith("conv"):
        return None
    channels = (0, op.x.shape[1])
    own, needed, out = [channels], [channels], []
    if split is not None and op.groups == 1:
        needed = [(0, max(split.input_channels(index).extent for index in range(split.parts)))]
        own = [(0, min(needed[0][1], block_range(op.x.shape[1], split.parts, 0).stop))]
    for dim, axis in enumerate(axes_of(op.x.shape)[2:]):
        extent, out_extent = op.x.shape[dim + 2], op.y.shape[dim + 2]
        count = parts.along(axis)
        index = halo_index(op.window, extent, out_extent, count, dim)
        block, result = block_range(extent, count, index), block_range(out_extent, count, index)
        start, stop = op.window.needed(dim, (result.start, result.stop))
        own.append((block.start, block.stop))
        needed.append((min(max(start, 0), block.start), max(min(stop, extent), block.stop)))
        out.append((result.start, result.stop))
    pieces = Pieces(tuple(own), tuple(needed), tuple(out))
    return None if pieces.own == pieces.needed else pieces
