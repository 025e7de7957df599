"""Moments of channels: the same to the last bit on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from distconv.data.box_function import BoxFunction
from distconv.data.channel_statistics import moments
from distconv.data.hdf5 import SampleFile
from distconv.errors import DataError
from tests.distconv.data.sample_files import LAYOUTS, arrays, common, write

pytestmark = pytest.mark.ranks(1, 2, 4)


def test_moments_are_the_same_to_the_last_bit_on_any_number_of_ranks(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    with SampleFile(path, LAYOUTS, comm) as file, SampleFile(path, LAYOUTS, MPI.COMM_SELF) as alone:
        for name, channels in (("x", True), ("y", False)):
            found, single = moments(file, name, channels=channels), moments(alone, name, channels=channels)
            for part in ("mean", "std", "low", "high"):
                assert np.array_equal(getattr(found, part), getattr(single, part))
        # Against NumPy: x has several slabs a sample, y no channels.
        for name, whole in (("x", arrays()[0].astype(np.float64)), ("y", arrays()[1].astype(np.float64)[:, None])):
            found = moments(file, name, channels=name == "x")
            assert np.allclose(found.mean, whole.mean((0, 2, 3)), rtol=1e-12)
            assert np.allclose(found.std, whole.std((0, 2, 3)), rtol=1e-12)
            assert np.array_equal(found.low, whole.min((0, 2, 3)))
            assert np.array_equal(found.high, whole.max((0, 2, 3)))


def test_a_constant_channel_is_not_scaled(comm: Any, shared_tmp_path: Path) -> None:
    path, x = shared_tmp_path / "samples.h5", arrays()[0]
    x[:, 1] = 1.4
    write(path, comm, x=x)
    with SampleFile(path, LAYOUTS, comm) as file:
        assert moments(file, "x").std[1] == 1.0


@pytest.mark.fault(38)
def test_values_that_are_not_finite_are_refused_with_the_sample(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    x = arrays()[0]
    x[4, 1, 2, 3] = np.nan
    write(path, comm, x=x)
    with SampleFile(path, LAYOUTS, comm) as file, pytest.raises(DataError) as caught:
        moments(file, "x")
    assert "'x' has NaN or infinite values in 1 samples, the first is 4" in common(comm, caught.value)


def test_what_has_no_channels_or_no_samples_is_refused(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            file["x"], file["none"] = np.arange(4.0), np.zeros((0, 2, 3))
    comm.Barrier()
    with SampleFile(path, ["x"], comm) as file:
        assert moments(file, "x", channels=False).mean == 1.5
        with pytest.raises(DataError, match=r"'x' is \(4,\) and has no channels. Pass channels=False"):
            moments(file, "x")
    with SampleFile(path, ["none"], comm) as file, pytest.raises(DataError, match="'none' has no samples"):
        moments(file, "none")


def test_what_is_no_real_number_has_no_moments(comm: Any) -> None:
    source = BoxFunction({"x": (3, 2, 4)}, lambda name, box: np.full([i.stop - i.start for i in box], 1j), comm)
    with pytest.raises(DataError, match=r"of dataset 'x' has values of complex128. Store real numbers") as caught:
        moments(source, "x")
    common(comm, caught.value)
