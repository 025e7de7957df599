"""The data set file: its content as approved, and a disk without space."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import pytest

from distconv.errors import DataError
from distconv.jobs.mesh.dataset import MeshRecipe
from distconv.jobs.mesh.production import datafile
from distconv.jobs.mesh.production.parts import FlowRun, RunFolder, RunStream
from tests.jobs.approved import assert_approved
from tests.jobs.mesh.production.test_parts import result

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


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
