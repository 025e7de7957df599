"""Training takes the same steps on any grid: losses and final weights equal plain torch on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import distconv as dc
from distconv.jobs.mesh.segmentation import MeshSettings
from distconv.jobs.mesh.synthetic_samples import write_synthetic
from distconv.jobs.verification import exactness

GRIDS = {
    1: ["n=1"],
    2: ["h=2"],
    3: ["h=3"],
    4: ["h=2,w=2", "n=2,h=2"],
    5: ["w=5"],
}
STEPS = 20


def settings(model: str, optimizer: str) -> MeshSettings:
    width = {"unet": 4, "mesh1k": 8}[model]
    return MeshSettings(model, width, batch=4, steps=STEPS, optimizer=optimizer, lr=exactness.RATE, dtype="float64")


@pytest.mark.long
@pytest.mark.fault(44)
@pytest.mark.ranks(*GRIDS)
@pytest.mark.time_limit(300)
@pytest.mark.parametrize(
    ("model", "optimizer", "size"),
    [
        ("unet", "adam", (50, 36)),
        pytest.param("mesh1k", "sgd", (64, 64), marks=pytest.mark.slow),
        pytest.param("unet", "adam", (64, 64), marks=pytest.mark.slow),
        pytest.param("mesh1k", "sgd", (50, 36), marks=pytest.mark.slow),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_steps_on_any_grid_equal_those_of_plain_torch(
    comm: Any, shared_tmp_path: Path, model: str, optimizer: str, size: tuple[int, int]
) -> None:
    path = shared_tmp_path / "samples.h5"
    if comm.rank == 0:
        write_synthetic(path, size)  # eight training samples: an epoch has two steps
    comm.Barrier()
    expected = exactness.reference(settings(model, optimizer), path, comm)
    assert len(expected.losses) == STEPS
    for text in GRIDS[comm.size]:
        grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
        found = exactness.train(settings(model, optimizer), path, grid)
        apart = exactness.difference(found, expected)
        assert apart.loss <= 1e-10, (text, apart)
        assert apart.weight <= 1e-9, (text, apart)
