"""Training and test images are found in every layout, and bad files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from distconv.errors import DataError, MismatchError
from distconv.jobs.images import groups
from distconv.jobs.images.groups import locate_files
from distconv.jobs.images.samples import ImageSamples
from tests.distconv.data.sample_files import flip_bit
from tests.jobs.images import image_files
from tests.jobs.images.image_files import arrays, idx, put, records, written


def test_of_a_plain_and_a_compressed_copy_one_is_read(tmp_path: Path) -> None:
    image_files.write_cifar(tmp_path, ending="")
    image_files.write_cifar(tmp_path, ending=".xz")
    files = locate_files(tmp_path, "train")
    assert files is not None
    assert [path.name for path in files.paths] == ["data_batch_1.bin", "data_batch_2.bin"]


@pytest.mark.ranks(2)
def test_hdf5_images_lie_in_groups_in_two_files_or_in_a_folder(comm: Any, shared_tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        image_files.write_hdf5(folder / "both.h5", {"train": 6, "test": 4})
        image_files.write_hdf5(folder / "train.h5", {"": 6})
        image_files.write_hdf5(folder / "test.hdf5", {"": 4})

    folder = written(comm, shared_tmp_path, write)
    images, labels = arrays(4, (2, 28, 28))
    for path, test_path in (
        (folder / "both.h5", None),
        (folder / "train.h5", folder / "test.hdf5"),
        (folder, None),
        (folder / "train.h5", folder / "both.h5"),
    ):
        samples = ImageSamples(path, comm, test_path=test_path)
        assert samples.groups["train"].shape == (6, 2, 28, 28)
        assert np.array_equal(samples.groups["test"].labels, labels)
        assert np.array_equal(samples.image("test", 3), images[3])
        samples.close()
    samples = ImageSamples(folder / "train.h5", comm)
    assert list(samples.groups) == ["train"]
    samples.close()


@pytest.mark.ranks(2)
def test_images_in_zarr_are_those_of_hdf5(comm: Any, shared_tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")

    def write(folder: Path) -> None:
        for group, count in (("train", 6), ("test", 4)):
            images, labels = arrays(count, (2, 28, 28))
            root = zarr.open_group(folder / "images.zarr", mode="a")
            root.create_array(f"{group}/image", data=images, chunks=(1, 2, 7, 7))
            root.create_array(f"{group}/label", data=labels)

    samples = ImageSamples(written(comm, shared_tmp_path, write) / "images.zarr", comm, readers=2)
    images, labels = arrays(4, (2, 28, 28))
    assert np.array_equal(samples.groups["test"].labels, labels) and samples.groups["train"].shape == (6, 2, 28, 28)
    assert np.array_equal(samples.image("test", 3), images[3])
    assert samples.moments.mean[0] == pytest.approx(arrays(6, (2, 28, 28))[0][:, 0].mean(), rel=1e-12)
    samples.close()


def test_images_are_read_by_as_many_processes_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_files.write_hdf5(tmp_path / "train.h5", {"": 3})
    given: list[int] = []
    opened = groups.open_source
    monkeypatch.setattr(groups, "open_source", lambda *args, readers=0: (given.append(readers), opened(*args))[1])
    for readers in (0, 2):
        ImageSamples(tmp_path / "train.h5", MPI.COMM_SELF, readers=readers)
    assert given == [0, 2]


TRAIN, LABELS, CIFAR = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", (3, 32, 32)
LETTERS, ANSWERS = arrays(40, (1, 28, 28))
TWO_WRONG = arrays(21, (1, 28, 28))[1]
TWO_WRONG[[4, 9]] = 10
PHOTOS, KINDS = arrays(3, CIFAR)


def holding(name: str, content: bytes) -> Any:
    """Replace the content of a file, compressed as its ending says."""
    return lambda folder: put(folder / name, content)


def changed(name: str, change: Any) -> Any:
    """Change the bytes of a file."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def change(name: str, values: Any) -> Any:
    """Replace a dataset of x.h5."""

    def damage(folder: Path) -> None:
        with h5py.File(folder / "x.h5", "r+") as file:
            del file[name]
            file[name] = values

    return damage


