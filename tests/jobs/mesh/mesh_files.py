"""Helpers of the tests of this folder: files of random mesh samples, and grids to train on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distconv.jobs.mesh.segmentation import MeshSettings
from distconv.jobs.mesh.synthetic_samples import write_synthetic

SIZE = 32
"""Cells along each side of the small data set."""

GRIDS = {1: {"n": 1}, 2: {"h": 2}, 4: {"n": 2, "w": 2}}
SMALL = MeshSettings("unet", 2, batch=4, epochs=3, dtype="float64")


def written(path: Path, comm: Any, **options: Any) -> Path:
    """``path`` after rank 0 has put a file of random samples there."""
    if comm.rank == 0:
        write_synthetic(path, (32, 32), train=6, **{"heldout": 3, **options})
    comm.Barrier()
    return path
