"""Discovery and opening of the training and test images of a data set.

:class:`distconv.jobs.images.samples.ImageSamples` calls :func:`open_groups`. All ranks check that they have found and
read the same data.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.data.hdf5 import DatasetLayout
from distconv.data.opening import has_group, is_source_path, open_source
from distconv.data.source import SampleSource
from distconv.distribution import Interval
from distconv.errors import DataError

from . import digits
from .formats import read_cifar10, read_idx
from .sources import Arrays

TEN = 10
"""Number of classes of MNIST and CIFAR-10."""
KNOWN_FORMATS = (
    "MNIST (train-images-idx3-ubyte and train-labels-idx1-ubyte), CIFAR-10 (data_batch_1.bin), all of them plain or "
    "compressed (.gz, .xz), HDF5, netCDF and zarr (train.h5, train.nc, train.zarr), and folders of .npy files"
)


@dataclass(frozen=True, eq=False)
class ImageGroup:
    """Images (N, C, H, W) in a dataset of a source, with their labels (N)."""

    source: SampleSource
    dataset: str
    labels: NDArray[np.int64]
    labels_in: str
    classes: int
    """Number of classes of the format, or the largest label plus one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (N, C, H, W)."""
        return (len(self.labels), *self.source.shape(self.dataset)[1:])


@dataclass(frozen=True)
class Files:
    """Files of a group. For ``idx``, the images come first and the labels second."""

    format: Literal["idx", "cifar", "stored"]
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class NumbersLayout(DatasetLayout):
    """Dataset layout that accepts every dtype of the given ``kinds``; ``dtype`` is their description in messages."""

    kinds: str = ""

    def describe_mismatch(self, dtype: np.dtype, shape: tuple[int, ...]) -> str:
        """Return the difference between a dataset and this layout as a phrase for a message.

        Parameters
        ----------
        dtype : dtype
            Data type of the dataset.
        shape : tuple of int
            Shape of the dataset.

        Returns
        -------
        str
            The phrase; empty if the dataset fits.
        """
        if dtype.kind in self.kinds and len(shape) == len(self.shape):
            return ""
        return f"is {dtype} {shape} but must be {self.dtype} {'(N, C, H, W)' if len(self.shape) == 4 else '(N)'}"


IMAGE = NumbersLayout("numbers", (None,) * 4, kinds="uif")
LABEL = NumbersLayout("whole numbers", (None,), kinds="ui")


def open_groups(
    path: Path, test_path: Path | None, names: tuple[str, str], comm: MPI.Intracomm, readers: int = 1
) -> dict[str, ImageGroup]:
    """Open the training images and, if there are any, the test images. Collective: call on every rank.

    Parameters
    ----------
    path, test_path, names, comm, readers
        As in :class:`distconv.jobs.images.samples.ImageSamples`.

    Returns
    -------
    dict of str to ImageGroup
        ``train`` and, if there are test images, ``test``.

    Raises
    ------
    DataError
        On all ranks, if files are missing or invalid.
    MismatchError
        If ranks find or read different data.
    """
    check_same_on_all_ranks(comm, "image data", f"{path}, {test_path}, {names}")
    try_on_all_ranks(comm, lambda: _check_exists(path), DataError)
    if str(path) == digits.NAME and not path.exists():
        embedded = {group: digits.render_digits(group) for group in digits.COUNT}
        return {
            group: ImageGroup(
                Arrays(Path(digits.NAME), comm, image=images.pixels), "image", images.labels, digits.NAME, TEN
            )
            for group, images in embedded.items()
        }
    train, test = try_on_all_ranks(
        comm, lambda: (locate_files(path, "train"), locate_files(test_path or path, "test")), DataError
    )
    # The collective calls below depend on the files found, which must therefore be the same on all ranks.
    check_same_on_all_ranks(comm, f"the image files of {path}", f"{train}, {test}", "let every rank see the same files")
    if train is None:
        raise DataError(f"{path}: no training images found. Use {KNOWN_FORMATS}.")
    # One file may hold both groups. If it has no group ``test``, its images are training images only.
    if test == train and not has_group(test.paths[0], "test", comm):
        test = None
    if test is None and test_path is not None:
        raise DataError(f"{test_path}: no test images found. Use {KNOWN_FORMATS}.")
    groups = {"train": _open(train, "train", names, comm, readers)}
    if test is not None:
        groups["test"] = _open(test, "test", names, comm, readers)
    return groups


def _check_exists(path: Path) -> None:
    if str(path) != digits.NAME and not path.exists() and not is_source_path(path):
        raise DataError(
            f"{path}: no such file or folder. Use {KNOWN_FORMATS}, or --data {digits.NAME}, which needs no file."
        )


def locate_files(path: Path, group: str) -> Files | None:
    """Return the files of ``train`` or ``test`` in a folder, or the file that ``path`` itself is.

    Parameters
    ----------
    path : Path
        A folder, or a file.
    group : str
        ``train`` or ``test``.

    Returns
    -------
    Files, optional
        None if a folder has no such files.

    Raises
    ------
    DataError
        If there are images without labels.
    """
    if is_source_path(path):
        return Files("stored", (path,))
    if not path.is_dir():
        cifar = re.search(r"\.bin(\.gz|\.xz)?$", path.name)
        return Files("cifar" if cifar else "stored", (path,))
    prefix, batches = {"train": ("train", r"data_batch_\d+"), "test": ("t10k", "test_batch")}[group]
    if images := _matching(path, rf"({prefix}-images[-.]idx3-ubyte)(\.gz|\.xz)?"):
        labels = _matching(path, rf"({prefix}-labels[-.]idx1-ubyte)(\.gz|\.xz)?")
        if not labels:
            raise DataError(
                f"{path}: found {images[0].name} but no {prefix}-labels-idx1-ubyte. Put the labels into the same "
                "folder."
            )
        return Files("idx", (images[0], labels[0]))
    if paths := _matching(path, rf"({batches}\.bin)(\.gz|\.xz)?"):
        return Files("cifar", paths)
    paths = _matching(path, rf"({group})\.(h5|hdf5|nc|zarr)")
    return Files("stored", paths[:1]) if paths else None


def _matching(folder: Path, pattern: str) -> tuple[Path, ...]:
    """Return the files whose name matches, sorted, one for each value of the pattern's first group."""
    matching: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        match = re.fullmatch(pattern, path.name)
        if match:
            matching.setdefault(match[1], path)
    return tuple(matching.values())


