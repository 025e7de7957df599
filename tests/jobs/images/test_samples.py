"""Labelled images: batches on any grid, a limited number of them, and test images of another shape."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.errors import DataError
from distconv.jobs.images.samples import CROP_PADDING, ImageSamples
from tests.jobs.images import image_files
from tests.jobs.images.image_files import arrays, written

GRIDS = {2: ["n=2", "w=2"], 4: ["n=2,h=2"]}


@pytest.mark.long
@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize("form", ["cifar", "hdf5"])
def test_batches_are_the_moved_and_mirrored_images_on_any_grid(comm: Any, shared_tmp_path: Path, form: str) -> None:
    def write(folder: Path) -> None:
        image_files.write_cifar(folder, 14)
        image_files.write_hdf5(folder / "x.h5", {"": 14}, (3, 32, 32))

    folder = written(comm, shared_tmp_path, write)
    samples = ImageSamples(folder if form == "cifar" else folder / "x.h5", comm)
    images, labels = arrays(14, (3, 32, 32))
    mean, std = (values.reshape(3, 1, 1) for values in (samples.moments.mean, samples.moments.std))
    assert np.allclose(mean.ravel(), images.mean((0, 2, 3)), rtol=1e-13)
    assert np.allclose(std.ravel(), images.std((0, 2, 3)), rtol=1e-13)
    moves, mirrors = set(), set()
    for text in GRIDS[comm.size]:
        grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
        loader = samples.loader("train", grid, 5, dtype=torch.float64, seed=3, shuffle=True, augment="crop,flip")
        for epoch in (0, 1):
            for batch in loader.epoch(epoch):
                whole, classes = (dc.gather(tensor).numpy() for tensor in batch.tensors)
                assert np.array_equal(classes, labels[list(batch.samples)])
                for found, sample in zip(whole, batch.samples, strict=True):
                    down, right = loader.part.moves(sample)
                    moves.add((down, right))
                    mirrors.add(loader.mirrored_axes(epoch, sample))
                    padded = np.pad(images[sample], ((0, 0), *((CROP_PADDING,) * 2,) * 2))
                    top, left = CROP_PADDING - down, CROP_PADDING - right
                    image = padded[:, top : top + 32, left : left + 32]
                    if loader.mirrored_axes(epoch, sample):
                        image = image[:, :, ::-1]
                    assert np.array_equal(found, (image - mean) / std)
    assert mirrors == {"", "w"}
    assert len(moves) > 14
    assert max(max(map(abs, move)) for move in moves) == CROP_PADDING
    samples.close()


@pytest.mark.ranks(2)
def test_only_the_first_training_images_are_used_if_asked_for(comm: Any, shared_tmp_path: Path) -> None:
    folder = written(comm, shared_tmp_path, image_files.write_mnist)
    samples = ImageSamples(folder, comm, limit=12)
    images, labels = arrays(40, (1, 28, 28))
    loader = samples.loader("train", dc.ProcessGrid(comm, n=comm.size), 12)
    assert loader.samples == 12
    assert np.array_equal(samples.groups["train"].labels, labels[:12])
    assert samples.moments.mean[0] == pytest.approx(images[:12].mean(), rel=1e-13)
    assert samples.groups["test"].shape[0] == 21


@pytest.mark.parametrize("shape", [(2, 28, 27), (2, 27, 28), (1, 28, 28)])
def test_test_images_of_another_shape_are_refused(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    image_files.write_hdf5(tmp_path / "train.h5", {"": 4}, (2, 28, 28))
    image_files.write_hdf5(tmp_path / "test.h5", {"": 4}, shape)
    training = f"but that of the training images in {tmp_path / 'train.h5'} is (2, 28, 28)"
    said = re.escape(f"the shape of the images is {shape}, {training}")
    with pytest.raises(DataError, match=said):
        ImageSamples(tmp_path, MPI.COMM_SELF)
