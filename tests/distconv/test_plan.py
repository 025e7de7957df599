"""Plans: what they say of a model, files that hold them, and training with several grids."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.distconv.layouts import normal, raises_everywhere
from tests.layers.compare import close

pytestmark = pytest.mark.ranks(at_most=6)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.late = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.shortcut = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        x = self.late(x) + self.shortcut(x)
        return self.head(x.mean((2, 3)))


def trained(target=None, grid=None):
    """Losses and final state of three steps, of one process or as ``target`` says."""
    torch.manual_seed(3)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)
    if target is not None:
        dc.parallelize(model, target)
    losses = []
    for step in range(3):
        x, label = normal(3, 3, 7, 9, seed=step), torch.tensor([0, 3, 1])
        if grid is not None:
            x, label = dc.scatter(x, grid), dc.scatter(label, grid, dims="n")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def several_grids(size):
    half = size // 2 if size % 2 == 0 else size
    return [
        {"*": {"h": size}},
        {"*": {"h": size}, "late.*": {"c": size}, "head": {"n": size}},
        {"stem.0": {"w": size}, "shortcut": {"h": half}, "late*": {"n": size // half, "c": half}},
        {"late": {"c": size}, "head": {"c": size}},
        {"stem.*": {"n": half}, "head": {}},
    ]


@pytest.mark.parametrize("number", range(5))
def test_training_with_several_grids_equals_one_process(comm, number):
    plan = dc.Plan(several_grids(comm.size)[number])
    losses, state = trained()
    found, other = trained(plan, plan.input_grid(Net(), comm))
    assert found == pytest.approx(losses, rel=1e-12)
    for name, tensor in state.items():
        close(other[name], tensor, name)


@pytest.mark.long
def test_a_plan_makes_each_grid_once(comm):
    plan, model = dc.Plan({"*": {"h": comm.size}, "head": {"n": comm.size}}), Net()
    first = plan.grids(model, comm)
    assert plan.input_grid(model, comm) is first["stem.0"]
    assert [*map(id, plan.grids(model, comm).values())] == [*map(id, first.values())]
    other = copy.deepcopy(plan)
    assert other == plan and other.input_grid(model, comm) is not first["stem.0"]
    first["stem.0"].free()
    grid = plan.input_grid(model, comm)
    assert torch.equal(dc.gather(dc.scatter(torch.ones(7, 2, 7, 7), grid)), torch.ones(7, 2, 7, 7))


def test_later_patterns_win():
    plan = dc.Plan({"*": {"h": 2}, "late.*": {"c": 2}, "late.0": {"n": 2}, "head": {"n": 2}})
    parts = plan.parts(Net())
    assert parts == {"stem.0": {"h": 2}, "late.0": {"n": 2}, "shortcut": {"h": 2}, "head": {"n": 2}}


def test_a_module_named_exactly_gets_its_input_on_the_grid():
    assert dc.Plan({"late": {"c": 2}}).parts(Net()) == {"late": {"c": 2}}


def test_parts_that_do_not_use_all_ranks_leave_replicas(comm):
    grids = dc.Plan({"head": {"n": 1}, "stem.0": {"h": comm.size}}).grids(Net(), comm)
    assert grids["head"].shape["r"] == comm.size
    assert grids["stem.0"].shape["h"] == comm.size


@pytest.mark.fault(29)
@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ({"stem.9": {"h": 1}}, "'stem.9' matches no layer of Net.*stem.0, late.0, shortcut, head"),
        ({"s?": {"h": 1}}, "matches no layer"),
        ({"stem.0": {"d": 2}}, "'stem.0' .Conv2d. is split along d.*only n, c, h, w"),
        ({"stem.0": {"h": 7}}, "h=7 has 7 parts, which do not divide the [0-9]+ ranks"),
    ],
)
def test_a_plan_for_another_model_or_other_ranks_is_refused(comm, layers, text):
    raises_everywhere(comm, dc.PlanError, text, lambda: dc.parallelize(Net(), dc.Plan(layers)))


@pytest.mark.fault(29)
def test_a_plan_made_for_another_number_of_ranks_is_refused_with_both(comm):
    other = comm.size + 1
    plan = dc.Plan({"*": {"h": other}}, ranks=other)
    raises_everywhere(
        comm, dc.PlanError, f"made for {other} ranks, but there are {comm.size}", lambda: dc.parallelize(Net(), plan)
    )


@pytest.mark.fault(31)
@pytest.mark.parametrize(
    ("layers", "ranks", "text"),
    [
        ({}, None, "at least one"),
        ({"*": {"q": 2}}, None, "unknown axis 'q'; the axes are n, c, d, h, w, r"),
        ({"*": {"h": 0}}, None, "h=0 must be a positive whole number"),
        ({"*": {"h": 2.0}}, None, "h=2.0"),
        ({"*": {"h": True}}, None, "h=True"),
        ({"*": 3}, None, "must be a pattern with its parts"),
        ({"*": {"h": 2}}, -1, "ranks=-1"),
        ({"*": {"h": 3}}, 4, "h=3 has 3 parts, which do not divide the plan's 4 ranks"),
    ],
)
def test_nonsense_is_refused(layers, ranks, text):
    with pytest.raises(dc.PlanError, match=text):
        dc.Plan(layers, ranks)


def test_a_plan_survives_its_file(comm, shared_tmp_path):
    path = shared_tmp_path / "plan.json"
    for more in ({}, {"batch_norm": "spatial"}):
        plan = dc.Plan({"*": {"h": 2, "n": 1}, "late.*": {"c": 4}}, ranks=4, **more)
        comm.Barrier()
        if comm.rank == 0:
            plan.save(path)
        comm.Barrier()
        assert dc.Plan.load(path, comm) == plan
    assert plan != dc.Plan(plan.layers, ranks=4)


GOOD = {"format": "distconv-plan", "version": 1, "layers": {"*": {"h": 2}}}


@pytest.mark.fault(29, 31, 71)
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[1, 2]", "found a list, expected a mapping with the keys layers, format"),
        (json.dumps({**GOOD, "format": "other"}), "format: found 'other', expected 'distconv-plan'"),
        (json.dumps({**GOOD, "version": 2}), "version: found 2, expected 1"),
        (json.dumps({**GOOD, "layers": {"*": {"h": float("nan")}}}), r"layers\.\*\.h: found nan, expected an integer"),
        (json.dumps({**GOOD, "layers": {"*": {"h": -2}}}), "h=-2"),
        ('{"format": "distconv-plan", "version": 1, "layers": {"a": {"h": 2}, "a": {"h": 1}}}', "'a' occurs twice"),
    ],
)
def test_a_bad_file_is_refused_on_all_ranks(comm, shared_tmp_path, content, text):
    path = shared_tmp_path / "bad.json"
    if comm.rank == 0:
        path.write_text(content, encoding="latin-1")
    comm.Barrier()
    raises_everywhere(comm, dc.PlanError, text, lambda: dc.Plan.load(path, comm))


def test_replicas_that_a_plan_names_are_among_its_parts(comm):
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 1))
    for parts in ({"r": comm.size}, {"h": 1, "r": comm.size}, {}):
        (grid,) = dc.Plan({"*": parts}).grids(model, comm).values()
        assert grid.shape["r"] == comm.size


def test_a_plan_names_the_axes_over_which_layers_shard_their_weights(tmp_path, comm) -> None:
    plan = dc.Plan({"*": {"n": 1}}, shard_weights={"late.*": True, "head": "n, h", "late.0": False})
    assert plan.sharding(Net()) == {"late.0": False, "head": "n, h"}
    path = tmp_path / f"{comm.rank}.json"
    plan.save(path)
    again = dc.Plan._read(path)
    assert again == plan and again.shard_weights == plan.shard_weights
    for value, patterns in ((True, {"*": True}), ("n,h", {"*": "n,h"}), (False, {})):
        path.write_text(json.dumps(json.loads(plan.to_json()) | {"shard_weights": value}))
        assert dc.Plan._read(path).shard_weights == patterns
    assert "shard_weights={'late.*': True" in repr(again) and plan != dc.Plan({"*": {"n": 1}})
    assert dc.Plan({"*": {"n": 1}}, shard_weights=True).sharding(Net()).keys() == {
        "stem.0",
        "late.0",
        "shortcut",
        "head",
    }
    assert dc.Plan({"late.*": {"n": 1}}, shard_weights="n").sharding(Net()) == {"late.0": "n"}


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"head": "c"}, "plan: shard_weights: 'head'='c': 'c' is not one of the axes r, n, d, h, w"),
        ({"*": 2}, "plan: shard_weights: '\\*'=2: 2 is not one of the axes"),
        ("x", "plan: shard_weights: '\\*'='x': 'x' is not one of the axes"),
    ],
)
def test_unknown_axes_of_sharded_weights_raise(axes, text: str) -> None:
    with pytest.raises(dc.PlanError, match=text):
        dc.Plan({"*": {"n": 1}}, shard_weights=axes)


def test_a_pattern_of_sharded_weights_that_matches_no_layer_with_a_grid_raises() -> None:
    with pytest.raises(dc.PlanError, match=r"plan: shard_weights: 'stem\.0' matches no layer of Net"):
        dc.Plan({"late.*": {"n": 1}}, shard_weights={"stem.0": True}).sharding(Net())
