"""A function of a box as the source of samples: what it is asked for, what it may do wrong, training from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

import distconv as dc
from distconv.data import BoxFunction, Field, Loader, SampleFile
from distconv.distribution import Interval
from distconv.layers.models import MODELS
from tests.distconv.data.sample_files import common

COUNT, CHANNELS, SIZE, CROPPED = 5, 3, 24, 16
GRIDS = {1: "n=1", 2: "h=2", 3: "w=3", 4: "h=2,w=2"}
FIELDS = (Field("image", "nchw", torch.float64), Field("label", "nhw", torch.float64))
SHAPES = {"image": (COUNT, CHANNELS, SIZE, SIZE), "label": (COUNT, SIZE, SIZE)}

on_ranks = pytest.mark.ranks(*GRIDS)


def grid_of(comm: Any) -> dc.ProcessGrid:
    return dc.ProcessGrid(comm, **dc.parse_grid(GRIDS[comm.size]))


@pytest.fixture
def path(comm: Any, shared_tmp_path: Path) -> Path:
    path = shared_tmp_path / "samples.h5"
    if comm.rank == 0:
        random = np.random.default_rng(0)
        with h5py.File(path, "w") as file:
            file["image"] = random.standard_normal(SHAPES["image"])
            file["label"] = random.integers(0, 2, SHAPES["label"]).astype(np.float64)
    comm.Barrier()
    return path


def losses(model: torch.nn.Module, batches: Iterable[Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    found = []
    for x, t in batches:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), t)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS["unet"].factory(width=2, in_channels=CHANNELS).double()


def whole_batches(path: Path, loader: Loader, epochs: int) -> Iterator[list[torch.Tensor]]:
    """The same batches as whole tensors, cut out and turned here."""
    with h5py.File(path, locking=False) as file:
        images, labels = torch.from_numpy(file["image"][()]), torch.from_numpy(file["label"][()])
    for epoch in range(epochs):
        order = loader.order(epoch)
        for begin in range(0, COUNT, loader.batch):
            samples = [int(sample) for sample in order[begin : begin + loader.batch]]
            yield [torch.stack([augmented(loader, epoch, s, of[s]) for s in samples]) for of in (images, labels)]


def augmented(loader: Loader, epoch: int, sample: int, whole: torch.Tensor) -> torch.Tensor:
    for dim, axis in ((-2, "h"), (-1, "w")):
        whole = whole.narrow(dim, loader.crop_offsets(epoch, sample)[axis], CROPPED)
        if axis in loader.mirrored_axes(epoch, sample):
            whole = whole.flip(dim)
    return whole


@pytest.mark.long
@on_ranks
@pytest.mark.parametrize("kind", ["file", "function"])
def test_a_unet_on_blocks_has_the_losses_of_whole_samples_and_reads_its_share(comm: Any, path: Path, kind: str) -> None:
    read_bytes = []

    def read(name: str, box: tuple[slice, ...]) -> Any:
        with h5py.File(path, locking=False) as file:
            values = file[name][box]
        read_bytes.append(values.nbytes)
        return values

    source = SampleFile(path, ["image", "label"], comm) if kind == "file" else BoxFunction(SHAPES, read, comm)
    grid = grid_of(comm)
    loader = Loader(source, FIELDS, grid, 2, seed=7, mirror="hw", crop={"h": CROPPED, "w": CROPPED})
    expected = losses(network(), whole_batches(path, loader, epochs=2))
    model = dc.parallelize(network(), grid)
    found = losses(model, (batch.tensors for epoch in (0, 1) for batch in loader.epoch(epoch)))
    assert len(found) == 6
    assert found == pytest.approx(expected, rel=1e-10)
    if kind == "function":
        images = 2 * COUNT
        assert len(read_bytes) == 2 * images  # and as many labels
        block = -(-CROPPED // grid.shape["h"]) * -(-CROPPED // grid.shape["w"])
        assert max(read_bytes) <= 8 * CHANNELS * block
        assert comm.allreduce(sum(read_bytes)) == 8 * (CHANNELS + 1) * CROPPED**2 * images
    source.close()


def short(name: str, box: tuple[slice, ...]) -> Any:
    return np.zeros(3)


def failing(name: str, box: tuple[slice, ...]) -> Any:
    raise KeyError("gone")


@on_ranks
@pytest.mark.parametrize(
    ("read", "text"),
    [
        (short, r"short gives \(3,\) for \[\d:\d, .*\] of 'image'"),
        (failing, r"failing: 'image' of \[.*\]: KeyError: 'gone'"),
    ],
)
def test_what_a_function_does_wrong_reaches_all_ranks(comm: Any, read: Any, text: str) -> None:
    loader = Loader(BoxFunction(SHAPES, read, comm), FIELDS[:1], grid_of(comm), 2)
    with pytest.raises(dc.DataError, match=text) as caught:
        next(loader.epoch(0))
    common(comm, caught.value)


@on_ranks
def test_a_crop_that_is_larger_than_the_samples_is_refused(comm: Any) -> None:
    source = BoxFunction(SHAPES, short, comm)
    for crop, text in (({"h": 25}, "crop h=25: samples have 24 there"), ({"d": 2}, "crop d=2: samples have nothing")):
        with pytest.raises(dc.DataError, match=text):
            Loader(source, FIELDS, grid_of(comm), 2, crop=crop)


def test_values_of_another_shape_are_refused_though_they_are_as_many() -> None:
    box = (Interval(0, 1), Interval(0, 2), Interval(0, 3))
    for shape in ((1, 3, 2), (2, 3), (1, 2, 4)):
        source = BoxFunction({"x": (4, 2, 3)}, lambda name, box, shape=shape: np.zeros(shape), MPI.COMM_SELF)
        with pytest.raises(dc.DataError, match=r"gives .* for \[0:1, 0:2, 0:3\] of 'x'"):
            source.read("x", box)


@on_ranks
def test_the_default_dtype_is_that_of_what_the_function_returns(comm: Any) -> None:
    kinds = {"label": np.int16, "flag": np.bool_, "image": np.float64}

    def read(name: str, box: Any) -> Any:
        return np.ones([part.stop - part.start for part in box], kinds[name])

    source = BoxFunction({name: (4, 8) for name in kinds}, read, comm)
    (batch,) = Loader(source, [Field(name, "nw") for name in kinds], grid_of(comm), 4).epoch(0)
    assert [x.dtype for x in batch.tensors] == [torch.int64, torch.bool, torch.float32]


@on_ranks
@pytest.mark.parametrize("shift", [None, 1.0])
@pytest.mark.parametrize("value", ["text", 1j, np.datetime64("2000")])
def test_what_is_no_real_number_is_refused_on_all_ranks(comm: Any, shift: Any, value: Any) -> None:
    def read(name: str, box: Any) -> Any:
        return np.full([part.stop - part.start for part in box], value)

    source = BoxFunction({"x": (1, 8)}, read, comm)
    loader = Loader(source, [Field("x", "nw", torch.float32, shift=shift)], grid_of(comm), 1)
    with pytest.raises(dc.DataError, match=r"sample 0 of dataset 'x' has values of .* Store real numbers") as caught:
        next(loader.epoch(0))
    common(comm, caught.value)
