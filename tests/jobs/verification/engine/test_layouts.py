"""Layouts by kind: which a case has, what they split, and into which blocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from distconv.jobs.verification.engine.layouts import KINDS, CaseLayout, layouts
from tests.distconv.layouts import grid_over


@dataclass(frozen=True)
class Image:
    axes: frozenset[str] = frozenset("nchw")
    kinds: tuple[str, ...] | None = None
    multiple: int = 1

    least, sizes = {"h": 2}, {"w": 10}


def test_each_kind_splits_what_it_is_called():
    found = {layout.kind: layout for layout in layouts(Image(), 6)}
    assert set(found) == set(KINDS) - {"depth"}
    assert dict(found["samples + space"].extents) == {"n": 2, "h": 3}
    assert dict(found["two in space"].extents) == {"h": 2, "w": 3}
    assert dict(found["channels + space"].extents) == {"c": 2, "h": 3}
    assert dict(found["cyclic"].extents) == {"h": 6} and found["cyclic"].blocks == "cyclic"
    sizes = {kind: dict(layout.sizes) for kind, layout in found.items()}
    assert sizes["samples"] == {"n": 5, "d": 5, "h": 7, "w": 10, "c": 4}
    assert sizes["empty samples"]["n"] == 1 and sizes["empty space"]["h"] == 2
    assert sizes["channels"]["c"] == 6 and sizes["ragged channels"]["c"] == 7 and sizes["empty channels"]["c"] == 1


def test_a_case_without_space_or_with_given_tensors_has_fewer():
    rows = {layout.kind: layout for layout in layouts(Image(frozenset("nc")), 4)}
    assert "height" not in rows and "two in space" not in rows and "empty space" not in rows
    assert dict(rows["uneven"].extents) == {"n": 4} and dict(rows["replicas + space"].extents) == {"r": 2, "n": 2}
    given = layouts(Image(multiple=0), 4)
    assert not {layout.kind for layout in given} & {"empty samples", "ragged channels"} and not given[0].sizes
    assert [layout.kind for layout in layouts(Image(kinds=("width", "depth")), 4)] == ["width"]


@pytest.mark.ranks(3)
def test_blocks_are_what_they_are_called(comm):
    grid = grid_over(comm, h=comm.size)

    def heights(blocks, **options):
        dist = CaseLayout("", (("h", 3),), blocks=blocks).distribution(grid, (5, 9), ("n", "wh"), **options)
        return [[(i.start, i.stop) for i in dist.intervals(1, rank, 9)] for rank in range(3)]

    assert heights("balanced") == heights("uneven", balanced=True) == [[(0, 3)], [(3, 6)], [(6, 9)]]
    assert heights("uneven") == [[(0, 1)], [(1, 4)], [(4, 9)]]
    assert heights("cyclic") == [[(0, 2), (6, 8)], [(2, 4), (8, 9)], [(4, 6)]]
    assert heights("whole") == [[(0, 9)]] * 3
