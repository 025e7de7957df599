"""Samples behind an address are those of the path, bit for bit; what cannot be had is one error on all ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import distconv as dc
from distconv.data import Field, Loader, SampleFile, open_source
from distconv.data.address import BLOCK_BYTES, Url, parse_location
from distconv.errors import DataError
from tests.distconv.data import stored_samples
from tests.distconv.data.file_server import serving
from tests.distconv.data.sample_files import common
from tests.distconv.data.stored_samples import arrays

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
pytestmark = pytest.mark.ranks(at_most=2)

FIELDS = (Field("image", "nchw", shift=np.ones(3), scale=np.full(3, 2.0)), Field("label", "nhw"))


@pytest.fixture
def served(comm: Any, shared_tmp_path: Path) -> Iterator[str]:
    """The folder over HTTP, from rank 0."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serving(shared_tmp_path))[0] if comm.rank == 0 else None
        yield comm.bcast(address)
        comm.Barrier()


def written(comm: Any, folder: Path, layout: str) -> Any:
    path = stored_samples.write(folder / layout, layout) if comm.rank == 0 else None
    return comm.bcast(path)


def batches(source: Any, comm: Any) -> list[Any]:
    loader = Loader(source, FIELDS, dc.ProcessGrid(comm, h=comm.size), 2, seed=5, mirror="w", crop={"h": 11, "w": 13})
    seen = [[tensor.local.numpy().copy() for tensor in batch.tensors] for batch in loader.epoch(1)]
    source.check_unchanged()
    source.close()
    return seen


def zipped(comm: Any, path: Path) -> str:
    archive = path.with_suffix(".zip")
    if comm.rank == 0:
        with zipfile.ZipFile(archive, "w") as file:
            for each in [path, *path.rglob("*")]:
                if each.is_file():
                    file.write(each, each.relative_to(path.parent))
    comm.Barrier()
    return f"zip://{path.name}::file://{archive}"


@pytest.mark.long
@pytest.mark.parametrize(("layout", "readers"), [("netcdf", 1), ("hdf5-list", 2), ("zarr-v3", 1)])
def test_batches_are_those_of_the_path(
    comm: Any, shared_tmp_path: Path, served: str, layout: str, readers: int
) -> None:
    path = written(comm, shared_tmp_path, layout)
    many = isinstance(path, list)

    def over(begin: str, name: Callable[[Path], object]) -> Any:
        return [f"{begin}{name(each)}" for each in path] if many else f"{begin}{name(path)}"

    ways = [over("file://", str), over(f"{served}/", lambda each: each.relative_to(shared_tmp_path))]
    if not many:
        ways += [zipped(comm, path)]
    expected = batches(open_source(path, ["image", "label"], comm), comm)
    assert len(expected) == 4
    for way in ways:
        for batch, other in zip(
            batches(open_source(way, ["image", "label"], comm, readers=readers), comm), expected, strict=True
        ):
            assert all(map(np.array_equal, batch, other))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("layout", ["hdf5", "zarr-v3"])
def test_the_chunks_that_a_box_touches_are_sent_and_no_others(
    comm: Any, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_samples, "HEIGHT", 512)
    monkeypatch.setattr(stored_samples, "WIDTH", 512)
    monkeypatch.setattr(stored_samples, "SAMPLES", 3)
    monkeypatch.setattr(stored_samples, "TILE", (1, 3, 256, 256))
    path = stored_samples.write(tmp_path / layout, layout)
    with serving(path.parent) as (address, sent), open_source(f"{address}/{path.name}", ["image"], comm) as source:
        sent.clear()
        box = tuple(dc.Interval(*each) for each in ((1, 2), (0, 3), (10, 200), (200, 300)))
        assert np.array_equal(source.read("image", box), arrays()["image"][1:2, :, 10:200, 200:300])
        chunk = 3 * 256 * 256 * 4
        total = sum(count for _, count in sent)
        assert 1.8 * chunk < total <= 2 * (chunk + BLOCK_BYTES) + 4 * BLOCK_BYTES, sent