def _open(files: Files, group: str, names: tuple[str, str], comm: MPI.Intracomm, readers: int) -> ImageGroup:
    if files.format == "stored":
        return _stored_group(files.paths[0], group, names, comm, readers)
    return _decoded(files, comm)


def _decoded(files: Files, comm: MPI.Intracomm) -> ImageGroup:
    """Read MNIST or CIFAR-10 files. Each rank reads them completely: a compressed stream has no random access."""
    read = (lambda: read_idx(*files.paths)) if files.format == "idx" else (lambda: read_cifar10(files.paths))
    images = try_on_all_ranks(comm, read, DataError)
    digest = hashlib.blake2b(np.ascontiguousarray(images.pixels).data, digest_size=8)
    digest.update(images.labels.data)
    check_same_on_all_ranks(
        comm, f"{files.paths[0]} as each rank sees it", f"{images.pixels.shape}, digest {digest.hexdigest()}"
    )
    source = Arrays(files.paths[0], comm, image=images.pixels)
    return ImageGroup(source, "image", images.labels, str(files.paths[-1]), TEN)


def _stored_group(path: Path, group: str, names: tuple[str, str], comm: MPI.Intracomm, readers: int) -> ImageGroup:
    grouped = has_group(path, group, comm)
    image, label = (f"{group}/{name}" if grouped else name for name in names)
    file = open_source(path, {image: IMAGE, label: LABEL}, comm, readers=readers)
    count = file.shape(label)[0]
    if not count:
        raise DataError(f"{path}: dataset {image!r} has no images")
    labels = try_on_all_ranks(comm, lambda: file.read(label, (Interval(0, count),)).astype(np.int64), DataError)
    digest = hashlib.blake2b(labels.data, digest_size=8).hexdigest()
    check_same_on_all_ranks(comm, f"{path} as each rank sees it", f"digest of {label!r} {digest}")
    return ImageGroup(file, image, labels, f"{path}: {label!r}", int(labels.max()) + 1)
