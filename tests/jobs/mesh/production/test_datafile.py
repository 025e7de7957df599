"""The data set file: the layout that training reads, and what its samples must satisfy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.mesh.dataset import CHANNELS, MeshRecipe
from distconv.jobs.mesh.hydro.initial_conditions import FAMILIES
from distconv.jobs.mesh.production import datafile
from distconv.jobs.mesh.production.parts import FlowRun, RunFolder, RunStream
from tests.jobs.approved import assert_approved
from tests.jobs.mesh.mesh_files import SIZE
from tests.jobs.mesh.production.test_parts import result

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


def test_a_file_and_its_summary_are_as_approved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory and on disk: from runs with given numbers of samples, of which the last ones of a run are used."""
    recipe = MeshRecipe(16, 5, 2, tau=0.2, threshold=0.6, seed=9)
    wanted = [RunStream(0, 1, 3), RunStream(0, 4, 2), RunStream(1, 0, 2)]
    images = []
    for memory in (1 << 30, 0):
        monkeypatch.setattr(datafile, "IMAGE_BYTES", memory)
        parts = RunFolder(tmp_path / "parts", "x", per_run=4)
        parts.folder.mkdir()
        for run, samples in (
            (FlowRun(0, 1, 0), 2),
            (FlowRun(0, 1, 1), 3),
            (FlowRun(0, 4, 0), 2),
            (FlowRun(1, 0, 0), 2),
        ):
            parts.store(run, result(samples))
        summary = datafile.assemble(tmp_path / f"{memory}.h5", recipe, parts, wanted)
        assert not parts.folder.exists()
        lines = [str(replace(summary, path="PATH"))]
        with h5py.File(summary.path) as file:
            for name, value in [
                *file.attrs.items(),
                *((f"{g} {n}", v) for g in file for n, v in file[g].attrs.items()),
            ]:
                lines.append(f"{name} = {value.tolist() if hasattr(value, 'tolist') else value}")
            for group in ("train", "heldout"):
                for name, data in sorted(file[group].items()):
                    values = data[()]
                    first = values.reshape(len(values), -1)[:, 0].tolist()
                    lines.append(f"{group}/{name}: {values.dtype} {values.shape} chunks {data.chunks} {first}")
        images.append("\n".join(lines))
    assert images[0] == images[1]
    assert_approved("mesh-file", images[0])


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datafile.shutil, "disk_usage", lambda path: SimpleNamespace(free=1.04e9))
    with pytest.raises(DataError, match=r"x\.h5: needs 1\.0 GB on a disk with 1\.0 GB free"):
        datafile.write_large(tmp_path / "x.h5", 10**9, lambda file: None)
    datafile.write_large(tmp_path / "x.h5", 990_000_000, lambda file: file.attrs.update(a=1))
    with h5py.File(tmp_path / "x.h5") as file:
        assert file.attrs["a"] == 1

    def fails(file: h5py.File) -> None:
        raise OSError("no space")

    with pytest.raises(DataError, match=r"y\.h5: cannot write 990,000,000 bytes: no space"):
        datafile.write_large(tmp_path / "y.h5", 990_000_000, fails)
