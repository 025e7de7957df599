"""A function of a box as the source of samples: what it is asked for, and what it may do wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.data import BoxFunction, Field, Loader
from distconv.distribution import Interval
from tests.distconv.data.sample_files import common

COUNT, CHANNELS, SIZE, CROPPED = 5, 3, 24, 16
GRIDS = {1: "n=1", 2: "h=2", 3: "w=3", 4: "h=2,w=2"}
FIELDS = (Field("image", "nchw", torch.float64), Field("label", "nhw", torch.float64))
SHAPES = {"image": (COUNT, CHANNELS, SIZE, SIZE), "label": (COUNT, SIZE, SIZE)}

on_ranks = pytest.mark.ranks(*GRIDS)


def grid_of(comm: Any) -> dc.ProcessGrid:
    return dc.ProcessGrid(comm, **dc.parse_grid(GRIDS[comm.size]))


ARRAYS = {name: np.random.default_rng(0).standard_normal(shape) for name, shape in SHAPES.items()}


def augmented(loader: Loader, epoch: int, sample: int, whole: torch.Tensor) -> torch.Tensor:
    for dim, axis in ((-2, "h"), (-1, "w")):
        whole = whole.narrow(dim, loader.crop_offsets(epoch, sample)[axis], CROPPED)
        if axis in loader.mirrored_axes(epoch, sample):
            whole = whole.flip(dim)
    return whole


@on_ranks
def test_ranks_ask_for_their_shares_of_crops_alone(comm: Any) -> None:
    read_bytes = []

    def read(name: str, box: tuple[slice, ...]) -> Any:
        values = ARRAYS[name][box]
        read_bytes.append(values.nbytes)
        return values

    grid = grid_of(comm)
    crop = {"h": CROPPED, "w": CROPPED}
    loader = Loader(BoxFunction(SHAPES, read, comm), FIELDS, grid, 2, seed=7, mirror="hw", crop=crop)
    for batch in loader.epoch(0):
        for tensor, whole in zip(batch.tensors, ARRAYS.values(), strict=True):
            expected = [augmented(loader, 0, sample, torch.from_numpy(whole[sample])) for sample in batch.samples]
            assert torch.equal(dc.gather(tensor), torch.stack(expected))
    assert len(read_bytes) == 2 * COUNT  # images, and as many labels
    block = -(-CROPPED // grid.shape["h"]) * -(-CROPPED // grid.shape["w"])
    assert max(read_bytes) <= 8 * CHANNELS * block
    assert comm.allreduce(sum(read_bytes)) == 8 * (CHANNELS + 1) * CROPPED**2 * COUNT


@on_ranks
def test_a_crop_that_is_larger_than_the_samples_is_refused(comm: Any) -> None:
    source = BoxFunction(SHAPES, lambda name, box: ARRAYS[name][box], comm)
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
@pytest.mark.parametrize(("value", "shift"), [("text", None), (1j, 1.0), (np.datetime64("2000"), None)])
def test_what_is_no_real_number_is_refused_on_all_ranks(comm: Any, shift: Any, value: Any) -> None:
    def read(name: str, box: Any) -> Any:
        return np.full([part.stop - part.start for part in box], value)

    source = BoxFunction({"x": (1, 8)}, read, comm)
    loader = Loader(source, [Field("x", "nw", torch.float32, shift=shift)], grid_of(comm), 1)
    with pytest.raises(dc.DataError, match=r"sample 0 of dataset 'x' has values of .* Store real numbers") as caught:
        next(loader.epoch(0))
    common(comm, caught.value)
