"""The data set file: the layout that training reads, and what its samples must satisfy."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from distconv.jobs.mesh.dataset import CHANNELS
from distconv.jobs.mesh.hydro.initial_conditions import FAMILIES
from tests.jobs.mesh.mesh_files import SIZE

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


@pytest.mark.long
def test_a_file_has_the_layout_that_training_reads(small: Path) -> None:
    with h5py.File(small, "r") as file:
        assert list(file.attrs["channels"]) == list(CHANNELS)
        assert (file.attrs["tau"], file.attrs["threshold"], file.attrs["cell_size"]) == (0.3, 0.4, 1 / 128)
        assert 0.0 <= file.attrs["rejection_rate"] < 1.0
        for name, count in (("train", 7), ("heldout", 5)):
            group = file[name]
            assert group["input"].shape == (count, 18, SIZE, SIZE)
            assert group["input"].dtype == group["extrapolated"].dtype == np.float32
            assert group["label"].shape == group["extrapolated"].shape == (count, SIZE, SIZE)
            assert group["label"].dtype == np.uint8
            assert group["input"].chunks == (1, 18, 8, 8)
            assert all(group[key].fletcher32 for key in ("input", "label", "extrapolated"))
            assert np.isfinite(group["input"][...]).all()
            assert set(np.unique(group["label"][...])) == {0, 1}
            np.testing.assert_allclose(group["positives"][...], group["label"][...].mean((1, 2)))
            assert group.attrs["positive_fraction"] == pytest.approx(group["label"][...].mean())
            assert {name.decode() for name in group["family"][...]} == set(FAMILIES)


def test_training_and_held_out_samples_never_share_a_run(small: Path) -> None:
    with h5py.File(small, "r") as file:
        train, heldout = file["train/run"][...], file["heldout/run"][...]
        assert not set(train) & set(heldout)
        assert max(np.unique(np.concatenate([train, heldout]), return_counts=True)[1]) <= 2
        times = file["train/t"][...]
        for run in np.unique(train):
            gaps = np.diff(np.sort(times[train == run]))
            assert (gaps >= 0.05 - 1e-12).all()


def test_labels_contain_what_is_bad_already(small: Path) -> None:
    with h5py.File(small, "r") as file:
        minimum = file["train/input"][:, CHANNELS.index("minimum Jacobian")]
        assert (file["train/label"][...][minimum < 0.4] == 1).all()
        assert (file["train/extrapolated"][...] <= minimum).all()
        assert (np.mean(minimum < 0.25, axis=(1, 2)) < 0.03).all()


def test_families_take_turns_in_a_file(small: Path) -> None:
    names = list(FAMILIES)
    with h5py.File(small, "r") as file:
        for group, order in (("train", [*names, *names[:2]]), ("heldout", names)):
            assert [name.decode() for name in file[f"{group}/family"][...]] == order


def test_a_share_of_the_candidates_is_rejected(small: Path) -> None:
    with h5py.File(small, "r") as file:
        found = json.loads(file.attrs["summary"])
    rejected = sum(found["rejected"].values())
    assert found["rejection_rate"] == pytest.approx(rejected / found["candidates"])
    assert found["candidates"] - rejected >= 12
