"""``distconv profile``: a machine file that plans are made with, and that is added to, not measured again."""

from __future__ import annotations

import pytest

from distconv.cli import BAD_INPUT, main
from distconv.perfmodel.machine import Machine

LENET = ["--model", "lenet5", "--input", "1,28,28", "--batch", "8"]


@pytest.mark.ranks(1, 2)
@pytest.mark.time_limit(120)
def test_a_profile_is_a_machine_and_what_is_known_is_not_measured_again(comm, tmp_path_factory):
    path = comm.bcast(tmp_path_factory.mktemp("profile") / "here.yaml" if comm.rank == 0 else None)
    assert main(["profile", "--out", str(path), *LENET]) == 0
    found = Machine.load(path)
    assert [entry.busy for entry in found.compute] == sorted({1, comm.size})
    assert found.ranks_per_node == comm.size and not found.overlap.halo
    assert any(key.startswith("conv2d 8x1x28x28") for key in found.compute[0].table)
    if comm.size == 2:
        assert any(key.startswith("conv2d 4x1x28x28") for key in found.compute[1].table)
    comm.Barrier()
    assert main(["profile", "--out", str(path), *LENET]) == 0
    assert Machine.load(path) == found


@pytest.mark.ranks(1, 2)
def test_a_model_needs_the_extents_of_its_samples(comm, tmp_path, capfd):
    assert main(["profile", "--out", str(tmp_path / "here.yaml"), "--model", "lenet5"]) == BAD_INPUT
    if comm.rank == 0:
        assert "--model needs --input and --batch" in capfd.readouterr().err


@pytest.mark.ranks(1, 2)
def test_a_file_that_is_no_machine_is_not_written_over(comm, tmp_path_factory, capfd):
    path = comm.bcast(tmp_path_factory.mktemp("profile") / "notes.yaml" if comm.rank == 0 else None)
    if comm.rank == 0:
        path.write_text("shopping: [milk]\n")
    comm.Barrier()
    assert main(["profile", "--out", str(path)]) == BAD_INPUT
    assert path.read_text() == "shopping: [milk]\n"
    if comm.rank == 0:
        assert "notes.yaml" in capfd.readouterr().err
