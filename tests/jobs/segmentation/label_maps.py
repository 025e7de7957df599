"""Helpers of the tests of this folder: files of images with label maps, and a user's network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch import nn

GRIDS = {1: {"n": 1}, 2: {"h": 2}, 3: {"w": 3}, 4: {"n": 2, "h": 2}}
SHAPES = {2: (9, 11), 3: (6, 7, 5)}


def net(in_channels: int, classes: int, width: int = 4, volumes: bool = False) -> nn.Module:
    """Without batch norm: samples of a batch do not see each other."""
    convolution: Any = nn.Conv3d if volumes else nn.Conv2d
    return nn.Sequential(
        convolution(in_channels, width, 3, padding=1), nn.Tanh(), convolution(width, classes, 3, padding=1)
    )


def volume_net(in_channels: int, classes: int) -> nn.Module:
    return net(in_channels, classes, volumes=True)


def arrays(dimensions: int = 2, *, samples: int = 5, classes: int = 3, seed: int = 0) -> tuple[Any, Any]:
    """Images (N, 2, ...) and labels (N, ...) that follow from them; some have the label 255."""
    random = np.random.default_rng(seed)
    image = random.normal(3, 2, (samples, 2, *SHAPES[dimensions]))
    score = image.sum(1)
    label = np.digitize(score, np.quantile(score, np.arange(1, classes) / classes)).astype(np.uint8)
    label[random.random(label.shape) < 0.1] = 255
    return image, label


def written(path: Path, comm: Any, dimensions: int = 2, **groups: tuple[Any, Any]) -> Path:
    """``path`` after rank 0 has put groups of samples there, by default ``train`` and ``test``."""
    groups = groups or {"train": arrays(dimensions), "test": arrays(dimensions, samples=3, seed=1)}
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            for name, (image, label) in groups.items():
                file[f"{name}/image"], file[f"{name}/label"] = image, label
    comm.Barrier()
    return path
