"""Clouds to train on and their batches over a grid."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.errors import DataError
from distconv.jobs.pointcloud.batches import VoxelRecipe, voxel_batch
from distconv.jobs.pointcloud.classification import samples as module
from distconv.jobs.pointcloud.classification.samples import CloudSamples, VoxelLoader
from distconv.jobs.pointcloud.shapes import Shapes
from distconv.layers.sparse import gather, scatter
from tests.jobs.images.image_files import written
from tests.jobs.pointcloud.cloud_files import write_ours


def loader_of(comm: Any, samples: CloudSamples, axes: str = "n=1", **more: Any) -> VoxelLoader:
    grid = dc.ProcessGrid(comm, **dc.parse_grid(axes))
    given = {"recipe": VoxelRecipe(8, points=20), "dtype": torch.float64, "placed": partial(scatter, grid=grid)} | more
    return VoxelLoader(samples, "train", given.pop("batch", 2), **given)


@pytest.mark.ranks(1, 2)
def test_batches_are_the_voxels_of_the_clouds_split_over_the_grid(comm: Any, shared_tmp_path: Path) -> None:
    samples = CloudSamples(written(comm, shared_tmp_path, lambda folder: write_ours(folder / "x.h5")) / "x.h5", comm)
    for axes in ("n", "d"):
        loader = loader_of(comm, samples, f"{axes}={comm.size}", shuffle=True)
        assert (loader.samples, loader.steps) == (5, 3)
        batches = list(loader.epoch(3))
        assert sorted(sample for batch in batches for sample in batch.samples) == list(range(5))
        for batch in batches:
            made = voxel_batch(samples.groups["train"], batch.samples, loader.recipe, 3)
            whole = gather(batch.tensors[0])
            assert whole.batch_size == len(batch.samples)
            assert torch.equal(whole.coords, made.coords)
            assert torch.equal(whole.features, made.features.double())
            assert torch.equal(batch.tensors[1], made.labels)
        assert [batch.samples for batch in loader.epoch(3, 1)] == [batch.samples for batch in batches[1:]]
        assert [batch.samples for batch in loader.epoch(4)] != [batch.samples for batch in batches]
    samples.close()


def test_the_embedded_shapes_are_those_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHAPES", {"train": 12, "test": 3})
    samples = CloudSamples(None, MPI.COMM_SELF)
    assert samples.class_names == Shapes.class_names
    for number, (group, count) in enumerate((("train", 12), ("test", 3))):
        clouds, expected = samples.groups[group], Shapes(count, module.SHAPE_POINTS, group=number)
        assert np.array_equal(clouds.labels, expected.labels)
        assert np.array_equal(clouds[count - 1].points, expected[count - 1].points)
    samples.check_unchanged()
    samples.close()


def test_what_makes_no_batch_or_keeps_no_point_is_refused(tmp_path: Path) -> None:
    write_ours(tmp_path / "x.h5")
    samples = CloudSamples(tmp_path / "x.h5", MPI.COMM_SELF)
    with pytest.raises(DataError, match="no batch of 6 can be made of the 5 clouds of 'train'"):
        loader_of(MPI.COMM_SELF, samples, batch=6, drop_last=True)
    with pytest.raises(DataError, match=r"--keep 0\.01: no point is left of 20. Use a larger --keep or --points"):
        loader_of(MPI.COMM_SELF, samples, recipe=VoxelRecipe(8, points=20, keep=0.01))
    samples.close()
