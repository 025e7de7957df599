"""Opening and reading sample files, and every way in which a file can be bad."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from distconv.data.hdf5 import SampleFile
from distconv.distribution import Interval
from distconv.errors import DataError
from tests.distconv.data.sample_files import LAYOUTS, SAMPLES, arrays, common, flip_bit, write

pytestmark = pytest.mark.ranks(1, 2, 4)


def refused(path: Path, comm: Any) -> str:
    with pytest.raises(DataError) as caught:
        SampleFile(path, LAYOUTS, comm)
    text = common(comm, caught.value)
    assert str(path) in text
    return text


@pytest.fixture
def file(comm: Any, shared_tmp_path: Path) -> Iterator[SampleFile]:
    """An intact file, opened on all ranks."""
    write(shared_tmp_path / "good.h5", comm)
    with SampleFile(shared_tmp_path / "good.h5", LAYOUTS, comm) as opened:
        yield opened


def test_each_rank_reads_the_box_it_asks_for(comm: Any, file: SampleFile) -> None:
    x, y = arrays()
    box = (Interval(comm.rank, comm.rank + 1), Interval(0, 3), Interval(2, 7), Interval(comm.rank, 9))
    assert np.array_equal(file.read("x", box), x[comm.rank : comm.rank + 1, :, 2:7, comm.rank : 9])
    assert np.array_equal(file.read("y", (Interval(0, SAMPLES), Interval(0, 9), Interval(0, 10))), y)
    assert file.read("y", (Interval(0, 2), Interval(4, 4), Interval(0, 10))).shape == (2, 0, 10)


def shortened(share: float) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, int(share * path.stat().st_size))


NO_HDF5, NO_FILE = "cannot be opened as HDF5", "is not a regular file but a folder, a pipe or a device"
STATES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), f"[Errno {errno.ENOENT}]"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is a directory"),
    "empty": (lambda path: path.write_bytes(b""), "is empty (0 bytes)"),
    "nearly all is cut off": (shortened(0.02), NO_HDF5),
    "the last bytes are cut off": (shortened(0.999), NO_HDF5),
    "text": (lambda path: path.write_text("not HDF5\n" * 1000), NO_HDF5),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), NO_FILE),
    "endless": (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), NO_FILE),
}


@pytest.mark.fault(32, 33, 71, 80)
@pytest.mark.parametrize("state", STATES)
def test_what_is_no_complete_file_of_hdf5_is_refused_at_once(comm: Any, shared_tmp_path: Path, state: str) -> None:
    path = shared_tmp_path / "bad.h5"
    write(path, comm)
    change, reason = STATES[state]
    if comm.rank == 0:
        change(path)
    comm.Barrier()
    assert reason in refused(path, comm)


@pytest.mark.fault(32)
def test_a_file_that_one_rank_may_not_read_is_refused_on_all(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared_tmp_path / "good.h5"
    write(path, comm)

    def no_permission(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    if comm.rank == comm.size - 1:  # a superuser may read everything, so the system call is replaced
        monkeypatch.setattr(os, "open", no_permission)
    text = refused(path, comm)
    assert f"[Errno {errno.EACCES}]" in text
    assert comm.size == 1 or f"on rank {comm.size - 1}" in text


@pytest.mark.fault(34)
def test_a_flipped_bit_is_found_by_the_checksum(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "flipped.h5"
    write(path, comm)
    if comm.rank == 0:
        flip_bit(path, "x", 0)
    comm.Barrier()
    with SampleFile(path, LAYOUTS, comm) as file:
        with pytest.raises(
            DataError, match=r"cannot read \[0:1, 0:3, 0:9, 0:10\] of dataset 'x': .*filter returned failure"
        ):
            file.read("x", (Interval(0, 1), Interval(0, 3), Interval(0, 9), Interval(0, 10)))
        assert file.read("x", (Interval(1, 2), Interval(0, 3), Interval(0, 9), Interval(0, 10))).any()


@pytest.mark.fault(35)
@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("x", arrays()[0][:, :2], "dataset 'x' is float32 (7, 2, 9, 10) but must be float32 (any, 3, any, any)"),
        ("x", arrays()[0][:, 0], "dataset 'x' is float32 (7, 9, 10) but must be"),
        ("y", arrays()[1].astype(np.int64), "dataset 'y' is int64 (7, 9, 10) but must be uint8 (any, any, any)"),
        ("y", arrays()[1][:5], "the numbers of samples differ: 7 in 'x', 5 in 'y'"),
        ("y", None, "there is no dataset 'y' in it; at its top are x"),
    ],
    ids=["channels", "dimensions", "int64", "fewer", "missing"],
)
def test_a_dataset_of_another_layout_is_refused(
    comm: Any, shared_tmp_path: Path, name: str, values: Any, reason: str
) -> None:
    path = shared_tmp_path / "layout.h5"
    write(path, comm, **{name: values})
    assert reason in refused(path, comm)


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((SAMPLES, 3, 9, 10), np.float32)
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", shape=(SAMPLES, 3, 9, 10))
    file.create_virtual_dataset("x", layout)


def made(*shape: int, **options: Any) -> Callable[[h5py.File], object]:
    return lambda file: file.create_dataset("x", shape, **({"dtype": np.float32} | options))


ENORMOUS = (1 << 50, 3, 32, 32)


@pytest.mark.fault(35, 71)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (made(SAMPLES, dtype=h5py.vlen_dtype(np.float32)), "dataset 'x' is ragged"),
        (lambda file: file.create_group("x/inner"), "'x' is a group, not a dataset; it has inner"),
        (made(), "dataset 'x' is a single value"),
        (
            made(7, 3, 9, 10, chunks=(1, 3, 9, 10)),
            "is incomplete: (7, 3, 9, 10) takes 7560 bytes but 0 were written",
        ),
        (virtual, "virtual dataset 'x' leads to /etc/passwd, out of the folder"),
        (made(1, 3, 9, 10, external=[("/etc/passwd", 0, 1080)]), "dataset 'x' lies in other files"),
        (made(*ENORMOUS, chunks=(1, 3, 32, 32)), "(1125899906842624, 3, 32, 32) takes 13835058055282163712 bytes"),
        (
            made(*ENORMOUS, chunks=(1, 3, 32, 32), compression="gzip"),
            "takes 13835058055282163712 bytes but 0 were written",
        ),
    ],
)
def test_what_is_not_an_array_of_samples_in_this_file_is_refused(
    comm: Any, shared_tmp_path: Path, make: Any, reason: str
) -> None:
    path = shared_tmp_path / "odd.h5"
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            make(file)
            file["y"] = arrays()[1]
    comm.Barrier()
    assert reason in refused(path, comm)


HOLD = """
import sys, h5py, numpy
file = h5py.File(sys.argv[1], "w", libver="latest")
file["z"] = numpy.zeros(100000)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.fault(36)
def test_a_file_that_a_writer_holds_open_is_read_or_refused(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "held.h5"
    write(path, comm)
    writer = None
    if comm.rank == 0:
        command = [sys.executable, "-c", HOLD, str(path)]
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
    comm.Barrier()
    try:
        with SampleFile(path, LAYOUTS, comm) as file:
            whole = tuple(Interval(0, extent) for extent in file.shape("x"))
            assert np.array_equal(file.read("x", whole), arrays()[0])
    except DataError as error:
        common(comm, error)
    comm.Barrier()
    if writer is not None:
        writer.communicate(timeout=10)


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.fault(37)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replace, "replaced by another file"),
        (lambda path: os.truncate(path, path.stat().st_size - 100), "changed from"),
        (lambda path: os.utime(path, ns=(0, 0)), "written to"),
        (Path.unlink, "No such file"),
    ],
)
def test_a_file_that_changes_between_epochs_is_found(comm: Any, file: SampleFile, change: Any, reason: str) -> None:
    file.check_unchanged()
    comm.Barrier()
    if comm.rank == 0:
        change(file.path)
    comm.Barrier()
    with pytest.raises(DataError) as caught:
        file.check_unchanged()
    text = common(comm, caught.value)
    assert reason in text and str(file.path) in text


