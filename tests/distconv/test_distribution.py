"""Distributions against brute force: every index has its owners, and every rank can work them out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import distconv as dc
from distconv.distribution import Interval, default_axes
from tests.distconv.layouts import grid_on_paper

AXES = ("n", "d", "h", "w", "r")


@st.composite
def distributions(draw):
    """A distribution on paper and a shape that fits it."""
    extents = {axis: draw(st.integers(1, 4)) for axis in draw(st.permutations(AXES))[:3]}
    grid = grid_on_paper(**extents)
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    order = draw(st.permutations([*AXES, None, None, None, None]))
    axes = order[: len(shape)]
    boundaries, cyclic = {}, {}
    for axis, extent in zip(axes, shape, strict=True):
        kind = draw(st.sampled_from(["balanced", "uneven", "cyclic"])) if axis else "balanced"
        if kind == "uneven":
            inner = draw(st.lists(st.integers(0, extent), min_size=grid.shape[axis] - 1, max_size=grid.shape[axis] - 1))
            boundaries[axis] = (0, *sorted(inner), extent)
        elif kind == "cyclic":
            cyclic[axis] = draw(st.integers(1, 4))
    return dc.Distribution(grid, axes, boundaries=boundaries, cyclic=cyclic), shape


def indices(dist, rank, dim, extent):
    """Return the indices of ``dim`` that ``rank`` owns, as a list."""
    owned = dist.intervals(dim, dist.coordinate(dim, rank), extent)
    return [i for interval in owned for i in range(interval.start, interval.stop)]


@given(distributions())
def test_every_index_is_owned_once_along_the_axis_that_splits_it(case):
    dist, shape = case
    for dim, extent in enumerate(shape):
        axis = dist.split[dim]
        parts = dist.grid.shape[axis] if axis else 1
        owned = [i for k in range(parts) for interval in dist.intervals(dim, k, extent) for i in range(*interval)]
        assert sorted(owned) == list(range(extent))


@given(distributions())
def test_intervals_rise_and_local_shape_counts_them(case):
    dist, shape = case
    for rank in range(dist.grid.size):
        lists = [indices(dist, rank, dim, extent) for dim, extent in enumerate(shape)]
        assert all(found == sorted(set(found)) for found in lists)
        assert dist.local_shape(shape, rank) == tuple(len(found) for found in lists)


@given(distributions())
def test_owners_are_those_whose_indices_contain_the_element(case):
    dist, shape = case
    owned = [[set(indices(dist, rank, d, n)) for d, n in enumerate(shape)] for rank in range(dist.grid.size)]
    elements = list(itertools.product(*(range(n) for n in shape)))
    for element in elements[:: max(1, len(elements) // 40)]:
        expected = [r for r, sets in enumerate(owned) if all(i in s for i, s in zip(element, sets, strict=True))]
        assert dist.owners(element, shape) == expected


@given(distributions(), st.data())
def test_same_indices_are_the_ranks_at_the_same_coordinates(case, data):
    dist, shape = case
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    rank = data.draw(st.integers(0, dist.grid.size - 1))
    expected = [
        r for r in range(dist.grid.size) if all(dist.coordinate(d, r) == dist.coordinate(d, rank) for d in dims)
    ]
    assert dist.same_indices(dims, rank) == expected


@given(distributions())
def test_a_box_is_the_range_of_what_is_owned(case):
    dist, shape = case
    for rank in range(dist.grid.size):
        lists = [indices(dist, rank, dim, extent) for dim, extent in enumerate(shape)]
        if all(found == list(range(found[0], found[-1] + 1)) for found in lists if found):
            try:
                box = dist.box(rank, shape)
            except dc.DistributionError:
                # Neighbouring blocks of a cyclic distribution over one coordinate: several intervals in one range.
                assert dist.cyclic
                continue
            assert [list(range(*interval)) for interval in box] == lists


@given(st.integers(0, 200), st.integers(1, 20))
def test_balanced_blocks_differ_by_at_most_one_and_longer_ones_come_first(extent, parts):
    lengths = [len(dc.block_range(extent, parts, i)) for i in range(parts)]
    assert sum(lengths) == extent
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("index", [-1, 4, 10])
def test_a_block_out_of_range_is_refused(index):
    with pytest.raises(dc.DistributionError, match=r"must be in range\(4\)"):
        dc.block_range(10, 4, index)


def test_an_axis_of_one_part_counts_as_replicated():
    grid = grid_on_paper(h=2)
    assert dc.Distribution(grid, ("n", "h")) == dc.Distribution(grid, (None, "h"))
    assert dc.Distribution(grid, ("n", "h")) != dc.Distribution(grid, ("h", None))
    assert dc.Distribution(grid, (None, "h")).split_axes == ("h",)


def test_irregular_blocks_make_another_distribution():
    grid = grid_on_paper(h=2)
    balanced = dc.Distribution(grid, ("h",))
    uneven = dc.Distribution(grid, ("h",), boundaries={"h": (0, 1, 5)})
    cyclic = dc.Distribution(grid, ("h",), cyclic={"h": 1})
    assert len({balanced, uneven, cyclic}) == 3
    assert uneven.balanced() == cyclic.balanced() == balanced


def test_replicate_makes_the_chosen_dimensions_whole():
    dist = dc.Distribution(grid_on_paper(n=2, h=2, w=2), ("n", None, "h", "w"), cyclic={"w": 2})
    assert dist.replicate([2]).split == ("n", None, None, "w")
    assert dist.replicate([2]).cyclic == {"w": 2}
    assert dist.replicate().split == (None,) * 4


@pytest.mark.fault(26)
@pytest.mark.parametrize(
    ("axes", "options", "match"),
    [
        (("x",), {}, "there is no grid axis 'x'"),
        (("h", "h"), {}, "can split one dimension only"),
        (("h",), {"boundaries": {"w": (0, 4)}}, "boundaries for 'w'"),
        (("h",), {"boundaries": {"h": (0, 4)}}, "must be 3 increasing numbers from 0"),
        (("h",), {"boundaries": {"h": (1, 2, 4)}}, "must be 3 increasing numbers from 0"),
        (("h",), {"boundaries": {"h": (0, 5, 4)}}, "must be 3 increasing numbers from 0"),
        (("h",), {"boundaries": {"h": (0, 2, 4)}, "cyclic": {"h": 1}}, "boundaries for 'h'"),
        (("h",), {"cyclic": {"h": 0}}, "block size 0"),
        (("h",), {"cyclic": {"w": 2}}, "block size 2 for axis 'w'"),
    ],
)
def test_a_distribution_that_cannot_be_is_refused(axes, options, match):
    with pytest.raises(dc.DistributionError, match=match):
        dc.Distribution(grid_on_paper(h=2), axes, **options)


def test_shapes_that_do_not_fit_are_refused():
    dist = dc.Distribution(grid_on_paper(h=2), ("h",), boundaries={"h": (0, 2, 4)})
    with pytest.raises(dc.DistributionError, match="cover 4 indices, not 5"):
        dist.local_shape((5,))
    with pytest.raises(dc.DistributionError, match="has 1 dimensions but the shape"):
        dist.box(0, (4, 4))
    with pytest.raises(dc.DistributionError, match="outside the shape"):
        dist.owners((4,), (4,))
    cyclic = dc.Distribution(grid_on_paper(h=2), ("h",), cyclic={"h": 1})
    with pytest.raises(dc.DistributionError, match="block-cyclic"):
        cyclic.box(0, (4,))


@pytest.mark.parametrize(
    ("dims", "ndim", "axes"),
    [
        (None, 0, ()),
        (None, 2, ("n", "c")),
        (None, 3, ("n", "c", "w")),
        (None, 4, ("n", "c", "h", "w")),
        (None, 5, ("n", "c", "d", "h", "w")),
        ("nhw", 3, ("n", "h", "w")),
        ("n-w", 3, ("n", None, "w")),
        (("n", None), 2, ("n", None)),
    ],
)
def test_each_dimension_gets_its_axis(dims, ndim, axes):
    assert default_axes(dims, ndim) == axes


@pytest.mark.parametrize(("dims", "ndim", "match"), [("nh", 3, "names 2 dimensions but"), (None, 6, "Pass dims=")])
def test_dims_that_do_not_fit_are_refused(dims, ndim, match):
    with pytest.raises(dc.DistributionError, match=match):
        default_axes(dims, ndim)


@given(*(st.integers(-5, 5),) * 4)
def test_intersections_hold_what_is_in_both(a, b, c, d):
    both = Interval(a, b).intersect(Interval(c, d))
    assert set(range(*both)) == set(range(a, b)) & set(range(c, d))
    assert both.extent == len(range(*both))


def test_a_distribution_says_what_it_is():
    dist = dc.Distribution(grid_on_paper(h=2, w=2), ("n", None, "h", "w"), boundaries={"h": (0, 3, 4)}, cyclic={"w": 2})
    assert repr(dist) == "Distribution((n, -, h, w) over h=2,w=2, h at (0, 3, 4), w cyclic by 2)"


@given(distributions(), st.data())
def test_transposed_dimensions_are_whole_and_their_axes_go_where_there_is_room(case, data):
    dist, shape = case
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    found = dist.transposed(sorted(dims), shape)
    assert all(found.split[d] is None for d in dims)
    for d in set(range(len(shape))) - dims:
        if dist.split[d] is not None:
            assert found.split[d] == dist.split[d]
            assert found.intervals(d, 0, shape[d]) == dist.intervals(d, 0, shape[d])
        elif found.split[d] is not None:
            assert found.split[d] in {dist.split[other] for other in dims}
            assert all(
                i.extent for k in range(found.grid.shape[found.split[d]]) for i in found.intervals(d, k, shape[d])
            )
    lost = set(dist.split_axes) - set(found.split_axes)
    room = [n for d, n in enumerate(shape) if d not in dims and found.split[d] is None]
    assert all(n < dist.grid.shape[axis] for axis in lost for n in room)