def refused(path: Any, comm: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_source(path, ["image", "label"], comm, **options)
    return common(comm, caught.value)


def test_what_cannot_be_had_is_an_error_with_a_reason(comm: Any, shared_tmp_path: Path, served: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    closed = comm.bcast(f"http://127.0.0.1:{port}")
    for name in ("samples.h5", "samples.zarr", "samples.nc", "samples"):
        text = refused(f"{closed}/{name}", comm)
        assert f"{closed}/{name} cannot be read" in text and "ClientConnectorError: Cannot connect" in text
        assert "404" in refused(f"{served}/{name}", comm)
    assert "Cannot connect" in refused([f"{closed}/{index}.h5" for index in range(3)], comm)
    assert "Protocol not known: nowhere" in refused("nowhere://a/b.h5", comm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "s3fs", None)
        assert "s3://a/b.h5 cannot be read: ImportError: Install s3fs" in refused("s3://a/b.h5", comm)
    assert "patterns are not supported in URLs" in refused("s3://bucket/*.h5", comm)
    assert "reads files that its index names" in refused("reference://::file:///a.json", comm)
    assert ".npy files are mapped into memory, from paths alone" in refused(f"{served}/image.npy", comm)
    with pytest.raises(DataError, match="reads files that its index names"):
        SampleFile("reference://::file:///a.json", ["image"], comm)


def test_virtual_datasets_and_other_things_than_hdf5_are_refused(comm: Any, shared_tmp_path: Path, served: str) -> None:
    written(comm, shared_tmp_path, "virtual")
    if comm.rank == 0:
        (shared_tmp_path / "text.h5").write_text("no HDF5")
        with h5py.File(shared_tmp_path / "link.h5", "w") as file:
            for name in ("image", "label"):
                file[name] = h5py.ExternalLink(str(shared_tmp_path / "virtual" / "part0.h5"), name)
    comm.Barrier()
    assert "lies in other files. Copy it into this one" in refused(f"{served}/virtual/whole.h5", comm)
    assert "lies in other files. Copy it into this one" in refused(f"{served}/link.h5", comm)
    assert "cannot be opened as HDF5" in refused(f"{served}/text.h5", comm)


def test_a_server_without_ranges_is_named(comm: Any, shared_tmp_path: Path) -> None:
    path = written(comm, shared_tmp_path, "hdf5")
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serving(path.parent, ranges=False))[0] if comm.rank == 0 else None
        assert "cannot be read: ValueError: Cannot seek" in refused(f"{comm.bcast(address)}/{path.name}", comm)
        comm.Barrier()


@pytest.mark.long
@pytest.mark.parametrize(("layout", "readers"), [("hdf5", 1), ("zarr-v3", 1)])
def test_a_server_that_is_gone_is_an_error_of_its_batch(
    comm: Any, shared_tmp_path: Path, layout: str, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_samples, "HEIGHT", 256)
    monkeypatch.setattr(stored_samples, "WIDTH", 256)
    monkeypatch.setattr(stored_samples, "TILE", (1, 3, 64, 64))
    path = written(comm, shared_tmp_path, layout)
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serving(path.parent))[0] if comm.rank == 0 else None
        source = open_source(f"{comm.bcast(address)}/{path.name}", ["image", "label"], comm, readers=readers)
        steps = Loader(source, FIELDS, dc.ProcessGrid(comm, h=comm.size), 1).epoch(0)
        next(steps)
        comm.Barrier()
    comm.Barrier()
    with pytest.raises(DataError) as caught:
        list(steps)
    assert "cannot read [" in common(comm, caught.value)
    source.close()


@pytest.mark.parametrize("layout", ["hdf5", "zarr-v3"])
def test_a_change_of_what_is_there_ends_the_next_epoch(
    comm: Any, shared_tmp_path: Path, served: str, layout: str
) -> None:
    path = written(comm, shared_tmp_path, layout)
    for address in (f"{served}/{layout}/{path.name}", zipped(comm, path)):
        source = open_source(address, ["image", "label"], comm)
        source.check_unchanged()
        comm.Barrier()
        if comm.rank == 0:
            changed = path if layout == "hdf5" else path / "image" / "zarr.json"
            os.utime(changed, (2e9, 2e9))
        zipped(comm, path)
        with pytest.raises(DataError, match=r"has been written to since it was opened"):
            source.check_unchanged()
        source.close()


@pytest.mark.ranks(1)
def test_files_in_memory_are_of_one_process(comm: Any, tmp_path: Path) -> None:
    import fsspec

    path = stored_samples.write(tmp_path / "hdf5", "hdf5")
    fsspec.filesystem("memory").pipe("/samples.h5", path.read_bytes())
    expected = batches(open_source(path, ["image", "label"], comm), comm)
    for batch, other in zip(
        batches(open_source("memory://samples.h5", ["image", "label"], comm), comm), expected, strict=True
    ):
        assert all(map(np.array_equal, batch, other))
    assert "memory://samples.h5 cannot be read: FileNotFoundError" in refused("memory://samples.h5", comm, readers=2)


@pytest.mark.ranks(1)
def test_no_collection_starts_while_a_file_is_read(tmp_path: Path) -> None:
    path = stored_samples.write(tmp_path / "hdf5", "hdf5")
    with serving(path.parent) as (address, _):
        file = Url(f"{address}/{path.name}").open()
        states = []
        readinto = file._file.readinto
        file._file.readinto = lambda into: (states.append(gc.isenabled()), readinto(into))[1]
        assert file.readinto(memoryview(bytearray(8))) == 8
        assert states == [False] and gc.isenabled()
        assert threading.active_count() >= 2
        file.close()


@pytest.mark.ranks(1)
def test_without_fsspec_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    for read in (Url.is_file, Url.state, Url.open):
        with pytest.raises(DataError, match=r"^memory://a\.h5: fsspec is not installed: pip install"):
            read(Url("memory://a.h5"))


@pytest.mark.ranks(1)
def test_which_texts_are_addresses() -> None:
    assert parse_location("a::b.h5") == Path("a::b.h5") and parse_location("c:/b.h5") == Path("c:/b.h5")
    assert parse_location("file:///a/b.h5") == Path("/a/b.h5") and parse_location(Path("a")) == Path("a")
    assert parse_location("file://a/b.zarr") == parse_location("local://a/b.zarr") == Path("a/b.zarr")
    assert isinstance(parse_location("zip://b.zarr::file:///a/b.zip"), Url)
    with pytest.raises(DataError, match=r"simplecache of a file of this machine is not supported\. Give"):
        parse_location("simplecache::file:///a/b.zarr")
    address = parse_location("simplecache::s3://a/b.zarr")
    assert isinstance(address, Url) and parse_location(address) is address and address.absolute() is address
    assert str(Url("zip://::s3://a/b.zip") / "zarr.json") == "zip://zarr.json::s3://a/b.zip"
    assert str(Url("s3://a/b.zarr") / "x") == "s3://a/b.zarr/x"
    assert Url("https://a/b.nc?token=c.h5").suffix == ".nc"
