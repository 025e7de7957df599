"""Whole gradients on every rank, whatever the model does with its parameters, at once or behind backward."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.communication import agreement
from distconv.communication.transport import count_traffic
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.distconv.small_models import IMAGES, LABELS, Pooled, SqueezeExcite, Tied, build, classify, compare


class Unused(Pooled):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(5, 5)


class Scaled(Pooled):
    def __init__(self):
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x):
        return self.head((self.body(x) * self.scale + self.offset).mean((2, 3)))


class GatheredHead(Pooled):
    def forward(self, x):
        return self.head(dc.gather(self.body(x)).mean((2, 3)))


class InterleavedHead(Pooled):
    """The same parameters on a distributed and on a gathered tensor."""

    def forward(self, x):
        y = self.body(x).mean((2, 3))
        return self.head(dc.gather(y)) + dc.gather(self.head(y))


SCENARIOS = {kind.__name__: kind for kind in (
    Pooled, SqueezeExcite, Tied, Unused, Scaled, GatheredHead, InterleavedHead)}  # fmt: skip


def with_l2(model, x, labels):
    return classify(model, x, labels) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())


def labels_for(y_is_plain, grid):
    return LABELS if y_is_plain else dc.scatter(LABELS, grid)


def gathered(kind):
    return issubclass(kind, (GatheredHead, InterleavedHead))


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_are_those_of_one_process(comm, name, parallel):
    kind = SCENARIOS[name]
    reference = build(kind)
    with_l2(reference, IMAGES, LABELS).backward()
    for grid in grids(comm, "nhw"):
        model = build(kind)
        if parallel:
            dc.parallelize(model, grid)
        with_l2(model, dc.scatter(IMAGES, grid), labels_for(gathered(kind), grid)).backward()
        compare(model, reference)


def test_replicas_do_not_count_twice(comm):
    reference = build(Pooled)
    classify(reference, IMAGES, LABELS).backward()
    grid = grid_over(comm, r=comm.size)
    model = dc.parallelize(build(Pooled), grid)
    classify(model, dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid)).backward()
    compare(model, reference)


@pytest.mark.fault(22)
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("axis", ["n", "h"])
def test_training_on_plain_tensors_warns_once(comm, axis):
    images = torch.ones(comm.size, comm.size, comm.size, 3, dtype=torch.float64)
    grid = grid_over(comm, **{axis: comm.size})
    torch.manual_seed(0)
    model = dc.parallelize(nn.Conv2d(comm.size, comm.size, 1).double(), grid)
    copied = copy.deepcopy(model)
    # This is distributed, or no training.
    model(dc.scatter(images, grid))
    model.eval()(images)
    with torch.no_grad():
        model.train()(images)
    for each in (model, copied, copy.deepcopy(model)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            each(images)
            each(images)
        assert [(w.category, w.filename) for w in caught] == [(dc.ReplicationWarning, __file__)]
        assert "Conv2d was parallelized and is trained on plain tensors" in str(caught[0].message)
        assert "dc.scatter(x, grid)" in str(caught[0].message)
    assert list(model.state_dict()) == ["weight", "bias"]


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("name", ["body.second.weight", "body.norm.running_mean"])
def test_parameters_and_buffers_that_differ_are_found(comm, name):
    model = build(Pooled)
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            model.state_dict()[name].view(-1)[0] += 1e-12
    text = raises_everywhere(
        comm, dc.MismatchError, "differ between ranks", lambda: dc.parallelize(model, grid_over(comm, h=comm.size))
    )
    assert repr(name) in text
    assert "broadcast=True" in text


@pytest.mark.fault(22)
def test_broadcast_gives_all_ranks_the_state_of_the_first(comm):
    torch.manual_seed(comm.rank)
    model = dc.parallelize(Pooled().double(), grid_over(comm, h=comm.size), broadcast=True)
    torch.manual_seed(0)
    expected = Pooled().double()
    for found, wanted in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(found, wanted)


def traced():
    return torch.jit.trace(nn.Conv2d(2, 2, 1), torch.ones(1, 2, 3, 3))


REJECTED = {
    "lazy": (
        lambda: nn.LazyConv2d(4, 3),
        r"'1' \(LazyConv2d\) is a lazy layer .* Call the model once with plain tensors",
    ),
    "meta": (lambda: nn.Conv2d(2, 4, 3, device="meta"), r"'1' \(Conv2d\) is on the device meta, .* init="),
    "traced": (traced, "is a TorchScript module"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", REJECTED)
def test_layers_without_weights_of_their_own_are_rejected(comm, kind):
    make, match = REJECTED[kind]
    model = nn.Sequential(nn.ReLU(), make())
    for axis in "nc":
        grid = grid_over(comm, **{axis: comm.size})
        raises_everywhere(comm, dc.UnsupportedOperation, match, lambda grid=grid: dc.parallelize(model, grid))


def test_a_model_needs_a_grid_and_is_returned(comm):
    model = build(Pooled)
    raises_everywhere(comm, dc.UnsupportedOperation, "needs a ProcessGrid", lambda: dc.parallelize(model, "h=2"))
    keys = list(model.state_dict())
    assert dc.parallelize(model, grid_over(comm, h=comm.size)) is model
    assert list(model.state_dict()) == keys


@pytest.mark.ranks(at_least=2)
def test_a_linear_layer_of_a_plan_gets_its_features_split_not_what_lies_between(comm):
    torch.manual_seed(0)
    layer, seen = nn.Sequential(nn.Linear(6, 4)).double(), []
    expected = layer(normal(3, 5, 6)).detach()
    dc.parallelize(layer, dc.Plan({"0": {"c": comm.size}}), comm=comm)
    layer[0].register_forward_hook(lambda _, args, y: seen.append(args[0].dist.axes))
    y = layer(dc.scatter(normal(3, 5, 6), grid_over(comm, n=comm.size)))
    assert seen == [("n", None, "c")]
    torch.testing.assert_close(dc.gather(y).detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2, 3)
def test_another_plan_replaces_the_one_before(comm):
    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)).double(), []
    expected = model(normal(2, 2, 7, 8)).detach()
    dc.parallelize(model, dc.Plan({"*": {"h": comm.size}}), comm=comm)
    dc.parallelize(model, dc.Plan({"1": {"w": comm.size}}), comm=comm)
    for layer in model:
        layer.register_forward_hook(lambda _, args, y: seen.append(args[0].dist.axes))
    with count_traffic() as traffic:
        y = model(dc.scatter(normal(2, 2, 7, 8), grid_over(comm, w=comm.size)))
    assert seen == [("n", "c", "h", "w")] * 2
    assert not traffic.sent["redistribution"]
    torch.testing.assert_close(dc.gather(y).detach(), expected, rtol=1e-12, atol=1e-12)


def evaluated(model, x):
    model.eval()
    model(x)


def with_a_frozen_layer(model, x):
    model[1].eval()
    model(x)


ALONE = {
    "saves": (
        lambda model, x, folder: dc.save_checkpoint(folder, 3, model, comm=x.grid.world),
        "save_checkpoint step 3 in .* on rank 0; forward pass of Sequential",
    ),
    "loads": (
        lambda model, x, folder: dc.load_checkpoint(folder, model, comm=x.grid.world),
        "load_checkpoint .* on rank 0; forward pass of Sequential",
    ),
    "evaluates": (
        lambda model, x, _: evaluated(model, x),
        r"forward pass of Sequential: ranks disagree: .*in eval\(\) on rank 0; .*in train\(\) on rank",
    ),
    "freezes a layer": (
        lambda model, x, _: with_a_frozen_layer(model, x),
        r"in train\(\) but for 1 on rank 0; in train\(\) on rank",
    ),
    "is without gradients": (lambda model, x, _: torch.no_grad()(model)(x), "under no_grad on rank 0"),
    "loads weights": (
        lambda model, x, _: model.load_state_dict(model.state_dict(keep_vars=True)),
        "load_state_dict Sequential, 0.weight.* on rank 0; forward pass",
    ),
    "gathers weights": (lambda model, x, _: model.state_dict(), "state_dict Sequential on rank 0; forward pass"),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", ALONE)
def test_what_one_rank_does_alone_is_named_at_once_where_all_calls_are_compared(
    comm, monkeypatch, shared_tmp_path, what
):
    monkeypatch.setattr(agreement, "level", "all")
    alone, match = ALONE[what]
    grid = dc.ProcessGrid(comm, **{"c" if what == "gathers weights" else "h": comm.size})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)).double()
    model, x = dc.parallelize(model, grid), dc.scatter(normal(2, 6, 7, 8), grid)
    model(x)
    for others, expected in (
        (lambda: model(x), match),
        (lambda: dc.scatter(x.local, grid), "ranks are at different operations: .*scatter shape"),
    ):
        call = (lambda: alone(model, x, shared_tmp_path)) if comm.rank == 0 else others
        raises_everywhere(comm, dc.MismatchError, expected, call)


@pytest.mark.ranks(2, 3)
def test_weights_that_no_rank_shares_may_be_saved_by_one_rank_where_all_calls_are_compared(comm, monkeypatch):
    monkeypatch.setattr(agreement, "level", "all")
    grid = dc.ProcessGrid(comm, h=comm.size)
    model = dc.parallelize(nn.Conv2d(2, 2, 3).double(), grid, broadcast=True)
    if comm.rank == 0:
        assert list(model.state_dict()) == ["weight", "bias"]
        with torch.no_grad():
            model(normal(2, 2, 7, 8))
    assert model(dc.scatter(normal(2, 2, 7, 8), grid)).shape == (2, 2, 5, 6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["n", "c", "h"])
def test_a_parallelized_model_is_not_pickled_on_any_grid(comm, axis):
    grid = grid_over(comm, **{axis: 2})
    torch.manual_seed(0)
    model = dc.parallelize(nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).double(), grid)
    x = dc.scatter(torch.ones(2, 2, 4, 4, dtype=torch.float64), grid)
    for attempt in (lambda: torch.save(model, io.BytesIO()), lambda: pickle.dumps(model)):
        with pytest.raises(dc.UnsupportedOperation, match=r"cannot be pickled.*state_dict\(\)"):
            attempt()
    with pytest.raises(dc.UnsupportedOperation, match="a DistTensor cannot be pickled"):
        torch.save(x, io.BytesIO())
    state = model.state_dict()
    image = io.BytesIO()
    torch.save(state, image)
    image.seek(0)
    plain = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).double()
    plain.load_state_dict(torch.load(image))
    assert torch.equal(dc.gather(copy.deepcopy(model).eval()(x)), dc.gather(model.eval()(x)))
    torch.testing.assert_close(dc.gather(model(x)), plain.eval()(torch.ones(2, 2, 4, 4, dtype=torch.float64)))