def test_a_chunk_larger_than_a_ranks_block_warns_on_rank_0(comm: Any, file: SampleFile) -> None:
    file.warn_of_large_chunks("x", (3, 3, 3))
    if comm.rank == 0:
        with pytest.warns(UserWarning, match=r"a chunk of 'x' is \(3, 3, 3\) but a rank reads blocks of \(3, 2, 4\)"):
            file.warn_of_large_chunks("x", (3, 2, 4))
    else:
        file.warn_of_large_chunks("x", (3, 2, 4))


@pytest.mark.fault(71)
def test_links_within_a_file_are_followed_and_others_open_nothing(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "linked.h5"
    write(path, comm)
    if comm.rank == 0:
        os.mkfifo(shared_tmp_path / "pipe")  # whoever opens it waits for ever
        with h5py.File(path, "a") as file:
            file["out"] = h5py.ExternalLink(str(shared_tmp_path / "pipe"), "/")
            file["inner/x"] = h5py.SoftLink("/x")
            file["round"] = h5py.SoftLink("round")
            file["by"] = h5py.SoftLink("/out/x")
    comm.Barrier()
    with SampleFile(path, ["inner/x"], comm) as file:
        assert file.shape("inner/x")[0] == SAMPLES
        assert file.attribute("any", "inner") is None
    for name in ("out/x", "by", "round"):
        with pytest.raises(DataError, match=f"dataset '{name}' lies in other files"):
            SampleFile(path, [name], comm)


@pytest.mark.fault(110)
@pytest.mark.parametrize("first", ["ours", "the user's"])
@pytest.mark.parametrize("locking", [None, False, True, "best-effort"])
def test_a_user_may_have_the_same_file_open(comm: Any, shared_tmp_path: Path, first: str, locking: Any) -> None:
    path = shared_tmp_path / "good.h5"
    write(path, comm)
    if first == "ours":
        with SampleFile(path, LAYOUTS, comm), h5py.File(path, "r", locking=locking) as other:
            assert len(other["x"]) == SAMPLES
    else:
        with h5py.File(path, "r", locking=locking), SampleFile(path, LAYOUTS, comm) as file:
            assert file.shape("x")[0] == SAMPLES


def test_a_column_has_a_value_for_each_sample_and_lies_in_the_file(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "good.h5"
    write(path, comm)
    if comm.rank == 0:
        with h5py.File(path, "a") as file:
            file["family"] = ["blast"] * SAMPLES
            file["claims"] = np.zeros(SAMPLES + 1)
            file["away"] = h5py.ExternalLink("/etc/passwd", "x")
    comm.Barrier()
    with SampleFile(path, LAYOUTS, comm) as file:
        assert file.column("family") == ["blast"] * SAMPLES
        assert file.column("none") is None
        with pytest.raises(DataError, match=r"'claims' has 8 values for 7 samples\. Write one for each"):
            file.column("claims")
        with pytest.raises(DataError, match="'away' lies in other files"):
            file.column("away")