MNIST_FILES = [
    (
        changed(TRAIN, lambda content: content[:-900]),
        r"train-images-idx3-ubyte.gz: truncated or damaged \(\d+ bytes\): .* Download it again",
    ),
    (
        holding(TRAIN, idx(LETTERS[:, 0])[:-784]),
        r"the header announces 40 x 28 x 28 images \(31360 bytes\), but 30576 follow. Download it again",
    ),
    (
        holding("t10k-images-idx3-ubyte.gz", b"\0\0\x08\x03\0\0"),
        "t10k-images-idx3-ubyte.gz: not an idx file of images .6 bytes.",
    ),
    (holding(TRAIN, idx(ANSWERS)), "the magic number is 0x00000801, but that of idx images is 0x00000803"),
    (
        holding(LABELS, b"\0\0\x08\x01\xff\xff\xff\xff" + bytes(40)),
        r"the header announces 4294967295 labels \(4294967295 bytes\), but 40 follow",
    ),
    (
        holding(LABELS, idx(ANSWERS[:39])),
        "images-idx3-ubyte.gz: 40 images, but .*labels-idx1-ubyte.gz has 39 labels. Use files of",
    ),
    (
        holding("t10k-labels-idx1-ubyte.gz", idx(TWO_WRONG)),
        r"t10k-labels-idx1-ubyte.gz: 2 of 21 labels are not in 0 to 9; the first is 10, of sample 4",
    ),
    (lambda folder: (folder / LABELS).unlink(), "found train-images-idx3-ubyte.gz but no train-labels-idx1-ubyte"),
    (
        lambda folder: [path.unlink() for path in folder.iterdir()],
        r"no training images found. Use MNIST \(train-images-idx3-ubyte",
    ),
]
CIFAR_FILES = [
    (
        holding("data_batch_2.bin.xz", records(PHOTOS, KINDS)[:-100]),
        r"data_batch_2.bin.xz: not a whole number of CIFAR-10 records of 3073 bytes \(9119 bytes, 2.97 records\)",
    ),
    (changed("test_batch.bin.xz", lambda content: content[:-40]), "test_batch.bin.xz: truncated or damaged"),
    (
        changed("data_batch_1.bin.xz", lambda content: b"x" + content[1:]),
        "data_batch_1.bin.xz: truncated or damaged .*: Input format not supported",
    ),
    (holding("data_batch_2.bin.xz", records(PHOTOS, KINDS + 200)), "3 of 15 labels are not in 0 to 9"),
]
HDF5_FILES = [
    (change("train/image", np.zeros((6, 28, 28))), r"is float64 \(6, 28, 28\) but must be numbers \(N, C"),
    (change("train/label", np.zeros(6)), r"'train/label' is float64 \(6,\) but must be whole numbers \(N\)"),
    (change("train/label", np.zeros(5, int)), "numbers of samples differ: 6 in .*, 5 in 'train/label'"),
    (change("train/label", np.arange(6) - 1), "1 of 6 labels are not in 0 to 4; the first is -1, of sam"),
    (change("test/label", np.full(4, 12)), "x.h5: 'test/label': 4 of 4 labels are not in 0 to 5"),
    (
        change("test/image", np.zeros((4, 2, 28, 27))),
        r"the shape of the images is \(2, 28, 27\), but that of the training images",
    ),
    (change("train/image", np.full((6, 2, 28, 28), np.nan)), "NaN or infinite values in 6 samples"),
    (lambda folder: flip_bit(folder / "x.h5", "train/image", 3), "of dataset 'train/image'"),
    (lambda folder: (folder / "x.h5").unlink(), "x.h5: no such file or folder"),
    (lambda folder: (folder / "x.h5").write_bytes(b"no HDF5"), "cannot be opened as HDF5"),
]


@pytest.mark.fault(38)
@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        *(("", *each) for each in MNIST_FILES),
        *(("cifar", *each) for each in CIFAR_FILES),
        *(("x.h5", *each) for each in HDF5_FILES),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, damage: Any, reason: str) -> None:
    """By one rank; test_one_rank_alone.py shows that all ranks raise the same error."""
    if name == "x.h5":
        image_files.write_hdf5(tmp_path / name, {"train": 6, "test": 4})
    else:
        (image_files.write_cifar if name else image_files.write_mnist)(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=reason) as caught:
        ImageSamples(tmp_path / (name if name == "x.h5" else ""), MPI.COMM_SELF)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.ranks(2)
def test_ranks_that_see_other_images_are_told(comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_files.write_mnist(tmp_path)
    if comm.rank == 1:  # a stale copy on another node
        images = arrays(40, (1, 28, 28))[0]
        images[7, 0, 3, 3] ^= 1
        put(tmp_path / "train-images-idx3-ubyte.gz", idx(images[:, 0]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MismatchError, match=r"idx3-ubyte\.gz as each rank sees it: ranks disagree"):
        ImageSamples(Path(), comm)
