"""Resized samples: those of torch's interpolation, the same to the last bit on any grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.data import BoxFunction, Field, Loader, Resized
from distconv.errors import DataError

pytestmark = pytest.mark.ranks(1, 2, 4)

RANDOM = np.random.default_rng(2)
X = RANDOM.standard_normal((3, 2, 9, 14))
Y = RANDOM.integers(0, 5, (3, 9, 14))
GRIDS = {1: ["n=1"], 2: ["h=2", "w=2"], 4: ["h=4", "h=2,w=2"]}


def source(comm: Any, dtype: Any = np.float64) -> BoxFunction:
    def values(name: str, box: tuple[slice, ...]) -> Any:
        return (X.astype(dtype) if name == "x" else Y)[box]

    return BoxFunction({"x": X.shape, "y": Y.shape}, values, comm)


@pytest.mark.parametrize("size", [(9, 14), (4, 28), (23, 5), (9, 3), (1, 1)])
def test_samples_are_those_of_torch_on_any_grid(comm: Any, size: tuple[int, int]) -> None:
    x = F.interpolate(torch.from_numpy(X), size, mode="bilinear").numpy()
    y = F.interpolate(torch.from_numpy(Y)[:, None].double(), size, mode="nearest-exact")[:, 0].numpy()
    resized = Resized(source(comm), {"x": size, "y": size}, nearest=["y"])
    assert resized.shape("x") == (3, 2, *size) and resized.shape("y") == (3, *size)
    whole = resized.read("x", tuple(dc.Interval(0, extent) for extent in (1, 2, *size)))
    fields = (Field("x", "nchw", torch.float64), Field("y", "nhw", torch.int64))
    for text in GRIDS[comm.size]:
        grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
        (batch,) = Loader(resized, fields, grid, 3, shuffle=False).epoch(0)
        images = dc.gather(batch.tensors[0]).numpy()
        assert np.abs(images - x).max() < 1e-13
        assert np.array_equal(images[:1], whole)
        assert np.array_equal(dc.gather(batch.tensors[1]).numpy(), y)


def test_crops_are_taken_of_the_resized_samples(comm: Any) -> None:
    resized = Resized(source(comm, np.float32), {"x": (18, 28)})
    loader = Loader(resized, [Field("x", "nchw")], dc.ProcessGrid(comm, h=comm.size), 3, crop={"h": 16, "w": 20})
    x = F.interpolate(torch.from_numpy(X).float(), (18, 28), mode="bilinear").numpy()
    (batch,) = loader.epoch(0)
    for image, sample in zip(dc.gather(batch.tensors[0]).numpy(), batch.samples, strict=True):
        at = loader.crop_offsets(0, sample)
        assert np.abs(image - x[sample][:, at["h"] : at["h"] + 16, at["w"] : at["w"] + 20]).max() < 1e-6


def test_what_cannot_be_is_refused(comm: Any) -> None:
    for sizes in ((4, 4, 4, 4), (0, 3)):
        with pytest.raises(DataError, match=r"samples of 'x', \(2, 9, 14\), cannot be resized to"):
            Resized(source(comm), {"x": sizes})
    with pytest.raises(DataError, match="nearest names 'lable', but resized are 'x', 'y'"):
        Resized(source(comm), {"x": (4, 4), "y": (4, 4)}, nearest=["lable"])
