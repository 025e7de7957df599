"""One data set in all layouts that a source has, and functions for reading processes; no distconv is imported here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np

SAMPLES, CHANNELS, HEIGHT, WIDTH = 7, 3, 24, 20
TILE = (1, CHANNELS, 4, 4)
LAYOUTS = ("hdf5", "zarr-v2", "zarr-v3", "netcdf", "hdf5-list", "hdf5-one-each", "virtual", "npy")


def arrays() -> dict[str, Any]:
    """Images (N, C, H, W) and label maps (N, H, W)."""
    random = np.random.default_rng(11)
    image = random.standard_normal((SAMPLES, CHANNELS, HEIGHT, WIDTH)).astype(np.float32)
    return {"image": image, "label": random.integers(0, 5, (SAMPLES, HEIGHT, WIDTH)).astype(np.uint8)}


def chunks_of(values: Any) -> tuple[int, ...]:
    return (*TILE[: values.ndim - 2], *TILE[2:])


def write(folder: Path, layout: str) -> Any:
    """Write the arrays; what ``open_source`` is asked for."""
    folder.mkdir()
    return {
        "hdf5": _hdf5,
        "zarr-v2": lambda folder: _zarr(folder, 2),
        "zarr-v3": lambda folder: _zarr(folder, 3),
        "netcdf": _netcdf,
        "hdf5-list": _hdf5_list,
        "hdf5-one-each": _hdf5_one_each,
        "virtual": _virtual,
        "npy": _npy,
    }[layout](folder)


def _hdf5_file(path: Path, contents: dict[str, Any], one: bool = False) -> None:
    with h5py.File(path, "w") as file:
        for name, values in contents.items():
            chunks = chunks_of(values[None])[1:] if one else chunks_of(values)
            file.create_dataset(name, data=values, chunks=chunks)


def _hdf5(folder: Path) -> Path:
    _hdf5_file(folder / "samples.h5", arrays())
    return folder / "samples.h5"


def _zarr(folder: Path, version: int) -> Path:
    import zarr

    group = zarr.open_group(folder / "samples.zarr", mode="w", zarr_format=version)
    for name, values in arrays().items():
        group.create_array(name, data=values, chunks=chunks_of(values))
    return folder / "samples.zarr"


def _netcdf(folder: Path) -> Path:
    import xarray

    dims = {"image": ("n", "c", "y", "x"), "label": ("n", "y", "x")}
    data = xarray.Dataset({name: (dims[name], values) for name, values in arrays().items()})
    encoding = {name: {"chunksizes": chunks_of(data[name])} for name in dims}
    data.to_netcdf(folder / "samples.nc", engine="h5netcdf", encoding=encoding)
    return folder / "samples.nc"


def _parts() -> list[slice]:
    return [slice(0, 3), slice(3, 4), slice(4, SAMPLES)]


def _hdf5_list(folder: Path) -> list[Path]:
    for index, part in enumerate(_parts()):
        _hdf5_file(folder / f"part{index}.h5", {name: values[part] for name, values in arrays().items()})
    return sorted(folder.iterdir())


def _hdf5_one_each(folder: Path) -> str:
    for sample in range(SAMPLES):
        contents = {name: values[sample] for name, values in arrays().items()}
        _hdf5_file(folder / f"sample{sample}.h5", contents, one=True)
    return f"{folder}/sample*.h5"


def _virtual(folder: Path) -> Path:
    files = _hdf5_list(folder)
    with h5py.File(folder / "whole.h5", "w") as file:
        for name, values in arrays().items():
            layout = h5py.VirtualLayout(values.shape, values.dtype)
            for path, part in zip(files, _parts(), strict=True):
                layout[part] = h5py.VirtualSource(path.name, name, shape=values[part].shape)
            file.create_virtual_dataset(name, layout)
    return folder / "whole.h5"


def _npy(folder: Path) -> Path:
    for name, values in arrays().items():
        np.save(folder / f"{name}.npy", values)
    return folder


def slow(name: str, box: tuple[slice, ...]) -> Any:
    """50 ms for each sample."""
    time.sleep(0.05 * (box[0].stop - box[0].start))
    return np.full([each.stop - each.start for each in box], box[0].start, np.float32)


def dies(name: str, box: tuple[slice, ...]) -> Any:
    """Ends the process at sample 2."""
    if box[0].start == 2:
        import os

        os._exit(3)
    return slow(name, box)


def which_modules(name: str, box: tuple[slice, ...]) -> Any:
    """Return True if this process has imported torch or MPI."""
    import sys

    found = float("torch" in sys.modules) + 2.0 * any(module.startswith("mpi4py") for module in sys.modules)
    return np.full([each.stop - each.start for each in box], found, np.float32)
