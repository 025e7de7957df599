"""Layouts by kind: which a case has, what they split, and into which blocks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest

from distconv.jobs.verification.engine.layouts import CaseLayout, layouts
from tests.distconv.layouts import grid_over
from tests.jobs.approved import assert_approved


@dataclass(frozen=True)
class Image:
    axes: frozenset[str] = frozenset("nchw")
    kinds: tuple[str, ...] | None = None
    multiple: int = 1

    least, sizes = {"h": 2}, {"w": 10}


CASES = {
    "image": Image(),
    "volume of three channels": Image(frozenset("ncdhw"), multiple=3),
    "without space": Image(frozenset("nc")),
    "given tensors": Image(multiple=0),
    "some kinds": Image(kinds=("width", "depth", "empty samples"), multiple=0),
}


def test_layouts_of_each_kind_are_as_approved():
    lines = []
    for (name, case), ranks in itertools.product(CASES.items(), (2, 6)):
        lines.append(f"{name}, {ranks} ranks")
        for layout in layouts(case, ranks):
            grid, sizes = (" ".join(f"{axis}={n}" for axis, n in each) for each in (layout.extents, layout.sizes))
            assert math.prod(n for _, n in layout.extents) == ranks and not layout.first_only
            lines.append(f"    {layout.kind}: {grid}, {layout.blocks}, {sizes or 'fixed'}")
    assert_approved("case-layouts", "\n".join(lines))


@pytest.mark.ranks(3)
def test_blocks_are_what_they_are_called(comm):
    grid = grid_over(comm, h=comm.size)

    def heights(blocks, **options):
        height = options.pop("height", 9)
        dist = CaseLayout("", (("h", 3),), blocks=blocks).distribution(grid, (5, height), ("n", "wh"), **options)
        return [[(i.start, i.stop) for i in dist.intervals(1, rank, height)] for rank in range(3)]

    assert heights("balanced") == heights("uneven", balanced=True) == [[(0, 3)], [(3, 6)], [(6, 9)]]
    assert heights("uneven") == [[(0, 1)], [(1, 4)], [(4, 9)]]
    assert heights("cyclic") == [[(0, 2), (6, 8)], [(2, 4), (8, 9)], [(4, 6)]]
    assert heights("cyclic", height=6) == [[(0, 1), (3, 4)], [(1, 2), (4, 5)], [(2, 3), (5, 6)]]
    assert heights("whole") == [[(0, 9)]] * 3
