"""One rank alone passes something else to readers, loaders and writers: the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import distconv as dc
from distconv.data.box_function import BoxFunction
from distconv.data.channel_statistics import moments
from distconv.data.gridded import open_gridded
from distconv.data.hdf5 import DatasetLayout
from distconv.data.loader import Field, Loader
from distconv.data.opening import open_source
from distconv.data.reading_processes import ReadByProcesses
from distconv.data.resizing import Resized
from tests.distconv.data.stored_samples import slow
from tests.distconv.layouts import counting
from tests.distconv.one_rank_alone import Case, Rank, check

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]

FIELD = Field("x", "nch")


def loader(batch: int = 2, field: Field = FIELD, **options: Any) -> Callable[[Rank], object]:
    return lambda r: Loader(computed(r), [r.pick(FIELD, field)], r.grid, r.pick(2, batch), **r.pick({}, options))


def samples(path: str = "a.h5", count: int = 4, dtype: str = "f4", column: Any = None) -> str:
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((count, 2, 5), dtype)
        if column is not None:
            file["family"] = column
    return path


def seen(**other: Any) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        return open_source(samples(**r.pick({}, other)), ["x"], r.comm).close()

    return call


def written(change: Callable[[], object]) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        samples()
        r.pick(lambda: None, change)()
        return open_source("a.h5", {"x": DatasetLayout("f", (None, 2, None))}, r.comm).close()

    return call


def zeros(name: str, box: tuple[slice, ...], dtype: Any = "f4") -> Any:
    return np.zeros([s.stop - s.start for s in box], dtype)


def fails(name: str, box: tuple[slice, ...]) -> Any:
    raise ValueError("no such sample")


def computed(r: Rank, read: Any = zeros, shape: tuple[int, ...] = (4, 2, 5)) -> BoxFunction:
    return BoxFunction({"x": shape}, read, r.comm)


def column(readers: int) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        path = samples(column=r.pick(np.zeros(4, np.int16), np.zeros(8, np.int8)))
        with open_source(path, ["x"], r.comm, readers=readers) as file:
            return file.column("family")

    return call


def replaced() -> None:
    Path("a.h5").unlink()
    Path("a.h5").mkdir()


DATA: dict[str, Case] = {
    "write: name": (lambda r: dc.write(r.split(counting(4, 6)), "o.zarr", r.pick("x", "y")), "o.zarr: ranks disagree"),
    "write: path": (lambda r: dc.write(r.split(counting(4, 6)), r.pick("o.zarr", "p.zarr"), "x"), "ranks (dis|are at)"),
    "write: ending": (
        lambda r: dc.write(r.split(counting(4, 6)), r.pick("o.zarr", "o.txt"), "x"),
        "ranks (dis|are at)",
    ),
    "write: no name": (
        lambda r: dc.write(r.split(counting(4, 6)), "o.zarr", r.pick("x", "")),
        "o.zarr: ranks disagree",
    ),
    "write: affine": (
        lambda r: dc.write(dc.scatter(counting(1, 4, 3, 6), r.grid), "o.nii", attrs={"affine": [r.pick(1, 2)] * 16}),
        "o.nii: ranks disagree",
    ),
    "gridded: readers": (
        lambda r: open_gridded("a.nc", {"x": ["t"]}, r.comm, readers=1 + r.odd),
        "open_gridded: ranks disagree",
    ),
    "open: path": (lambda r: open_source(r.pick("a.h5", "b.h5"), ["x"], r.comm), "open_source: ranks disagree"),
    "open: paths": (lambda r: open_source(["a.h5", r.pick("b.h5", "c.h5")], ["x"], r.comm), "open_source: ranks dis"),
    "open: one_each": (lambda r: open_source(["a.h5"], ["x"], r.comm, one_each=r.odd), "open_source: ranks disagree"),
    "open: readers": (
        lambda r: open_source(samples(), ["x"], r.comm, readers=1 + r.odd),
        "open_source: ranks disagree",
    ),
    "open: names": (lambda r: open_source(samples(), r.pick(["x"], ["y"]), r.comm), "ranks disagree"),
    "open: no names": (lambda r: open_source(samples(), r.pick(["x"], []), r.comm), "open_source"),
    "open: list of files": (
        lambda r: [samples(), r.odd and samples("b.h5"), open_source("*.h5", ["x"], r.comm)],
        "the files: ranks disagree",
    ),
    "seen: samples": (seen(count=5), "as each rank sees it: ranks disagree"),
    "seen: dtype": (seen(dtype="i4"), "as each rank sees it: ranks disagree"),
    "seen: bytes": (seen(column=np.zeros(4)), "as each rank sees it: ranks disagree"),
    "seen: no file": (written(lambda: Path("a.h5").unlink()), r"a\.h5.*\(on rank"),
    "seen: a folder": (written(replaced), r"a\.h5.*\(on rank"),
    "seen: no HDF5": (written(lambda: Path("a.h5").write_text("text")), r"a\.h5.*\(on rank"),
    "seen: no dataset": (written(lambda: h5py.File("a.h5", "w").close()), r"no dataset 'x'.*\(on rank"),
    "seen: another layout": (written(lambda: samples(dtype="i4")), r"dataset 'x' .*\(on rank"),
    "column": (column(1), r"family.*\(on rank"),
    "column read by processes": (column(2), r"family.*\(on rank"),
    "function: shapes": (lambda r: computed(r, shape=r.pick((4, 2), (5, 2))), "BoxFunction: ranks disagree"),
    "function: dtype": (
        lambda r: computed(r, r.pick(zeros, partial(zeros, dtype="f8"))).dtype("x"),
        "dtype of 'x': ranks disagree",
    ),
    "function: fails": (lambda r: computed(r, r.pick(zeros, fails)).dtype("x"), r"no such sample.*\(on rank"),
    "resizing: sizes": (lambda r: Resized(computed(r), {"x": r.pick((3,), (4,))}), "resizing: ranks disagree"),
    "resizing: nearest": (
        lambda r: Resized(computed(r), {"x": (3,)}, nearest=r.pick((), ("x",))),
        "resizing: ranks disagree",
    ),
    "processes: readers": (lambda r: ReadByProcesses(computed(r), 1 + r.odd), "reading processes: ranks disagree"),
    "processes: a closure": (
        lambda r: ReadByProcesses(computed(r, r.pick(slow, lambda *_: 0)), 1),
        r"cannot be sent to reading processes.*\(on rank",
    ),
    "loader: batch": (loader(batch=3), "Loader: ranks disagree"),
    "loader: no batch": (loader(batch=0), "Loader: ranks disagree"),
    "loader: dataset": (loader(field=Field("y", "nch")), "Loader: ranks disagree"),
    "loader: scale": (loader(field=Field("x", "nch", scale=2)), "Loader: ranks disagree"),
    "loader: seed": (loader(seed=1), "Loader: ranks disagree"),
    "loader: shuffle": (loader(shuffle=False), "Loader: ranks disagree"),
    "loader: drop_last": (loader(drop_last=True), "Loader: ranks disagree"),
    "loader: mirror": (loader(mirror="h"), "Loader: ranks disagree"),
    "loader: transpose": (loader(transpose=True), "Loader: ranks disagree"),
    "loader: crop": (loader(crop={"h": 4}), "Loader: ranks disagree"),
    "loader: epoch": (
        lambda r: next(Loader(computed(r), [FIELD], r.grid, 2).epoch(r.pick(0, 1))),
        "epoch of a Loader: ranks disagree",
    ),
    "loader: step": (
        lambda r: next(Loader(computed(r), [FIELD], r.grid, 2).epoch(0, start=r.pick(0, 1))),
        "epoch of a Loader: ranks disagree",
    ),
    "moments: dataset": (lambda r: moments(computed(r), r.pick("x", "y")), "moments: ranks disagree"),
    "moments: channels": (lambda r: moments(computed(r), "x", channels=not r.odd), "moments: ranks disagree"),
    "moments: fails": (
        lambda r: moments(computed(r, lambda *_: r.pick(zeros, fails)(*_)), "x"),
        r"no such sample.*\(on rank",
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_data(rank: Rank, name: str) -> None:
    check(rank, *DATA[name])
