"""A mini-batch of voxels is that of its clouds one by one, whatever else is in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distconv.errors import DataError
from distconv.jobs.pointcloud.batches import VoxelRecipe, collate, voxel_batch
from distconv.jobs.pointcloud.sampling import draw_points
from distconv.jobs.pointcloud.shapes import Shapes
from distconv.jobs.pointcloud.voxels import majority_part, unit_cube, voxelise

SHAPES = Shapes(12, 600, seed=1)
RECIPE = VoxelRecipe(16, points=300, keep=0.5, offsets=True, seed=9)


def test_a_batch_is_its_clouds_with_their_index_before_the_coordinates() -> None:
    samples = [7, 2, 7]
    batch = voxel_batch(SHAPES, samples, RECIPE, epoch=3)
    assert batch.labels.tolist() == [7, 2, 7]
    assert (batch.coords.dtype, batch.features.dtype, batch.labels.dtype) == (torch.int64, torch.float32, torch.int64)
    for place, sample in enumerate(samples):
        cloud = SHAPES[sample]
        taken = draw_points(600, 300, 0.5, seed=9, epoch=3, sample=sample)
        points = unit_cube(torch.from_numpy(cloud.points))[taken]
        alone = voxelise(points, 16, offsets=True)
        mine = batch.coords[:, 0] == place
        assert torch.equal(batch.coords[mine, 1:], alone.coords)
        assert torch.equal(batch.features[mine], alone.features)


def test_a_cloud_is_the_same_in_any_batch_and_another_in_another_epoch() -> None:
    together, alone = voxel_batch(SHAPES, [0, 1, 2, 3], RECIPE, 1), voxel_batch(SHAPES, [2], RECIPE, 1)
    mine = together.coords[:, 0] == 2
    assert torch.equal(together.coords[mine, 1:], alone.coords[:, 1:])
    assert torch.equal(together.features[mine], alone.features)
    assert not torch.equal(voxel_batch(SHAPES, [2], RECIPE, 2).features, alone.features)


def test_parts_are_those_of_the_points_that_were_drawn() -> None:
    batch = voxel_batch(SHAPES, [6], VoxelRecipe(8, points=200), 0)
    cloud, taken = SHAPES[6], draw_points(600, 200, seed=0, epoch=0, sample=6)
    voxels = voxelise(unit_cube(torch.from_numpy(cloud.points))[taken], 8)
    assert cloud.part is not None and batch.part is not None
    part = torch.tensor([cloud.part[index] for index in taken.tolist()])
    assert torch.equal(batch.part, majority_part(part, voxels.of_point, len(voxels.coords)))


def test_clouds_of_which_nothing_is_kept_have_no_voxels() -> None:
    batch = voxel_batch(SHAPES, [3, 4], VoxelRecipe(8, keep=0.0), 0)
    assert (batch.coords.shape, batch.features.shape, batch.labels.tolist()) == ((0, 4), (0, 1), [3, 4])


def test_a_cloud_without_points_among_others_keeps_its_place() -> None:
    full = voxelise(torch.rand(20, 3, generator=torch.Generator().manual_seed(0)), 4)
    empty = voxelise(torch.empty(0, 3), 4)
    batch = collate([empty, full, empty, full], torch.arange(4))
    assert np.unique(batch.coords[:, 0]).tolist() == [1, 3]
    assert len(batch.features) == len(batch.coords) == 2 * len(full.coords)
    assert len(batch.labels) == 4


@pytest.mark.parametrize(("clouds", "labels"), [(0, 0), (2, 3)])
def test_a_batch_needs_a_label_for_each_of_its_clouds(clouds: int, labels: int) -> None:
    voxels = [voxelise(torch.zeros(1, 3), 4)] * clouds
    with pytest.raises(DataError, match=f"batch of {clouds} clouds with {labels} labels"):
        collate(voxels, torch.zeros(labels, dtype=torch.int64))
