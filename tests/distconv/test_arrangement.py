"""Arrangements: coordinates and ranks, and how they are written."""

from __future__ import annotations

import pytest

import distconv as dc
from tests.distconv.layouts import grid_on_paper


@pytest.mark.parametrize("axes", [{}, {"n": 6}, {"n": 2, "h": 3}, {"r": 2, "n": 2, "c": 2, "d": 3, "h": 2, "w": 2}])
def test_coordinates_and_ranks_are_each_others_inverse(axes):
    grid = grid_on_paper(**axes)
    places = [tuple(grid.coords_of(rank).items()) for rank in range(grid.size)]
    assert len(set(places)) == grid.size
    assert [grid.rank_of(dict(place)) for place in places] == list(range(grid.size))


def test_ranks_vary_fastest_along_channels_then_width_and_slowest_along_replicas():
    grid = grid_on_paper(r=2, n=2, d=2, h=2, w=2, c=2)
    strides = [grid.rank_of({axis: 1}) for axis in ("c", "w", "h", "d", "n", "r")]
    assert strides == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    ("text", "axes"), [("n=2,h=2", {"n": 2, "h": 2}), ("w=8", {"w": 8}), (" n = 1 , d = 3 ", {"n": 1, "d": 3})]
)
def test_written_grids_are_read(text, axes):
    assert dc.parse_grid(text) == axes


@pytest.mark.parametrize("text", ["", "n", "n=", "n=0", "n=-1", "n=1.5", "q=2", "n=2,n=2", "n=2;h=2", "n=2,", "n=²"])
def test_badly_written_grids_are_refused(text):
    with pytest.raises(dc.GridError, match="write it like n=2,h=2"):
        dc.parse_grid(text)
