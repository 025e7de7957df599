"""Random samples in the layout of the mesh-tangling data, for checks that do not depend on the physics."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from distconv.whole_files import atomic_path

from .recipe import CHANNELS

FAMILIES = ("blast", "shear")
TILE = 16


def write_synthetic(
    path: str | os.PathLike[str], size: tuple[int, int], *, train: int = 8, heldout: int = 4, seed: int = 0
) -> None:
    """Write a file of smooth random channels, and labels that depend on them, about 8 % positive. Call on one rank.

    Parameters
    ----------
    path : path-like
        The file to write.
    size : (int, int)
        Height and width of the samples.
    train, heldout : int
        Numbers of samples.
    seed : int
        Seed of the samples.
    """
    random = np.random.default_rng(seed)
    with atomic_path(Path(path)) as unfinished, h5py.File(unfinished, "x") as file:
        file.attrs.update(tau=0.1, threshold=0.4)
        for group, count in (("train", train), ("heldout", heldout)):
            channels = smooth(random.standard_normal((count, len(CHANNELS), *size)))
            score = channels[:, 0] * channels[:, 1] + channels[:, 2]
            label = score > (np.quantile(score, 0.92) if count else 0.0)
            _put(file, f"{group}/input", channels.astype(np.float32))
            _put(file, f"{group}/label", label.astype(np.uint8))
            _put(file, f"{group}/extrapolated", (0.6 - 0.2 * score).astype(np.float32))
            file[f"{group}/family"] = [FAMILIES[index % len(FAMILIES)] for index in range(count)]


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the periodic average over squares of 4 x 4, scaled such that white noise keeps its standard deviation."""
    for axis in (-2, -1):
        # The sum of four has twice the standard deviation.
        values = sum(np.roll(values, shift, axis) for shift in range(4)) / 2  # type: ignore[assignment]
    return values


def _put(file: h5py.File, name: str, values: NDArray[np.generic]) -> None:
    channels = values.shape[1:-2]
    tile = tuple(min(TILE, extent) for extent in values.shape[-2:])
    file.create_dataset(
        name, data=values, chunks=(1, *channels, *tile) if len(values) else None, fletcher32=bool(len(values))
    )
