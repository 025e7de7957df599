"""One rank alone passes another tensor, layout, model or plan: the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.communication import agreement
from distconv.communication.transfer import transfer_plan
from tests.distconv.layouts import counting, normal
from tests.distconv.one_rank_alone import Case, Rank, check, with_weight

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]


def scattered(change: Callable[[torch.Tensor], Any], number: int = 9) -> Callable[[Rank], object]:
    """As the tensor of that ``number``: values are compared of the first ones."""

    def call(r: Rank) -> object:
        r.grid.scatter_count = number
        return dc.scatter(r.pick(lambda x: x, change)(counting(4, 3)), r.grid, dims="nh")

    return call


def no_grad(call: Callable[[Rank], object]) -> Callable[[Rank], object]:
    return lambda r: r.pick(call, torch.no_grad()(call))(r)


def blocks(other: dict[str, Any]) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        named = {"shape": (2, 3 * r.size), "axes": (None, "h"), "block": torch.zeros(2, 3)} | r.pick({}, other)
        return dc.from_local(named["block"], dc.Distribution(r.grid, named["axes"]), named["shape"])

    return call


def parallelized(make: Callable[[], nn.Module], **named: Any) -> Callable[[Rank], object]:
    return lambda r: dc.parallelize(
        r.pick(partial(nn.Conv2d, 2, 3, 3), make)(), r.grid, broadcast=True, **r.pick({}, named)
    )


def forward(change: Callable[[nn.Module], object], gradients: bool = True) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        model = dc.parallelize(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout()), r.grid)
        r.pick(lambda _: None, change)(model)
        x = dc.scatter(torch.ones(1, 2, 9, 9), r.grid)
        with torch.set_grad_enabled(r.pick(True, gradients)):
            return model(x)

    return call


def other_plan(**named: Any) -> Callable[[Rank], object]:
    given = {"layers": {"*": {"h": 1}}, "batch_norm": "global"}
    return lambda r: dc.parallelize(nn.Conv2d(2, 3, 3), dc.Plan(**given | r.pick({}, named)), comm=r.comm)


class Other(nn.Conv2d):
    pass


TENSORS: dict[str, Case] = {
    "grid: axes": (lambda r: dc.ProcessGrid(r.comm, **{r.pick("h", "w"): r.size}), "ProcessGrid: ranks disagree"),
    "grid: extents": (lambda r: dc.ProcessGrid(r.comm, h=r.size, w=r.pick(1, 2)), "ProcessGrid: ranks disagree"),
    "scatter: shape": (scattered(lambda x: x.view(3, 4)), "scatter: ranks disagree"),
    "scatter: dtype": (scattered(torch.Tensor.float), "scatter: ranks disagree"),
    "scatter: a value": (scattered(lambda x: x + (x == 12), number=0), "scatter: ranks disagree"),
    "scatter: requires_grad": (scattered(torch.Tensor.requires_grad_), "scatter: ranks disagree"),
    "scatter: no tensor": (scattered(lambda x: None), "scatter: ranks disagree"),
    "scatter: dimensions": (scattered(lambda x: x[0]), "scatter: ranks disagree"),
    "scatter: dims": (lambda r: dc.scatter(counting(4, 3), r.grid, dims=r.pick("nh", "hn")), "scatter: ranks disagree"),
    "scatter: no values": (scattered(lambda x: x.to("meta")), "scatter: ranks disagree"),
    "scatter: sparse": (scattered(torch.Tensor.to_sparse, number=0), "scatter: ranks disagree"),
    "scatter: no_grad": (no_grad(scattered(lambda x: x)), "under no_grad.* on rank"),
    "scatter from a root: no_grad": (
        no_grad(lambda r: dc.scatter(counting(4), r.grid, dims="h", root=0)),
        "under no_grad.* on rank",
    ),
    "scatter: root": (lambda r: dc.scatter(counting(4), r.grid, dims="h", root=r.pick(0, 1)), "root=1 on rank"),
    "scatter: only one has a root": (
        lambda r: dc.scatter(counting(4), r.grid, dims="h", **r.pick({}, {"root": 0})),
        "scatter: ranks disagree",
    ),
    "from_local: shape": (blocks({"shape": (2, 99)}), "from_local: ranks disagree"),
    "from_local: dtype": (blocks({"block": torch.zeros(2, 3).double()}), "from_local: ranks disagree"),
    "from_local: axes": (blocks({"axes": ("h", None)}), "from_local: ranks disagree"),
    "from_local: requires_grad": (
        blocks({"block": torch.zeros(2, 3, requires_grad=True)}),
        "requires_grad, .* on rank",
    ),
    "from_local: block": (blocks({"block": torch.zeros(2, 4)}), r"the block is \(2, 4\) but .* \(on rank"),
    "transfer plan: shape": (
        lambda r: transfer_plan(
            dc.Distribution(r.grid, (None, "h")), dc.Distribution(r.grid, ("h", None)), (2, r.pick(9, 8))
        ),
        "transfer plan: ranks disagree",
    ),
    "transfer plan: target": (
        lambda r: transfer_plan(
            dc.Distribution(r.grid, (None, "h")), dc.Distribution(r.grid, r.pick(("h", None), (None, None))), (2, 9)
        ),
        "transfer plan: ranks disagree",
    ),
    "parallelize: class": (parallelized(lambda: Other(2, 3, 3)), "parallelize: ranks disagree"),
    "parallelize: shape": (parallelized(lambda: nn.Conv2d(2, 3, 5)), "parallelize: ranks disagree"),
    "parallelize: dtype": (parallelized(lambda: nn.Conv2d(2, 3, 3).double()), "parallelize: ranks disagree"),
    "parallelize: parameters": (parallelized(lambda: nn.Conv2d(2, 3, 3, bias=False)), "parallelize: ranks disagree"),
    "parallelize: batch norm": (
        parallelized(lambda: nn.Conv2d(2, 3, 3), batch_norm="local"),
        "parallelize: ranks disagree",
    ),
    "parallelize: a weight": (
        lambda r: dc.parallelize(with_weight(lambda w: r.odd and w[1].fill_(2)), r.grid),
        "1 of 2 .* differ between ranks, the first is 'weight'",
    ),
    "parallelize: unknown batch norm": (
        parallelized(lambda: nn.Conv2d(2, 3, 3), batch_norm="never"),
        "parallelize: ranks disagree",
    ),
    "parallelize: a lazy layer": (parallelized(lambda: nn.LazyConv2d(3, 3)), "parallelize: ranks disagree"),
    "plan: layers": (other_plan(layers={"*": {"h": 2}}), "plan: ranks disagree"),
    "plan: batch norm": (other_plan(batch_norm="local"), "ranks disagree"),
    "plan: ranks": (other_plan(ranks=2), "plan: ranks disagree"),
    "forward: mode": (forward(nn.Module.eval), r"in eval\(\) on rank"),
    "forward: no_grad": (forward(lambda _: None, gradients=False), r"in train\(\), under no_grad on rank"),
    "trace: folder": (lambda r: dc.trace(r.pick("a", "b"), r.comm).__enter__(), "trace: ranks disagree"),
    "plan file": (
        lambda r: [dc.Plan({"*": {"h": r.pick(1, 2)}}).save("p.json"), dc.Plan.load("p.json", r.comm)],
        "plan: ranks disagree",
    ),
    "plan file is not there": (
        lambda r: [r.odd or dc.Plan({"*": {"h": 1}}).save("p.json"), dc.Plan.load("p.json", r.comm)],
        r"p\.json.*\(on rank",
    ),
}


@pytest.mark.fault(3, 16, 17, 23, 26, 30)
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_and_models(rank: Rank, name: str) -> None:
    check(rank, *TENSORS[name])


CALLS: dict[str, Callable[[Rank, dc.DistTensor], object]] = {
    "operator": lambda r, x: r.pick(torch.exp, torch.sin)(x),
    "float": lambda r, x: x * r.pick(1.5, 2.5),
    "int": lambda r, x: torch.roll(x, r.pick(1, 2), 0),
    "bool": lambda r, x: x.sum(1, keepdim=r.pick(True, False)),
    "complex": lambda r, x: x * r.pick(1j, 2j),
    "str": lambda r, x: torch.div(x, 2.0, rounding_mode=r.pick("floor", "trunc")),
    "slice": lambda r, x: x[: r.pick(1, 2)],
    "number of NumPy": lambda r, x: x * r.pick(np.float32(1.5), np.float32(2.5)),
    "array's value": lambda r, x: x[:, np.array([0, r.pick(1, 2)])],
    "array's shape": lambda r, x: x[:, np.zeros(r.pick(1, 2), int)],
    "array's dtype": lambda r, x: x[np.zeros(4, r.pick(np.int64, np.int32))],
    "plain value": lambda r, x: x + torch.full((9,), r.pick(1.0, 2.0)),
    "plain shape": lambda r, x: x + torch.zeros(r.pick((9,), (1, 9))),
    "plain dtype": lambda r, x: x + torch.zeros(9, dtype=r.pick(torch.float32, torch.float64)),
    "parameter": lambda r, x: F.linear(x, nn.Parameter(torch.full((2, 9), r.pick(1.0, 2.0)))),
    "shape": lambda r, x: r.pick(x, x[:2]).exp(),
    "dtype": lambda r, x: r.pick(x, x.float()).exp(),
    "layout": lambda r, x: r.pick(x, x.redistribute(x.dist.replicate())).exp(),
    "layout to be": lambda r, x: x.redistribute(r.pick(dc.Distribution(r.grid, ("h", None)), x.dist.replicate())),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_operators_where_all_calls_are_compared(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(agreement, "level", "all")
    grid = dc.ProcessGrid(rank.comm, h=rank.size)
    x = dc.scatter(normal(4, 9), dc.Distribution(grid, (None, "h")))
    check(rank, lambda r: CALLS[name](r, x), "ranks (disagree|are at different operations)")
    grid.free()
