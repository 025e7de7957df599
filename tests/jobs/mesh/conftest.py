"""A small data set for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from distconv.jobs.mesh.dataset import generate
from tests.jobs.mesh.mesh_files import SIZE


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set made on one rank."""
    path = tmp_path_factory.mktemp("mesh") / "mesh.h5"
    generate(path, size=SIZE, samples=7, heldout=5, seed=3, progress=False)
    return path
