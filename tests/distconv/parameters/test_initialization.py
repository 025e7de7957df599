"""Models that are built on the device meta: values of an ordinary construction, one layer in memory at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.parameters import initialization
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import close

pytestmark = pytest.mark.ranks(at_most=4)


class Net(nn.Module):
    """Layers of several kinds, a shared weight, buffers and a layer without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.fixed = nn.Linear(6, 4).requires_grad_(requires_grad=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.fixed(self.second(self.first(x).tanh()))


def reset(module: nn.Module) -> None:
    module.reset_parameters()


def built(device: str) -> Net:
    torch.manual_seed(0)
    with torch.device(device):
        return Net().double()


def target(comm, kind: str) -> dc.ProcessGrid | dc.Plan:
    return {
        "n": lambda: grid_over(comm, n=comm.size),
        "plan": lambda: dc.Plan({"conv": {"h": comm.size}, "*": {"n": comm.size}}, comm.size),
    }[kind]()


def trained(model: nn.Module, grid: dc.ProcessGrid | None) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    x = normal(5, 2, 7, 6)
    for _ in range(2):
        optimizer.zero_grad()
        model(x if grid is None else dc.scatter(x, grid)).pow(2).mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("kind", ["n", "plan"])
def test_a_meta_model_trains_as_an_ordinary_one(comm, kind: str, shard: bool) -> None:
    plain, model, place = built("cpu"), built("meta"), target(comm, kind)
    parameters = list(model.parameters())
    # Construction draws numbers for the weight that is replaced by a shared one; here only own values are drawn.
    torch.manual_seed(0)
    for module in plain.modules():
        if hasattr(module, "reset_parameters") and module is not plain.second:
            module.reset_parameters()
    with torch.no_grad():
        plain.second.bias.copy_(bias := torch.linspace(-1, 1, 6, dtype=torch.float64))

    def init(module: nn.Module) -> None:
        if module is model.second:  # its weight, which it shares, has its values already
            with torch.no_grad():
                module.bias.copy_(bias)
        else:
            module.reset_parameters()

    torch.manual_seed(0)
    dc.parallelize(model, place, comm=comm, shard_weights=shard, init=init)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.first.weight is model.second.weight
    grid = place.input_grid(model, comm) if isinstance(place, dc.Plan) else place
    expected = trained(plain, None)
    found = trained(model, grid)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        close(found[name], value, name)


def test_only_the_tensors_of_one_layer_are_in_memory_before_they_are_sharded(comm, monkeypatch) -> None:
    """The sizes at each call of ``init``: all layers before have a part of their weights only."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
    held = []

    def init(module: nn.Module) -> None:
        module.reset_parameters()
        parts = (p.local if isinstance(p, dc.DistTensor) else p for p in model.parameters())
        held.append(sum(p.untyped_storage().nbytes() for p in parts if not p.is_meta))

    torch.manual_seed(0)
    dc.parallelize(model, grid_over(comm, n=comm.size), shard_weights=True, init=init)
    one = 4 * (24 * 24 + 24)
    blocks = [-(-24 // comm.size) * 4 * 25 if comm.size > 1 else one] * 4
    assert all(found <= one + sum(blocks[:number]) for number, found in enumerate(held)) and len(held) == 4


def test_ranks_that_initialize_with_different_values_raise_or_take_those_of_rank_0(comm) -> None:
    if comm.size == 1:
        return
    grid = grid_over(comm, n=comm.size)

    def init(module: nn.Module) -> None:
        nn.init.constant_(module.weight, comm.rank)
        nn.init.zeros_(module.bias)

    def parallelized(**given):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 4))
        return dc.parallelize(model, grid, shard_weights=True, init=init, **given)

    raises_everywhere(comm, dc.MismatchError, "'0.weight'", parallelized)
    assert torch.equal(parallelized(broadcast=True).state_dict()["0.weight"], torch.zeros(4, 3))


class Buffered(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.zeros(2, 3).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.uint8, torch.bool])
def test_tensors_that_init_leaves_without_values_raise(comm, dtype: torch.dtype) -> None:
    grid = grid_over(comm, n=comm.size)
    with torch.device("meta"):
        model = Buffered(dtype)
    raises_everywhere(comm, dc.UnsupportedOperation, "init leaves 'table' .Buffered. without values",
                      lambda: dc.parallelize(model, grid, init=lambda m: nn.init.ones_(m.weight)))  # fmt: skip


def test_values_assigned_in_place_through_data_or_as_new_tensors_are_accepted(comm) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Buffered(torch.bool), Buffered(torch.float64))

    def init(module: Buffered) -> None:
        module.weight.data.fill_(2.0)
        if module.table.dtype == torch.bool:
            module.table.fill_(True)
        else:
            module.table = torch.full((2, 3), 5.0)

    dc.parallelize(model, grid_over(comm, n=comm.size), init=init)
    assert model[0].table.all() and (model[1].table == 5).all() and (model[1].weight == 2).all()


def test_a_meta_model_without_init_raises(comm) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    raises_everywhere(comm, dc.UnsupportedOperation, "on the device meta, without values. Pass init=",
                      lambda: dc.parallelize(model, grid_over(comm, n=comm.size)))  # fmt: skip


def test_a_module_without_tensors_on_meta_is_not_initialized(comm) -> None:
    calls = []
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    torch.nn.init.ones_(model[0].weight), torch.nn.init.ones_(model[0].bias)
    dc.parallelize(model, grid_over(comm, n=comm.size), init=calls.append)
    assert not calls and not any(initialization.has_meta_tensors(module) for module in model.modules())


@pytest.mark.ranks(2, 3)
def test_a_tensor_without_values_on_one_rank_raises_on_all(comm) -> None:
    grid = grid_over(comm, n=comm.size)

    def init(module: nn.Module) -> None:
        nn.init.ones_(module.weight)
        if comm.rank:
            nn.init.zeros_(module.bias)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4))
    raises_everywhere(comm, dc.UnsupportedOperation, "init leaves '0.bias' .Linear. without values",
                      lambda: dc.parallelize(model, grid, shard_weights=True, init=init))  # fmt: skip
