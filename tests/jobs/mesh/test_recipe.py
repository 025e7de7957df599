"""Recipes of data sets, and recipes that raise."""

from __future__ import annotations

from typing import Any

import pytest

from distconv.errors import DataError
from distconv.jobs.mesh.recipe import MeshRecipe, Summary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 15}, "--size 15: a mesh needs at least 16 cells"),
        ({"samples": 0}, "--samples 0 --heldout 1: at least 1"),
        ({"heldout": -1}, "--samples 5 --heldout -1: at least 1"),
        ({"tau": 0.0}, "--tau 0.0: must be positive"),
        ({"threshold": 1.0}, "--threshold 1.0: must lie between 0 and 1"),
        ({"threshold": 0.0}, "--threshold 0.0: must lie between 0 and 1"),
        ({"seed": -1}, "--seed -1: must not be negative"),
    ],
)
def test_senseless_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    good = {"size": 64, "samples": 5, "heldout": 1, "tau": 0.3, "threshold": 0.4, "seed": 0}
    with pytest.raises(DataError, match=message):
        MeshRecipe(**good | change)
    MeshRecipe(16, 1, 0, tau=1e-9, threshold=1e-9, seed=0)  # the smallest values


def test_the_recipe_of_a_run_does_not_contain_the_number_of_samples() -> None:
    assert MeshRecipe(64, 1, 0, 0.1, 0.4, 0).of_a_run() == MeshRecipe(64, 9, 3, 0.1, 0.4, 0).of_a_run()
    assert MeshRecipe(64, 1, 0, 0.1, 0.4, 0).of_a_run() == {
        "size": 64, "tau": 0.1, "threshold": 0.4, "seed": 0, "version": 2
    }  # fmt: skip


def test_a_summary_in_words() -> None:
    rejected = {"too quiet": 3, "degraded already": 4}
    assert str(Summary("a.h5", 64, 5, 2, 7, 20, 0.35, rejected, 11, 0.1, 0.125, 0.0625, 900, 1.25)).splitlines() == [
        "a.h5: 5 training and 2 held-out samples of 64 x 64 cells from 7 runs (900 steps, 1.2 s)",
        "labelled: 12.5 % of the training cells, 6.2 % of the held-out cells; cells that invert within tau: 11",
        "rejected: 35 % of 20 candidate snapshots (3 too quiet, 4 degraded already)",
    ]
