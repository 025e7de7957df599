"""Diagram of the largest halo of a plan: the blocks of a sample, and the ghost region of one rank.

Drawn by ``distconv plan --plot``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from distconv.distribution import block_range
from distconv.perfmodel.cost.block_geometry import AxisParts, axes_of, widest_halo, widest_halo_index
from distconv.perfmodel.cost.evaluation import Prediction
from distconv.perfmodel.graph.graph import LayerGraph, Operation

LEAST = 0.08
"""Minimum width of a drawn halo as a fraction of its block, since one row of a thousand would be invisible."""

BLOCK, OWN, GHOSTS = "0.95", "#9ecae1", "#fdae6b"


@dataclass(frozen=True)
class HaloSide:
    """A dimension of a layer's input: size, number of blocks, the drawn block, and halo rows before and after it."""

    axis: str
    extent: int
    parts: int
    index: int = 0
    before: int = 0
    after: int = 0

    def block(self, index: int) -> range:
        """Return the indices of a block."""
        return block_range(self.extent, self.parts, index)


@dataclass(frozen=True)
class Halo:
    """Halo of the rank that receives the most elements of a layer's input.

    Parameters
    ----------
    layer : str
    sides : (HaloSide, HaloSide)
        The two drawn dimensions.
    elements : int
        Received elements per sample, over all channels and spatial dimensions.
    """

    layer: str
    sides: tuple[HaloSide, HaloSide]
    elements: int


def largest_halo(graph: LayerGraph, prediction: Prediction, ranks: int, per_node: int) -> Halo | None:
    """Return the largest halo of a plan's layers.

    Parameters
    ----------
    graph : LayerGraph
    prediction : Prediction
        Prediction of the plan, with the distribution of each layer.
    ranks : int
    per_node : int
        Ranks per node.

    Returns
    -------
    Halo or None
        None if no layer with at least two spatial dimensions has a halo.
    """
    halos = [
        one
        for name, layer in prediction.layers.items()
        for op in graph.by_layer.get(name, ())
        for one in _halo_of(op, AxisParts.from_axes(layer.parts, ranks, per_node))
    ]
    return max(halos, key=lambda each: each.elements, default=None)


def _halo_of(op: Operation, parts: AxisParts) -> Iterator[Halo]:
    window, shape = op.window, op.x.shape
    if window is None or len(shape) < 4:
        return
    sides = []
    for dim, axis in enumerate(axes_of(shape)[2:]):
        count, extents = parts.parts_along(axis), (shape[dim + 2], op.y.shape[dim + 2])
        rows = widest_halo(window, *extents, count, dim) if count > 1 else (0, 0)
        index = widest_halo_index(window, *extents, count, dim) if count > 1 else 0
        sides.append(HaloSide(str(axis), extents[0], count, index, *rows))
    own = math.prod(len(side.block(side.index)) for side in sides)
    needed = math.prod(len(side.block(side.index)) + side.before + side.after for side in sides)
    if needed > own:
        # The two with the most parts, in the order of the tensor.
        drawn = sorted(sorted(sides, key=lambda side: -side.parts)[:2], key=sides.index)
        yield Halo(op.layer, (drawn[0], drawn[1]), (needed - own) * shape[1])


def draw_halo(axis: Any, shown: Halo) -> None:
    """Draw the blocks of a sample, and the block of one rank with its halo.

    Parameters
    ----------
    axis : Any
        Matplotlib axes to draw on.
    shown : Halo
    """
    from matplotlib.patches import Rectangle

    rows, columns = shown.sides
    for i, j in product(range(rows.parts), range(columns.parts)):
        down, right = rows.block(i), columns.block(j)
        axis.add_patch(Rectangle((right.start, down.start), len(right), len(down), facecolor=BLOCK, edgecolor="0.4"))
    above, below = _ghosts(rows)
    before, after = _ghosts(columns)
    down, right = rows.block(rows.index), columns.block(columns.index)
    corner = right.start - before, down.start - above
    width, height = before + len(right) + after, above + len(down) + below
    axis.add_patch(Rectangle(corner, width, height, facecolor=GHOSTS, edgecolor="tab:orange", zorder=1.5))
    axis.add_patch(
        Rectangle((right.start, down.start), len(right), len(down), facecolor=OWN, edgecolor="0.4", zorder=2)
    )
    words = [f"{len(down)} x {len(right)}"]
    words += [f"{side.axis}: {side.before} before, {side.after} after" for side in shown.sides if side.parts > 1]
    middle = (right.start + len(right) / 2, down.start + len(down) / 2)
    axis.text(*middle, "\n".join(words), ha="center", va="center", fontsize=7, zorder=3)
    axis.set(xlim=(0, columns.extent), ylim=(rows.extent, 0), xlabel=columns.axis, ylabel=rows.axis)
    axis.set_title(f"largest halo: {shown.layer}, {shown.elements:,} elements a sample\n(not to scale)", fontsize=9)


def _ghosts(side: HaloSide) -> tuple[float, float]:
    """Return the drawn widths of the halo before and after the block."""
    least = LEAST * len(side.block(side.index))
    before, after = (max(rows, least) if rows else 0.0 for rows in (side.before, side.after))
    return before, after
