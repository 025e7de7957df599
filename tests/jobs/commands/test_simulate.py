"""``distconv simulate``: a full disk, and one line on bad input."""

from __future__ import annotations

import errno
import os

import pytest

from distconv.cli import BAD_INPUT, main
from tests.jobs.command_lines import assert_refused

SO = ["simulate", "--schedule", "1f1b-so", "--stages", "3", "--microbatches", "8", "--transfer", "0.5"]


@pytest.mark.fault(58)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("option", ["--plot", "--trace"])
def test_a_full_disk_is_one_line_with_the_file_that_stays_as_it_was(comm, tmp_path_factory, capfd, monkeypatch, option):
    path = comm.bcast(tmp_path_factory.mktemp("simulate") if comm.rank == 0 else None) / "so.png"
    if comm.rank == 0:
        path.write_text("good")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        assert main([*SO, option, str(path)]) == BAD_INPUT
    comm.Barrier()
    if comm.rank == 0:
        assert f"distconv simulate: [Errno 28] No space left on device: '{path}'" in capfd.readouterr().err
        assert path.read_text() == "good"
        assert [each.name for each in path.parent.iterdir()] == ["so.png"]


@pytest.mark.fault(108)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--schedule", "fly"], "there is no schedule 'fly'; there are gpipe"),
        (["--stages", "0"], "stages=0 is not a whole number"),
        (["--forward", "1,2"], "forward: 2 costs for 3 stages"),
        (["--forward", "nan"], "forward of stage 0 is nan"),
        (
            ["--backward", "two"],
            "argument --backward: 'two' is neither a number nor a list of them separated by commas",
        ),
        (["--replicas", "1.5"], "argument --replicas: '1.5' is neither a whole number"),
        (["--chunks", "2"], "1f1b-so: option 'chunks' does not apply"),
        (["--plot", "/nowhere/so.png"], "No such file or directory: '/nowhere/so.png'"),
        (["--plot", "so.xyz"], "Format 'xyz' is not supported"),
        (["--stages", "1000000"], "> 1,000,000"),
    ],
)
def test_bad_input_is_one_line(comm, capsys, extra, message):
    assert_refused(capsys, [*SO, *extra], message)
