"""Batches are the same samples, mirrored alike, on any grid; read errors reach all ranks in their step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distconv as dc
from distconv.data.channel_statistics import moments
from distconv.data.hdf5 import SampleFile
from distconv.data.loader import Field, Loader
from distconv.errors import DataError
from tests.distconv.data.sample_files import LAYOUTS, SAMPLES, arrays, common, flip_bit, write

pytestmark = pytest.mark.ranks(1, 2, 4)

ODD = {"h": (1.0, 1.0, -1.0), "w": (1.0, -1.0, 1.0)}
EXCHANGED = ((0, -1.0), (2, 1.0), (1, 1.0))
FIELDS = (Field("x", "nchw", torch.float64, odd=ODD, exchanged=EXCHANGED), Field("y", "nhw", torch.float32))
GRIDS = {1: ["n=1"], 2: ["n=2", "h=2", "w=2", "c=2"], 4: ["n=4", "h=4", "h=2,w=2", "n=2,h=2", "c=2,h=2"]}


def grids(comm: Any) -> list[dc.ProcessGrid]:
    return [dc.ProcessGrid(comm, **dc.parse_grid(text)) for text in GRIDS[comm.size]]


def expected(loader: Loader, epoch: int, samples: tuple[int, ...]) -> tuple[Any, Any]:
    x, y = arrays()
    images, labels = [], []
    for sample in samples:
        image, label = x[sample].astype(np.float64), y[sample].astype(np.float32)
        begins = loader.cropped(epoch, sample)
        window = tuple(slice(begins.get(a, 0), begins.get(a, 0) + loader.crop.get(a, 99)) for a in "hw")
        image, label = image[(slice(None), *window)], label[window]
        for axis in loader.mirrored(epoch, sample):
            dim = {"h": -2, "w": -1}[axis]
            image = np.flip(image, dim) * np.array(ODD[axis]).reshape(3, 1, 1)
            label = np.flip(label, dim)
        if loader.transposed(epoch, sample):
            image, label = np.stack([-image[0].T, image[2].T, image[1].T]), label.T
        images.append(image)
        labels.append(label)
    return np.stack(images), np.stack(labels)


@pytest.mark.parametrize(
    ("batch", "crop"), [(1, {}), (3, {}), (4, {"h": 5, "w": 6}), (7, {"w": 7}), (3, {"h": 7, "w": 7})]
)
def test_batches_equal_the_cropped_mirrored_and_transposed_samples_on_any_grid(
    comm: Any, shared_tmp_path: Path, batch: int, crop: dict[str, int]
) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    with SampleFile(path, LAYOUTS, comm) as file:
        for grid in grids(comm):
            square = len(set(crop.values())) == 1 and len(crop) == 2
            loader = Loader(file, FIELDS, grid, batch, seed=3, mirror="hw", transpose=square, crop=crop)
            assert square == any(loader.transposed(0, sample) for sample in range(SAMPLES))
            assert bool(crop) == (len({tuple(loader.cropped(0, sample).values()) for sample in range(SAMPLES)}) > 1)
            for epoch in (0, 1):
                seen: list[int] = []
                for each in loader.epoch(epoch):
                    image, label = expected(loader, epoch, each.samples)
                    assert np.array_equal(dc.gather(each.tensors[0]).numpy(), image)
                    assert np.array_equal(dc.gather(each.tensors[1]).numpy(), label)
                    seen += each.samples
                assert sorted(seen) == list(range(SAMPLES))


def test_every_way_to_mirror_occurs_and_changes_with_the_epoch(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    with SampleFile(path, LAYOUTS, comm) as file:
        loader = Loader(file, FIELDS, dc.ProcessGrid(comm, n=comm.size), 2, mirror="hw")
        drawn = [[loader.mirrored(epoch, sample) for sample in range(SAMPLES)] for epoch in range(5)]
        assert {text for row in drawn for text in row} == {"", "h", "w", "hw"}
        assert drawn[0] != drawn[1]
        assert list(loader.order(0)) != list(loader.order(1))


@pytest.mark.fault(25)
def test_the_last_smaller_batch_is_kept_or_dropped(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    with SampleFile(path, LAYOUTS, comm) as file:
        grid = dc.ProcessGrid(comm, n=comm.size)
        kept = [len(b.samples) for b in Loader(file, FIELDS, grid, 4).epoch(0)]
        dropped = [len(b.samples) for b in Loader(file, FIELDS, grid, 4, drop_last=True).epoch(0)]
    assert (kept, dropped) == ([4, 3], [4])


def test_an_epoch_goes_on_from_a_later_step(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    with SampleFile(path, LAYOUTS, comm) as file:
        loader = Loader(file, FIELDS, dc.ProcessGrid(comm, h=comm.size), 2, seed=1)
        assert [b.samples for b in loader.epoch(2, start=1)] == [b.samples for b in loader.epoch(2)][1:]


def test_values_are_shifted_and_scaled_per_channel(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    with SampleFile(path, LAYOUTS, comm) as file:
        found = moments(file, "x")
        fields = [Field("x", "nchw", torch.float64, found.mean, found.std)]
        loader = Loader(file, fields, dc.ProcessGrid(comm, h=comm.size), SAMPLES, shuffle=False)
        (batch,) = loader.epoch(0)
        whole = dc.gather(batch.tensors[0])
    assert whole.mean((0, 2, 3)).abs().max() < 1e-12
    assert (whole.var((0, 2, 3), correction=0) - 1).abs().max() < 1e-12


@pytest.mark.fault(34)
def test_a_checksum_error_reaches_all_ranks_in_the_step_it_belongs_to(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    chunks_per_sample = 1 * 3 * 4  # channels, rows and columns in chunks of three
    if comm.rank == 0:
        flip_bit(path, "x", 3 * chunks_per_sample)
    comm.Barrier()
    with SampleFile(path, LAYOUTS, comm) as file:
        loader = Loader(file, FIELDS, dc.ProcessGrid(comm, h=comm.size), 2, shuffle=False)
        steps = []
        with pytest.raises(DataError) as caught:
            for batch in loader.epoch(0):
                steps.append(batch.samples)
    assert steps == [(0, 1)]  # sample 3 is in the second batch
    text = common(comm, caught.value)
    assert "of dataset 'x': " in text
    assert str(path) in text


@pytest.mark.fault(39)
def test_a_read_error_on_one_rank_reaches_all_in_its_step(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    with SampleFile(path, LAYOUTS, comm) as file:
        loader = Loader(file, FIELDS, dc.ProcessGrid(comm, n=comm.size), 2)
        read = loader._read

        # With four ranks only the first two have rows of a batch of two.
        def fails(into: Any, each: Field, sample: int, space: Any, epoch: int) -> None:
            if sample in loader.order(epoch)[2:4]:
                raise OSError(5, "Input/output error")
            read(into, each, sample, space, epoch)

        if comm.rank == min(comm.size, 2) - 1:
            monkeypatch.setattr(loader, "_read", fails)
        steps = 0
        with pytest.raises(DataError) as caught:
            for _ in loader.epoch(0):
                steps += 1
    assert steps == 1
    assert "[Errno 5] Input/output error" in common(comm, caught.value)


@pytest.mark.fault(37)
def test_a_file_replaced_between_epochs_is_found_at_the_next_epoch(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    with SampleFile(path, LAYOUTS, comm) as file:
        loader = Loader(file, FIELDS, dc.ProcessGrid(comm, n=comm.size), 4)
        assert len(list(loader.epoch(0))) == 2
        write(path.with_suffix(".new"), comm)
        if comm.rank == 0:
            path.with_suffix(".new").replace(path)
        comm.Barrier()
        with pytest.raises(DataError) as caught:
            next(loader.epoch(1))
    assert "has been replaced by another file" in common(comm, caught.value)


def test_no_thread_is_left_when_an_epoch_is_not_finished(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    with SampleFile(path, LAYOUTS, comm) as file:
        epoch = Loader(file, FIELDS, dc.ProcessGrid(comm, n=comm.size), 2).epoch(0)
        next(epoch)
        epoch.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("distconv-loader")]


def test_a_batch_that_cannot_be_made_is_refused(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    with SampleFile(path, LAYOUTS, comm) as file:
        grid = dc.ProcessGrid(comm, n=comm.size)
        with pytest.raises(DataError, match="no batch of 8 can be made of the 7 samples of 'x'"):
            Loader(file, FIELDS, grid, 8, drop_last=True)
        with pytest.raises(DataError, match="no batch of 0"):
            Loader(file, FIELDS, grid, 0)
        with pytest.raises(DataError, match="samples of 9 x 10 cannot be transposed"):
            Loader(file, FIELDS, grid, 2, transpose=True)


@pytest.mark.ranks(1, 2)
def test_a_crop_may_begin_wherever_it_fits(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    with SampleFile(path, LAYOUTS, comm) as file:
        loader = Loader(file, FIELDS, grids(comm)[0], 3, crop={"h": 7, "w": 10})
        places = [loader.cropped(epoch, sample) for epoch in range(20) for sample in range(SAMPLES)]
        assert {place["h"] for place in places} == {0, 1, 2}  # of 9 rows
        assert {place["w"] for place in places} == {0}
        orders = [tuple(loader.order(epoch)) for epoch in range(3)]
        assert len(set(orders)) == 3 and orders[0] == tuple(loader.order(0))
