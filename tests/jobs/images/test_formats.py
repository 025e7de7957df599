"""Images are read from the files of MNIST and CIFAR-10, plain or compressed."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.images.formats import read_cifar10, read_idx
from distconv.jobs.images.groups import locate
from tests.jobs.images import image_files
from tests.jobs.images.image_files import arrays, put, records

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_idx_files_are_read_plain_or_compressed(tmp_path: Path, ending: str) -> None:
    image_files.write_mnist(tmp_path, 9, 3, ending)
    for group, count in (("train", 9), ("test", 3)):
        files = locate(tmp_path, group)
        assert files is not None
        found = read_idx(*files.paths)
        images, labels = arrays(count, (1, 28, 28))
        assert np.array_equal(found.pixels, images)
        assert np.array_equal(found.labels, labels)


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_cifar_batches_are_read_one_after_the_other(tmp_path: Path, ending: str) -> None:
    image_files.write_cifar(tmp_path, 8, 3, ending)
    put(tmp_path / "data_batch_1_other.bin", b"not one of them")
    files = locate(tmp_path, "train")
    assert files is not None
    assert [path.name for path in files.paths] == [f"data_batch_{i}.bin{ending}" for i in (1, 2)]
    found = read_cifar10(files.paths)
    images, labels = arrays(8, (3, 32, 32))
    assert np.array_equal(found.pixels, images)
    assert np.array_equal(found.labels, labels)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_the_real_files_hold_what_their_authors_say() -> None:
    counts = {}
    for group in ("train", "test"):
        files = locate(DATA / "mnist", group)
        assert files is not None
        counts[group] = np.bincount(read_idx(*files.paths).labels).tolist()
    assert counts["train"] == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert counts["test"] == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    files = locate(DATA / "cifar10", "test")
    assert files is not None
    assert np.bincount(read_cifar10(files.paths).labels).tolist() == [200] * 10


def test_a_checksum_of_xz_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1.bin.xz"
    content = bytearray(lzma.compress(records(*arrays(4, (3, 32, 32)))))
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="truncated or damaged"):
        read_cifar10([path])
