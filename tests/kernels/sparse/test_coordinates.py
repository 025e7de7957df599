"""Keys of coordinates, coarser and wider sets, and coordinates that cannot be."""

from __future__ import annotations

import random

import pytest
import torch

import distconv as dc
from distconv.kernels.sparse import KeySpace, check_coordinates, coarsen, reachable_sites, sorting_order


def random_rows(seed, dimension, sites=50, reach=9):
    rng = random.Random(seed)
    return torch.tensor(
        [[rng.randrange(3), *(rng.randint(-reach, reach) for _ in range(dimension))] for _ in range(sites)]
    )


@pytest.mark.parametrize("dimension", [1, 2, 3, 4])
def test_keys_sort_like_coordinates_and_give_them_back(dimension):
    rows = random_rows(1, dimension)
    space = KeySpace.enclose(rows, margin=[2] * dimension)
    keys = space.pack(rows)
    assert [rows[i].tolist() for i in keys.argsort(stable=True)] == sorted(rows.tolist())
    assert torch.equal(space.unpack(keys), rows)


@pytest.mark.parametrize("dimension", [1, 2, 3, 4])
def test_a_step_within_the_margin_adds_the_same_to_every_key(dimension):
    rows = random_rows(2, dimension)
    offset = [(-1) ** d * (d + 1) for d in range(dimension)]
    space = KeySpace.enclose(rows, margin=[4] * dimension)
    moved = rows + torch.tensor([0, *offset])
    assert torch.equal(space.pack(moved), space.pack(rows) + space.step(offset))
    assert len(set(space.pack(moved).tolist())) == len(set(map(tuple, rows.tolist())))


def test_sorted_rows_are_in_order():
    rows = random_rows(3, 3).unique(dim=0)[torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    assert rows[sorting_order(rows)].tolist() == sorted(rows.tolist())


@pytest.mark.parametrize("stride", [2, 3])
def test_coarse_cells_are_those_that_hold_sites_also_at_negative_coordinates(stride):
    rows = random_rows(4, 2)
    cells = {(b, *(c // stride * stride for c in u)) for b, *u in rows.tolist()}
    assert coarsen(rows, stride).tolist() == [list(cell) for cell in sorted(cells)]


def test_reached_sites_are_those_at_an_offset_from_any():
    rows, offsets = random_rows(5, 2), ((0, 1), (-2, 0))
    sites = {(b, u + 3 * i, v + 3 * j) for b, u, v in rows.tolist() for i, j in offsets}
    assert reachable_sites(rows, offsets, 3).tolist() == [list(site) for site in sorted(sites)]


def test_empty_sets_stay_empty():
    rows = torch.zeros(0, 4, dtype=torch.long)
    assert coarsen(rows, 2).shape == reachable_sites(rows, ((0, 0, 1),)).shape == (0, 4)
    assert sorting_order(rows).shape == (0,)


def test_coordinates_up_to_two_to_the_twenty_are_taken_in_three_dimensions():
    far = 1 << 20
    rows = torch.tensor([[0, 0, 0, 0], [3, far, far, far], [1, 5, far, 0]])
    assert coarsen(rows, 2).tolist() == [[0, 0, 0, 0], [1, 4, far, 0], [3, far, far, far]]


@pytest.mark.parametrize(("dimension", "far"), [(3, 1 << 21), (4, 1 << 17), (2, 1 << 40), (1, (1 << 63) - 1)])
def test_coordinates_too_far_apart_are_refused(dimension, far):
    rows = torch.tensor([[0, *[-1] * dimension], [1, *[far] * dimension]])
    with pytest.raises(dc.CoordinateError, match=r"coordinates span 2 x .* more than the 2\^63"):
        sorting_order(rows)


def test_as_many_cells_as_an_int64_can_number_are_taken_and_no_more():
    assert KeySpace.enclose(torch.tensor([[0, 0], [0, (1 << 63) - 2]]), margin=(0,)).extents == (1, (1 << 63) - 1)
    with pytest.raises(dc.CoordinateError, match="cells"):
        KeySpace.enclose(torch.tensor([[0, 0], [0, (1 << 62) - 1], [1, 0]]), margin=(0,))


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        (torch.zeros(3), {}, r"shape \(3,\); they must be \(N, 1 \+ D\)"),
        (torch.zeros(3, 1, dtype=torch.long), {}, "1 <= D <= 4"),
        (torch.zeros(3, 6, dtype=torch.long), {}, "1 <= D <= 4"),
        (torch.zeros(3, 4), {}, "torch.float32, not integers: voxelise"),
        (torch.zeros(3, 4, dtype=torch.bool), {}, "torch.bool, not integers"),
        (torch.tensor([[0, 1.0], [0, float("nan")], [float("nan"), 2]]), {}, "2 of 3 .* not a number; the first is"),
        (torch.tensor([[0, 1], [-1, 2], [-2, 2]]), {}, r"2 of 3 .* negative batch index; the first is \[-1, 2\]"),
        (torch.tensor([[0, 1], [3, 2]]), {"batch_size": 3}, r"1 of 2 .* beyond batch_size=3; the first is \[3, 2\]"),
        (
            torch.tensor([[0, 2], [0, -3]]),
            {"stride": 2},
            r"1 of 2 .* multiples of the stride 2; the first is \[0, -3\]",
        ),
    ],
)
def test_coordinates_that_cannot_be_are_refused(rows, options, says):
    with pytest.raises(dc.CoordinateError, match=says):
        check_coordinates(rows, **options)


def test_repeated_sites_are_refused_with_their_number_and_the_first():
    rows = torch.tensor([[0, 5, 5], [0, 1, 2], [0, 5, 5], [1, 1, 2], [0, 1, 2]])
    with pytest.raises(dc.CoordinateError, match=r"2 of 5 coordinates repeat another row.* first is \[0, 1, 2\]"):
        sorting_order(rows)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8])
def test_any_integers_are_taken(dtype):
    assert check_coordinates(torch.tensor([[0, 3]], dtype=dtype)).dtype == torch.long
