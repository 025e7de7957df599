"""One rank alone sees other images: the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

from distconv.jobs.images.groups import open_groups
from tests.distconv.one_rank_alone import Case, Rank, check
from tests.jobs.images.image_files import write_cifar, write_hdf5, write_mnist

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(30)]

NAMES = ("image", "label")


def opened(usual: Callable[[Path], Any], other: Callable[[Path], Any], name: str = "data") -> Callable[[Rank], object]:
    """Open what each rank finds below its own folder."""

    def call(r: Rank) -> object:
        r.pick(usual, other)(Path(name))
        return open_groups(Path(name), None, NAMES, r.comm)

    return call


def plain(folder: Path) -> None:
    folder.mkdir()
    write_mnist(folder, ending="")


def batches(folder: Path) -> None:
    folder.mkdir()
    write_cifar(folder)


def truncated(folder: Path) -> None:
    plain(folder)
    images = next(folder.glob("train-images*"))
    images.write_bytes(images.read_bytes()[:-1])


def recoloured(folder: Path) -> None:
    plain(folder)
    images = next(folder.glob("train-images*"))
    content = bytearray(images.read_bytes())
    content[-1] ^= 1
    images.write_bytes(content)


def relabelled(folder: Path) -> None:
    plain(folder)
    labels = next(folder.glob("train-labels*"))
    content = bytearray(labels.read_bytes())
    content[-1] = (content[-1] + 1) % 10
    labels.write_bytes(content)


def changed(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["train/label"][2] += 1


CASES: dict[str, Case] = {
    "path": (lambda r: open_groups(Path(r.pick("a", "b")), None, NAMES, r.comm), "image data: ranks disagree"),
    "test path": (
        lambda r: open_groups(Path("a"), Path(r.pick("a", "b")), NAMES, r.comm),
        "image data: ranks disagree",
    ),
    "names": (
        lambda r: open_groups(Path("a"), None, ("image", r.pick("label", "class")), r.comm),
        "image data: ranks disagree",
    ),
    "nothing there": (opened(plain, lambda folder: None), r"data: no such file or folder.*\(on rank"),
    "no labels": (
        opened(plain, lambda folder: [plain(folder), *(path.unlink() for path in folder.glob("train-labels*"))]),
        r"no train-labels.*\(on rank",
    ),
    "no images": (opened(plain, Path.mkdir), "the image files of data: ranks disagree"),
    "a pixel": (opened(plain, recoloured), "as each rank sees it: ranks disagree"),
    "a label": (opened(plain, relabelled), "as each rank sees it: ranks disagree"),
    "count": (
        opened(plain, lambda folder: [folder.mkdir(), write_mnist(folder, train=41, ending="")]),
        "as each rank sees it: ranks disagree",
    ),
    "a truncated file": (opened(plain, truncated), r"train-images.*\(on rank"),
    "a damaged file of batches": (
        opened(batches, lambda folder: [batches(folder), next(folder.glob("data*")).write_bytes(b"1234")]),
        r"data_batch.*\(on rank",
    ),
    "count in a stored file": (
        opened(
            lambda path: write_hdf5(path, {"train": 5}), lambda path: write_hdf5(path, {"train": 6}), name="data.h5"
        ),
        "as each rank sees it: ranks disagree",
    ),
    "a label in a stored file": (
        opened(
            lambda path: write_hdf5(path, {"train": 5}),
            lambda path: [write_hdf5(path, {"train": 5}), changed(path)],
            name="data.h5",
        ),
        "as each rank sees it: ranks disagree",
    ),
    "no groups in a stored file": (
        opened(lambda path: write_hdf5(path, {"train": 5}), lambda path: write_hdf5(path, {"": 5}), name="data.h5"),
        r"data\.h5",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_is_raised_on_all_ranks(rank: Rank, name: str) -> None:
    check(rank, *CASES[name])
