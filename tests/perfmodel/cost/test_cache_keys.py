"""Keys of caches: predictions that differ in one thing alone, one after the other, each are what they are alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import distconv as dc
from distconv.perfmodel.cost import operation_work
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.candidates import resolve
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.cost.operation_work import Work, local_call, register_cost
from distconv.perfmodel.graph.tracing import trace
from tests.perfmodel.networks import machine


class Planned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))

    def forward(self, x: Any) -> Any:
        return self.body(x).square().mean()


ASSUMED: dict[str, dict[str, Any]] = {
    "usual": {},
    "machine": {"here": machine(bandwidth=3e6)},
    "machine without overlap": {"here": machine(overlap=False)},
    "memory_model": {"memory_model": "keep-all"},
    "workspace": {"workspace": 1e6},
    "optimizer_slots": {"optimizer_slots": 2},
    "shard_optimizer": {"shard_optimizer": True},
    "shard_weights": {"shard_weights": True},
    "batch_norm": {"batch_norm": "local"},
    "overlap": {"overlap": False},
    "layout": {"parts": {"h": 2}},
    "layout of a layer": {"parts": {"n": 2}, "last": {"h": 2}},
}


def test_predictions_from_one_graph_are_those_from_a_graph_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_work, "_registered", dict(operation_work._registered))

    def predicted(
        graph: Any, parts: Any = None, last: Any = None, ranks: int = 2, here: Any = None, **settings: Any
    ) -> tuple[float, float]:
        plan = {"*": parts or {"n": 2}, **({"body.3": last} if last else {})}
        found = evaluate(graph, plan, here or machine(), ranks, **settings)
        return found.time, found.memory

    shared = trace(Planned(), (4, 2, 12, 12))
    found = {}
    for name, given in ASSUMED.items():
        found[name] = predicted(shared, **given)
        assert found[name] == predicted(trace(Planned(), (4, 2, 12, 12)), **given), name
        assert (found[name] == found["usual"]) == (name == "usual"), name
    register_cost("relu", lambda call: (Work(bytes=1e6), Work(bytes=1e6)))
    assert predicted(shared) == predicted(trace(Planned(), (4, 2, 12, 12))) != found["usual"]


def test_a_layout_that_fits_one_layer_on_some_ranks_is_checked_for_others() -> None:
    graph = trace(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 3, groups=2)), (4, 2, 12, 12))
    assert resolve(graph, {"0": {"c": 4}, "1": {"n": 4}}, 4)["0"] == {"c": 4}
    with pytest.raises(dc.PlanError, match=r"'1': C=4 channels"):
        resolve(graph, {"0": {"n": 4}, "1": {"c": 4}}, 4)
    with pytest.raises(dc.PlanError, match="'0'"):
        resolve(graph, {"0": {"c": 4}, "1": {"n": 2}}, 2)


def test_measured_times_are_named_by_everything_that_decides_them() -> None:
    graph = trace(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)), (4, 4, 12, 12))
    usual = local_call(graph.operations[0], AxisParts.from_axes({"h": 2}, 2, 2))
    op, window = usual.operation, usual.operation.window
    assert window is not None and usual.pieces is not None
    calls = [
        usual,
        replace(usual, operation=replace(op, kind="other")),
        *(
            replace(usual, operation=replace(op, window=replace(window, **{name: (2, 5)})))
            for name in ("kernel", "stride", "padding", "dilation")
        ),
        replace(usual, operation=replace(op, outputs=(replace(op.y, dtype="float64"),))),
        replace(usual, inputs=((4, 4, 7, 13),)),
        replace(usual, constants=((4, 4, 3, 2), (4,))),
        replace(usual, outputs=((4, 4, 6, 13),)),
        replace(usual, groups=2),
        replace(usual, pieces=None),
    ]
    assert len({call.key for call in calls}) == len(calls)
