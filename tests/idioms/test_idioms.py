"""Training scripts give on grids what they give in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distconv.layouts import grid_over
from tests.idioms import derivatives, loops, losses, modules, networks  # noqa: F401  (each fills the list)
from tests.idioms.table import IDIOMS, Scenario, differences, results

GRIDS: dict[int, list[dict[str, int]]] = {
    2: [{"c": 2}, {"h": 2}],
    3: [{"w": 3}, {"n": 3}],
    4: [{"c": 2, "h": 2}, {"h": 2, "w": 2}, {"n": 2, "c": 2}],
}


@pytest.mark.long
@pytest.mark.usefixtures("fallback")
@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize("run", IDIOMS, ids=lambda run: f"{run.__module__.rpartition('.')[2]}: {run.__name__}")
def test_an_idiom_gives_what_it_gives_in_one_process(comm: Any, run: Scenario) -> None:
    expected = results(run, None)
    for axes in GRIDS[comm.size]:
        assert differences(results(run, grid_over(comm, **axes)), expected) == [], axes
