"""Grids and plans that the tests of training on images train over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import distconv as dc
from tests.jobs.images.image_files import written

ONE_GRID = {1: "n=1", 2: "h=2", 4: "n=2,w=2"}


def grid_of(comm: Any) -> dc.ProcessGrid:
    return dc.ProcessGrid(comm, **dc.parse_grid(ONE_GRID[comm.size]))


PLANS = {
    1: {"*": {"n": 1}},
    2: {"*": {"h": 2}, "c3": {"c": 2}, "f6": {"n": 2}, "output": {"n": 1}},
    4: {"*": {"n": 2, "h": 2}, "c3": {"c": 2, "w": 2}, "c5": {"n": 4}, "f6": {"c": 2}, "output": {"n": 2}},
}


def planned(comm: Any, folder: Path) -> Path:
    written(comm, folder, lambda place: dc.Plan(PLANS[comm.size], comm.size).save(place / "plan.json"))
    return folder / "plan.json"
