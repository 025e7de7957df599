"""A data set opened for training: what is refused, and the signs of mirrored channels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.errors import DataError
from distconv.jobs.mesh.dataset import CHANNELS, flip, transpose
from distconv.jobs.mesh.samples import MeshSamples, flip_signs, transposed_channels
from distconv.jobs.mesh.synthetic_samples import write_synthetic
from tests.distconv.data.sample_files import common
from tests.jobs.approved import assert_approved, size_of
from tests.jobs.mesh.mesh_files import written


def drop_label(file: h5py.File) -> None:
    del file["train/label"]


def large_label(file: h5py.File) -> None:
    file["train/label"][2, 3, 4] = 7


def nan_input(file: h5py.File) -> None:
    file["train/input"][3, 0, 0, 0] = np.nan


def other_size(file: h5py.File) -> None:
    for name, extra in (("input", (18,)), ("label", ())):
        kind = file[f"heldout/{name}"].dtype
        del file[f"heldout/{name}"]
        file[f"heldout/{name}"] = np.zeros((3, *extra, 16, 32), kind)


@pytest.mark.fault(38)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (drop_label, "there is no dataset 'train/label'"),
        (large_label, "'train/label' has the label 7 in 1 pixels, but labels are 0 to 1"),
        (nan_input, "'train/input' has NaN or infinite values in 1 samples, the first is 3"),
        (
            other_size,
            "dataset 'heldout/input' have the shape (18, 16, 32), but the training samples have (18, 32, 32)",
        ),
    ],
)
def test_bad_samples_are_refused_on_all_ranks(comm: Any, shared_tmp_path: Path, damage: Any, reason: str) -> None:
    path = written(shared_tmp_path / "mesh.h5", comm)
    if comm.rank == 0:
        with h5py.File(path, "r+") as file:
            damage(file)
    comm.Barrier()
    with pytest.raises(DataError) as caught:
        MeshSamples(path, comm)
    assert reason in common(comm, caught.value)


def test_random_samples_are_as_approved(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "x.h5", (32, 20), train=3, heldout=2, seed=4)
    lines = []
    with h5py.File(tmp_path / "x.h5") as file:
        lines += [f"{name} = {value}" for name, value in file.attrs.items()]
        for group in ("train", "heldout"):
            for name, data in sorted(file[group].items()):
                values = data[()]
                text = values.tolist() if name == "family" else size_of(torch.from_numpy(values))
                lines.append(f"{group}/{name}: {text}, chunks {data.chunks}, checksum {data.fletcher32}")
    assert_approved("mesh-synthetic", "\n".join(lines))


@pytest.mark.parametrize(
    ("label", "extents", "message"),
    [
        (0, (16, 16), "fraction of positive training cells is 0, but both classes are required"),
        (1, (16, 16), "fraction of positive training cells is 1, but both classes are required"),
        (
            None,
            (16, 24),
            "dataset 'heldout/extrapolated' have the shape (16, 24), but the training inputs have (16, 16)",
        ),
    ],
)
def test_samples_of_one_class_or_other_extents_are_refused(
    tmp_path: Path, label: int | None, extents: tuple[int, int], message: str
) -> None:
    write_synthetic(tmp_path / "x.h5", (16, 16), train=2, heldout=1)
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        if label is not None:
            file["train/label"][...] = label
        del file["heldout/extrapolated"]
        file["heldout/extrapolated"] = np.zeros((1, *extents), np.float32)
    with pytest.raises(DataError, match=re.escape(message)):
        MeshSamples(tmp_path / "x.h5", MPI.COMM_SELF, extrapolated=True)


def test_signs_are_those_of_a_mirrored_sample() -> None:
    sample = np.random.default_rng(0).standard_normal((len(CHANNELS), 4, 5)).astype(np.float32)
    for axis, dim in (("h", -2), ("w", -1)):
        mirrored, _ = flip(sample, np.zeros((4, 5), np.uint8), axis)
        assert np.array_equal(mirrored, np.flip(sample, dim) * np.array(flip_signs(axis), np.float32).reshape(-1, 1, 1))
        odd = {CHANNELS[i] for i, sign in enumerate(flip_signs(axis)) if sign < 0}
        assert odd == {"velocity v" if axis == "h" else "velocity u", "vorticity", "skew"}


def test_exchanged_channels_are_those_of_a_transposed_sample() -> None:
    sample = np.random.default_rng(0).standard_normal((len(CHANNELS), 5, 5)).astype(np.float32)
    turned, _ = transpose(sample, np.zeros((5, 5), np.uint8))
    for channel, (source, factor) in enumerate(transposed_channels()):
        assert np.array_equal(turned[channel], sample[source].T * factor)
    moved = {CHANNELS[channel] for channel, (source, _) in enumerate(transposed_channels()) if source != channel}
    assert moved == {"velocity u", "velocity v"}


@pytest.mark.parametrize("size", [(16, 24), (16, 16)])
def test_samples_are_turned_only_where_they_are_squares(tmp_path: Path, size: tuple[int, int]) -> None:
    write_synthetic(tmp_path / "x.h5", size, train=6, heldout=1)
    samples = MeshSamples(tmp_path / "x.h5", MPI.COMM_SELF)
    loader = samples.loader("train", dc.ProcessGrid(MPI.COMM_SELF), 1, augment=True)
    with h5py.File(tmp_path / "x.h5") as file:
        labels = file["train/label"][()]
    turned = set()
    for epoch in range(4):
        for batch in loader.epoch(epoch):
            label, (sample,) = batch.tensors[1].local[0].numpy(), batch.samples
            assert label.shape == size
            ways = {
                (flips, transposed): np.flip(labels[sample].T if transposed else labels[sample], flips)
                for flips in ((), (0,), (1,), (0, 1))
                for transposed in (False, True)
            }
            turned |= {way for way, image in ways.items() if np.array_equal(image, label)}
    assert {flips for flips, _ in turned} == {(), (0,), (1,), (0, 1)}
    assert any(transposed for _, transposed in turned) == (size[0] == size[1])
    samples.close()
