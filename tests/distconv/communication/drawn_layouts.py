"""Distributions that hypothesis draws, for the tests of the mover."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

import distconv as dc
from distconv.communication.transfer import Needs
from distconv.distribution import Interval
from tests.distconv.layouts import grid_over

FEW = settings(max_examples=16)


@st.composite
def layouts(draw, comm, shape):
    """Any distribution of ``shape`` over any grid of ``comm``'s ranks."""
    extents, left = {}, comm.size
    for axis in draw(st.permutations(["n", "d", "h", "w", "r"])):
        extents[axis] = draw(st.sampled_from([k for k in range(1, left + 1) if left % k == 0]))
        left //= extents[axis]
    extents["r"] = extents["r"] * left
    grid = grid_over(comm, **extents)
    axes = draw(st.permutations(["n", "d", "h", "w", "r", None, None, None]))[: len(shape)]
    boundaries, cyclic = {}, {}
    for axis, extent in zip(axes, shape, strict=True):
        kind = draw(st.sampled_from(["balanced", "uneven", "cyclic"])) if axis else "balanced"
        if kind == "uneven":
            inner = [draw(st.integers(0, extent)) for _ in range(grid.shape[axis] - 1)]
            boundaries[axis] = (0, *sorted(inner), extent)
        elif kind == "cyclic":
            cyclic[axis] = draw(st.integers(1, 3))
    return dc.Distribution(grid, axes, boundaries=boundaries, cyclic=cyclic)


shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@st.composite
def needs(draw, comm, shape):
    """A distribution of ``shape`` with one interval per rank and split dimension that it needs of it."""
    base = draw(layouts(comm, shape)).balanced()
    wanted = []
    for dim, axis in enumerate(base.split):
        if axis is not None and draw(st.booleans()):
            per_rank = []
            for _ in range(base.grid.shape[axis]):
                start = draw(st.integers(-3, shape[dim] + 2))
                per_rank.append(Interval(start, start + draw(st.integers(0, shape[dim] + 3))))
            wanted.append((dim, tuple(per_rank)))
    return Needs(base, tuple(wanted))


def needed_box(layout, shape):
    """Return the index range that this rank needs, within the tensor; None if it is empty."""
    box = [layout.intervals(d, layout.base.coordinate(d), n)[0] for d, n in enumerate(shape)]
    return box if all(i.extent for i in box) else None
