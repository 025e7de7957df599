"""Points become the voxels they fill, as a loop over the points finds them."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch

from distconv.errors import DataError
from distconv.jobs.pointcloud.voxels import LARGEST, majority_part, unit_cube, voxelise


def cloud(points: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(points, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("resolution", [1, 2, 7, 32, 50, 200])
def test_voxels_are_those_a_loop_over_the_points_finds(resolution: int) -> None:
    points = cloud(700)
    points[:3] = torch.tensor([[0.0, 0, 0], [1, 1, 1], [1, 0, 0.5]])
    filled = defaultdict(list)
    for index, point in enumerate(points.tolist()):
        filled[tuple(min(int(x * resolution), resolution - 1) for x in point)].append(index)
    voxels = voxelise(points, resolution, offsets=True)
    assert [tuple(c) for c in voxels.coords.tolist()] == sorted(filled)
    assert voxels.coords.dtype == torch.int64
    for row, (coords, indices) in enumerate(sorted(filled.items())):
        inside = points[indices] * resolution - torch.tensor(coords) - 0.5
        assert voxels.features[row, 0] == 1
        assert torch.allclose(voxels.features[row, 1:], inside.mean(0), rtol=0, atol=1e-12)
        assert (voxels.of_point[indices] == row).all()


def test_the_largest_grid_keeps_neighbouring_voxels_apart() -> None:
    points = torch.tensor([[LARGEST - 1, LARGEST - 1, z] for z in (LARGEST - 2, LARGEST - 1)], dtype=torch.float64)
    voxels = voxelise((points + 0.5) / LARGEST, LARGEST)
    assert torch.equal(voxels.coords, points.long())


def test_no_points_fill_no_voxel() -> None:
    voxels = voxelise(unit_cube(torch.empty(0, 3)), 32, offsets=True)
    assert (voxels.coords.shape, voxels.features.shape, voxels.of_point.shape) == ((0, 3), (0, 4), (0,))
    assert majority_part(torch.empty(0, dtype=torch.int64), voxels.of_point, 0).shape == (0,)


def test_the_unit_cube_is_touched_along_the_longest_dimension_only() -> None:
    points = unit_cube(cloud(300) * torch.tensor([10.0, 2, 0]) + torch.tensor([-70.0, 5, 3]))
    assert torch.allclose(points.amin(0) + points.amax(0), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (points.amax(0) - points.amin(0)).tolist() == pytest.approx([1, 0.2, 0], abs=2e-3)
    assert points[:, 0].amin() == 0 and points[:, 0].amax() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1, 1e6, 1e30])
def test_points_of_any_size_and_place_end_in_the_unit_cube(dtype: torch.dtype, scale: float) -> None:
    points = unit_cube((cloud(100) * scale + scale / 3).to(dtype))
    assert points.amin() >= 0 and points.amax() <= 1
    assert (points.amax(0) - points.amin(0)).amax() == pytest.approx(1, abs=1e-5)


def test_a_single_point_lies_in_the_middle() -> None:
    assert torch.equal(unit_cube(torch.tensor([[3.0, -8, 1e6]])), torch.full((1, 3), 0.5))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_coordinates_that_are_nowhere_are_refused(wrong: float) -> None:
    points = cloud(9)
    points[4, 1] = wrong
    with pytest.raises(DataError, match=r"a cloud of 9 points has 1 points that are not finite .* Leave the cloud out"):
        unit_cube(points)
    with pytest.raises(DataError, match="are not in the unit cube"):
        voxelise(points, 4)


def test_an_extent_that_the_dtype_cannot_hold_is_refused() -> None:
    points = torch.tensor([[-3e38, 0, 0], [3e38, 0, 0]])
    with pytest.raises(DataError, match="has 0 points that are not finite"):
        unit_cube(points)


@pytest.mark.parametrize("resolution", [0, -3, LARGEST + 1])
def test_impossible_grids_are_refused(resolution: int) -> None:
    with pytest.raises(DataError, match=f"resolution={resolution}: must be 1 to {LARGEST}"):
        voxelise(cloud(5), resolution)


def test_points_outside_the_cube_are_refused() -> None:
    with pytest.raises(DataError, match=r"points from 0 to 2 are not in the unit cube\. Move them with unit_cube"):
        voxelise(torch.tensor([[0.0, 1, 2]]), 4)


def test_a_voxel_is_of_the_part_that_most_of_its_points_are_of() -> None:
    voxels = voxelise(cloud(600), 4)
    part = torch.randint(0, 5, (600,), generator=torch.Generator().manual_seed(2))
    found = majority_part(part, voxels.of_point, len(voxels.coords))
    for row, chosen in enumerate(found.tolist()):
        counts = Counter(part[voxels.of_point == row].tolist())
        assert chosen == min(counts, key=lambda p: (-counts[p], p))
