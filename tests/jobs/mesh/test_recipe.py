"""What a data set is made of, and which recipes are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distconv.errors import DataError
from distconv.jobs.mesh.dataset import MeshRecipe, generate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "--size 0: a mesh needs at least 16 cells"),
        ({"samples": 0}, "--samples 0 --heldout 1: at least 1"),
        ({"heldout": -1}, "--samples 5 --heldout -1: at least 1"),
        ({"tau": 0.0}, "--tau 0.0: must be positive"),
        ({"threshold": 1.5}, "--threshold 1.5: must lie between 0 and 1"),
        ({"seed": -1}, "--seed -1: must not be negative"),
    ],
)
def test_senseless_arguments_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"size": 64, "samples": 5, "heldout": 1} | change
    with pytest.raises(DataError, match=message):
        generate(tmp_path / "mesh.h5", progress=False, **arguments)


def test_the_recipe_of_a_run_does_not_contain_the_number_of_samples() -> None:
    assert MeshRecipe(64, 1, 0, 0.1, 0.4, 0).of_a_run() == MeshRecipe(64, 9, 3, 0.1, 0.4, 0).of_a_run()
