"""Keys of caches: calls that differ in one thing alone, one after the other, each give what they give alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_on_paper, grid_over, normal


def layout(grid: Any = None, axes: Sequence[str | None] = ("n", "h"), **irregular: Any) -> dc.Distribution:
    return dc.Distribution(grid or grid_on_paper(n=2, h=3), axes, **irregular)


LAYOUTS: dict[str, Callable[[], dc.Distribution]] = {
    "usual": layout,
    "axes": lambda: layout(axes=("h", "n")),
    "a dimension fewer": lambda: layout(axes=("n",)),
    "whole": lambda: layout(axes=("n", None)),
    "grid": lambda: layout(grid_on_paper(n=3, h=2)),
    "grid with replicas": lambda: layout(grid_on_paper(n=2, h=3, r=2)),
    "boundaries": lambda: layout(boundaries={"h": (0, 1, 2, 9)}),
    "other boundaries": lambda: layout(boundaries={"h": (0, 1, 3, 9)}),
    "boundaries of the other axis": lambda: layout(boundaries={"n": (0, 1, 9)}),
    "cyclic": lambda: layout(cyclic={"h": 1}),
    "other blocks": lambda: layout(cyclic={"h": 2}),
}


def test_layouts_that_differ_in_one_thing_are_not_equal() -> None:
    made = {name: make() for name, make in LAYOUTS.items()}
    for name, dist in made.items():
        assert [other for other, each in made.items() if each == dist] == [name]
        assert dist == LAYOUTS[name]() and hash(dist) == hash(LAYOUTS[name]())


@pytest.mark.ranks(4)
def test_communicators_of_a_grid(comm: Any) -> None:
    grid = dc.ProcessGrid(comm, n=2, h=2)
    ranks = {axes: grid.comm(axes).allgather(comm.rank) for axes in ("n", "h", ("n", "h"), "w")}
    own, along_h = comm.rank // 2 * 2, comm.rank % 2
    expected = {"n": [along_h, along_h + 2], "h": [own, own + 1], ("n", "h"): [0, 1, 2, 3], "w": [comm.rank]}
    assert ranks == expected
    for axis in ("n", "h"):
        assert grid.reversed_comm(axis).allgather(comm.rank) == expected[axis][::-1]
    assert [grid.factored(*parts).shape["w"] for parts in ((1, 2), (2, 1), (2, 2), (1, 2))] == [1, 2, 2, 1]
    assert [grid.factored(*parts).shape["c"] for parts in ((1, 2), (2, 1), (2, 2), (1, 2))] == [2, 1, 2, 2]
    grid.free()


@pytest.mark.ranks(2)
def test_grids_of_a_plan(comm: Any) -> None:
    model, plan = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)), dc.Plan({"0": {"h": 2}, "1": {"w": 2}})
    made = plan.grids(model, comm)
    assert [(grid.shape["h"], grid.shape["w"]) for grid in made.values()] == [(2, 1), (1, 2)]
    assert list(plan.grids(model, comm).values()) == list(made.values())
    alone = dc.Plan({"*": {"h": 1}})
    own = comm.Split(comm.rank)
    assert [alone.grids(model, each)["0"].size for each in (comm, own, comm)] == [2, 1, 2]
    own.Free()


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(2, 3, 3).double(), nn.Conv2d(3, 2, 3)

    def forward(self, x: Any) -> Any:
        return self.narrow(self.wide(x).float())


@pytest.mark.ranks(2)
def test_gradients_and_sharded_states_of_two_dtypes(comm: Any) -> None:
    def trained(split: bool) -> nn.Module:
        torch.manual_seed(0)
        model = TwoDtypes()
        grid = grid_over(comm, h=2)
        optimizer = torch.optim.Adam((dc.parallelize(model, grid) if split else model).parameters())
        if split:
            dc.shard_optimizer(optimizer, comm)
        for step in range(2):
            optimizer.zero_grad()
            x = normal(2, 2, 9, 7, seed=step)
            model(dc.scatter(x, grid) if split else x).square().mean().backward()
            optimizer.step()
        return model

    for found, expected in zip(trained(True).parameters(), trained(False).parameters(), strict=True):
        for one, other in ((found, expected), (found.grad, expected.grad)):
            torch.testing.assert_close(one, other, **({"rtol": 1e-6, "atol": 1e-7}))
