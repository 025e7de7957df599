"""Images are read from the files of MNIST and CIFAR-10, plain or compressed."""

from __future__ import annotations

import gzip
import lzma
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.images import formats
from distconv.jobs.images.formats import read_cifar10, read_idx
from distconv.jobs.images.groups import locate_files
from tests.jobs.images import image_files
from tests.jobs.images.image_files import arrays, put, records


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_idx_files_are_read_plain_or_compressed(tmp_path: Path, ending: str) -> None:
    image_files.write_mnist(tmp_path, 9, 3, ending)
    for group, count in (("train", 9), ("test", 3)):
        files = locate_files(tmp_path, group)
        assert files is not None
        found = read_idx(*files.paths)
        images, labels = arrays(count, (1, 28, 28))
        assert np.array_equal(found.pixels, images)
        assert np.array_equal(found.labels, labels)


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_cifar_batches_are_read_one_after_the_other(tmp_path: Path, ending: str) -> None:
    image_files.write_cifar(tmp_path, 8, 3, ending)
    put(tmp_path / "data_batch_1_other.bin", b"not one of them")
    files = locate_files(tmp_path, "train")
    assert files is not None
    assert [path.name for path in files.paths] == [f"data_batch_{i}.bin{ending}" for i in (1, 2)]
    found = read_cifar10(files.paths)
    images, labels = arrays(8, (3, 32, 32))
    assert np.array_equal(found.pixels, images)
    assert np.array_equal(found.labels, labels)


def test_a_checksum_of_xz_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1.bin.xz"
    content = bytearray(lzma.compress(records(*arrays(4, (3, 32, 32)))))
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="truncated or damaged"):
        read_cifar10([path])


@pytest.mark.long
@pytest.mark.fault(80)
@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
@pytest.mark.parametrize("honest", [True, False])
def test_files_that_claim_or_hold_far_more_than_they_are_cost_no_memory(
    tmp_path: Path, ending: str, honest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kB, and 40 MiB of zeros behind a header that says so, or says ten images."""
    monkeypatch.setattr(formats, "SMALL_BYTES", 1 << 20)
    header = struct.pack(">4I", 0x803, (40 << 20) // 784 if honest else 10, 28, 28)
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[ending]
    path = tmp_path / f"images{ending}"
    path.write_bytes(pack(header + bytes(40 << 20 if ending else 9000)))
    if honest and not ending:
        os.truncate(path, 2 << 30)
    (tmp_path / "labels").write_bytes(struct.pack(">2I", 0x801, 1) + b"1")
    why = (
        r"too large when decompressed .*more than \d+ decompressed.*, since each rank"
        if honest
        else r"10 x 28 x 28 images \(7840 bytes\), but more follow"
    )
    tracemalloc.start()
    with pytest.raises(DataError, match=why):
        read_idx(tmp_path / f"images{ending}", tmp_path / "labels")
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@pytest.mark.long
@pytest.mark.fault(80)
def test_an_xz_file_that_asks_for_much_memory_or_ends_early_is_refused(tmp_path: Path) -> None:
    whole = records(*arrays(4, (3, 32, 32)))
    large = lzma.compress(whole, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}])
    for content in (large, lzma.compress(whole)[:-40]):
        (tmp_path / "data_batch_1.bin.xz").write_bytes(content)
        with pytest.raises(DataError, match=r"truncated or damaged .*: (Memory usage limit|Compressed file ended)"):
            read_cifar10([tmp_path / "data_batch_1.bin.xz"])


@pytest.mark.fault(80)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data_batch_1.bin")
    with pytest.raises(OSError, match="is not a regular file"):
        read_cifar10([tmp_path / "data_batch_1.bin"])
