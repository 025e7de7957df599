"""Keys of caches: calls that differ in one thing alone, one after the other, each give what they give alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.layers import sparse
from distconv.layers.sparse import SparseConv, SparseMaxPool, SparseTensor
from distconv.perfmodel.cost import operation_work
from distconv.perfmodel.cost.block_geometry import Parts
from distconv.perfmodel.cost.candidates import resolve
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.cost.operation_work import Work, local_call, register_cost
from distconv.perfmodel.graph.tracing import trace
from distconv.pipeline.splitting import split as split_module
from distconv.pipeline.splitting.graph_cuts import SplitError
from distconv.pipeline.splitting.split import split
from tests.distconv.layouts import grid_on_paper, grid_over, normal
from tests.layers.compare import same_as_one_process
from tests.perfmodel.networks import machine

# -- layouts, grids and operators -------------------------------------------------------------------------------------


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


WEIGHTS = {1: normal(2, 4, 3, 3), 2: normal(4, 2, 3, 3, seed=1), 3: normal(4, 2, 3, 3, seed=2)}


def convolved(channels: int = 1, **options: Any) -> Callable[[Any], Any]:
    return lambda x: F.conv2d(x, WEIGHTS[channels], **options)


OPERATORS: dict[str, list[Callable[[Any], Any]]] = {
    "convolution": [
        convolved(),
        convolved(padding=1),
        convolved(stride=2),
        convolved(dilation=2),
        convolved(2, groups=2),
        convolved(stride=(1, 2)),
        convolved(padding=(1, 2)),
        lambda x: F.conv2d(x, WEIGHTS[1][:, :, :2]),
        lambda x: F.conv2d(x[:, :, :-1], WEIGHTS[1]),
    ],
    "transposed convolution": [
        lambda x: F.conv_transpose2d(x, WEIGHTS[2]),
        lambda x: F.conv_transpose2d(x, WEIGHTS[2], stride=2),
        lambda x: F.conv_transpose2d(x, WEIGHTS[2], stride=2, output_padding=1),
        lambda x: F.conv_transpose2d(x, WEIGHTS[2], padding=1),
        lambda x: F.conv_transpose2d(x, WEIGHTS[2], dilation=2),
    ],
    "pooling": [
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 2, ceil_mode=True),
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
        lambda x: F.adaptive_avg_pool2d(x, 3),
        lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    ],
    "interpolation": [
        lambda x: F.interpolate(x, size=(5, 4)),
        lambda x: F.interpolate(x, size=(5, 6)),
        lambda x: F.interpolate(x, size=(5, 4), mode="nearest-exact"),
        lambda x: F.interpolate(x, size=(5, 4), mode="bilinear"),
        lambda x: F.interpolate(x, size=(5, 4), mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, size=(5, 4), mode="bilinear", antialias=True),
        lambda x: F.interpolate(x, scale_factor=0.6, mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=0.6, mode="bilinear", recompute_scale_factor=True),
    ],
    "padding": [
        lambda x: F.pad(x, (1, 2, 2, 1)),
        lambda x: F.pad(x, (1, 2, 2, 1), value=1.5),
        lambda x: F.pad(x, (2, 1, 2, 1)),
        *(lambda x, m=mode: F.pad(x, (1, 2, 2, 1), m) for mode in ("reflect", "replicate", "circular")),
    ],
    "slices": [
        lambda x: x[:, :, 1:6],
        lambda x: x[:, :, 1:5],
        lambda x: x[:, :, 1:6:2],
        lambda x: x[:, 1:3, 1:6],
        lambda x: x[:, :, :, 1:6],
    ],
    "indices": [
        lambda x: x[[0, 1]],
        lambda x: x[0, 1],
        lambda x: x[[0, 1], [1, 0]],
        lambda x: x[:, [0, 1]],
        lambda x: x[0:1],
    ],
    "shapes": [
        lambda x: x.reshape(2, 4, -1),
        lambda x: x.reshape(8, 7, 9),
        lambda x: x.reshape(2, 2, 2, 7, 9),
        lambda x: x.flatten(1),
        lambda x: x.transpose(1, 2),
        lambda x: x.transpose(2, 3),
    ],
    "joining": [
        lambda x: torch.cat([x, x[:, :, :2]], 2),
        lambda x: torch.cat([x[:, :, :2], x], 2),
        lambda x: torch.cat([x, x[:, :2]], 1),
        lambda x: torch.stack([x, x]),
        lambda x: torch.stack([x, x], 3),
    ],
    "reductions": [
        lambda x: x.std(1),
        lambda x: torch.std(x, True),
        lambda x: torch.std(x, False),
        lambda x: x.sum(2),
        lambda x: x.sum(2, True),
        lambda x: x.sum((2, 3)),
        lambda x: x.amax(2),
    ],
    "products": [
        lambda x: torch.einsum("nchw,kc->nkhw", x, WEIGHTS[1][:, :, 0, 0]),
        lambda x: torch.einsum("nchw,kc->nkwh", x, WEIGHTS[1][:, :, 0, 0]),
        lambda x: torch.einsum("nchw,kh->nckw", x, normal(3, 7)),
        lambda x: x @ normal(9, 2),
        lambda x: x.transpose(2, 3) @ normal(7, 2),
    ],
    "memory": [
        lambda x: x.clone(),
        lambda x: x.clone(memory_format=torch.contiguous_format),
        lambda x: x.clone(memory_format=torch.channels_last),
        lambda x: x[:1].clone(),
        lambda x: x.float(),
        lambda x: x + x.transpose(2, 3).clone().transpose(2, 3),
    ],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(comm: Any, name: str) -> None:
    grid = grid_over(comm, h=2)
    x = normal(2, 4, 7, 9)
    # The first two are equal, and differ in the name of an axis of one part.
    for axes, form in (("hw", torch.contiguous_format), ("h-", torch.contiguous_format), ("h-", torch.channels_last)):
        dist = dc.Distribution(grid, (None, None, *(axis if axis != "-" else None for axis in axes)))
        for function in (*OPERATORS[name], OPERATORS[name][0]):
            same_as_one_process(dist, function, x.contiguous(memory_format=form))


# -- gradients and optimizers -----------------------------------------------------------------------------------------


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


# -- sparse tensors ----------------------------------------------------------------------------------------------------


def sparse_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    options: list[dict[str, Any]] = [
        {},
        {"kernel_size": (3, 1)},
        {"dilation": 2},
        {"kernel_size": None, "offsets": [(0, 0), (0, 1)]},
        {"kernel_size": None, "offsets": [(0, 0), (1, 0)]},
        {"submanifold": False},
        {"submanifold": False, "dilation": 2},
        {"submanifold": False, "stride": 2},
        {"submanifold": False, "stride": 3},
        {"submanifold": False, "stride": 2, "transposed": True},
    ]
    layers = [
        SparseConv(**{"in_channels": 1, "out_channels": 1, "kernel_size": 3, "dimension": 2} | o) for o in options
    ]
    return [*(each.double() for each in layers), SparseMaxPool(2, dimension=2), layers[0].double()]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("ranks_with_sites", ["all", "the first"])
def test_layers_on_the_sites_of_one_sparse_tensor(comm: Any, ranks_with_sites: str) -> None:
    places = [(0, h, w) for h in range(8) for w in range(9) if (h * w + h) % 3 != 1]
    coords, values = torch.tensor(places) * torch.tensor([1, 2, 2]), normal(len(places), 1)
    x, grid = SparseTensor(coords, values, 2), grid_over(comm, w=comm.size)
    alone = sparse.Partition(grid, ((), (), (100,) * (comm.size - 1)))
    partition = alone if ranks_with_sites == "the first" else None
    shared = sparse.scatter(x, grid, partition)
    for layer in sparse_layers():
        fresh = SparseTensor(coords, values, 2)
        found, expected = sparse.gather(layer(shared)), layer(fresh)
        order = expected.coords.tolist()
        rows = sorted(range(len(order)), key=order.__getitem__)
        taken = found.coords.tolist()
        where = sorted(range(len(taken)), key=taken.__getitem__)
        assert found.coords[where].tolist() == expected.coords[rows].tolist(), layer
        torch.testing.assert_close(found.features[where], expected.features[rows], rtol=1e-11, atol=1e-12)


# -- recorded stages ---------------------------------------------------------------------------------------------------


class Recorded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 2, 3), nn.Dropout(0.5), nn.Conv2d(2, 1, 3)

    def forward(self, x: Any) -> Any:
        return self.c(self.b(self.a(x) * 2))


MODES: dict[str, Callable[[], Any]] = {
    "usual": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "no_grad, bfloat16": lambda: _both(torch.no_grad(), torch.autocast("cpu", torch.bfloat16)),
}


@contextlib.contextmanager
def _both(one: Any, other: Any) -> Any:
    with one, other:
        yield


@pytest.mark.parametrize("first", MODES)
def test_a_recorded_stage_computes_in_the_mode_that_it_is_called_in(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    def refusing(model: nn.Module) -> None:
        raise SplitError("not by torch.fx")

    monkeypatch.setattr(split_module, "traced_steps", refusing)
    torch.manual_seed(0)
    model, x = Recorded(), torch.randn(3, 1, 9, 9)
    stages = split(model, ["c"], x)
    for training in (True, False):
        model.train(training)
        for stage in stages:
            stage.train(training)
        for mode in (first, *MODES):
            for given in (x, x[:2]):
                with MODES[mode]():
                    torch.manual_seed(1)
                    expected = model(given)
                    torch.manual_seed(1)
                    found = stages[1](stages[0](given))
                assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad), mode
                assert torch.equal(found, expected), mode


# -- the planner -------------------------------------------------------------------------------------------------------


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
    usual = local_call(graph.operations[0], Parts.of({"h": 2}, 2, 2))
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
