"""Which grid is chosen, and when none is."""

from __future__ import annotations

import pytest

from distconv.errors import PlanError
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.sparse.grids import select_grid
from distconv.perfmodel.sparse.recording import record
from tests.perfmodel.sparse.examples import cloud, network

RECORDING = record(network(), cloud())


def test_all_grids_of_samples_and_space_are_ranked() -> None:
    choice = select_grid(RECORDING, Machine.load("localhost"), 4)
    grids = [found.grid.describe() for found in choice.ranking]
    assert sorted(grids) == sorted(
        ["d=4", "h=4", "w=4", "d=2,h=2", "d=2,w=2", "h=2,w=2", "n=2,d=2", "n=2,h=2", "n=2,w=2"]
    )  # not n=4: there are three samples
    assert [found.time for found in choice.ranking] == sorted(found.time for found in choice.ranking)
    assert choice.best is choice.ranking[0]


def test_samples_are_split_where_they_can_be_and_space_where_they_cannot() -> None:
    machine = Machine.load("localhost")
    assert select_grid(RECORDING, machine, 3).best.grid.describe() == "n=3"
    alone = record(network(), cloud_of_one_sample())
    assert select_grid(alone, machine, 2).best.grid.shape["n"] == 1


def cloud_of_one_sample():
    x = cloud()
    kept = x.coords[:, 0] == 0
    return type(x)(x.coords[kept], x.features[kept], batch_size=1)


def test_what_does_not_fit_is_not_chosen() -> None:
    machine = Machine.load("localhost")
    ranking = select_grid(RECORDING, machine, 3).ranking
    least = min(found.memory for found in ranking)
    assert select_grid(RECORDING, machine, 3, memory=least).best.memory == least
    with pytest.raises(PlanError, match=r"no grid of 3 ranks fits into .* the smallest limit that works is"):
        select_grid(RECORDING, machine, 3, memory=least - 1)
    with pytest.raises(PlanError, match=rf"the smallest limit that works is {least / 1e9:.4g} GB"):
        select_grid(RECORDING, machine, 3, memory=least / 2)
