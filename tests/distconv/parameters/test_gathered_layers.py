"""Networks whose weights are sharded over all axes: losses, weights and errors are those of one process."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import distconv as dc
from distconv.parameters.gathered_layers import _LayerHooks
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.distconv.parameters.bench import weights_over_all_axes
from tests.layers.compare import close

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")]


@pytest.fixture(autouse=True)
def _same_seed_on_all_ranks() -> None:
    torch.manual_seed(0)


class Tied(nn.Module):
    """A language model whose last layer has the weights of the embedding, as a parameter or as an argument."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 11, bias=False) if shared else None
        if self.last is not None:
            self.last.weight = self.table.weight

    def forward(self, x):
        x = torch.tanh(self.hidden(self.table(x)))
        return F.linear(x, self.table.weight) if self.last is None else self.last(x)


class Around(nn.Module):
    """A module, whose first result is taken, and a linear layer; the module may be recomputed in backward."""

    def __init__(self, inner: nn.Module, features: int, call=None) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(features, 3)
        self.call = call or (lambda inner, x: inner(x))

    def forward(self, x):
        y = self.call(self.inner, x)
        return self.last(y[0] if isinstance(y, tuple) else y)


class Odd(nn.Module):
    """Parameters of 0, 1, 3 and 7 elements; one is unused, one is frozen, and one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.one = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(1))
        self.three, self.empty = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(0, 3))
        self.unused = nn.Parameter(torch.randn(7))
        self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)

    def forward(self, x):
        x = self.twice(torch.tanh(self.twice(x)))
        return self.frozen(self.last(x) * self.scale * self.three + self.one) + self.three.norm()


def normed(*norms):
    first, second = norms
    return nn.Sequential(first(nn.Linear(6, 5)), nn.Tanh(), second(nn.Linear(5, 3)))


def block():
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))


NETWORKS = {
    "shared parameter": lambda: Tied(shared=True),
    "parameter of another layer": lambda: Tied(shared=False),
    "attention": lambda: Around(nn.MultiheadAttention(6, 2, batch_first=True), 6, lambda inner, x: inner(x, x, x)),
    "encoder layer": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
    "lstm": lambda: Around(nn.LSTM(6, 5, batch_first=True), 5),
    "checkpoint": lambda: Around(block(), 6, lambda inner, x: checkpoint(inner, x, use_reentrant=False)),
    "reentrant checkpoint": lambda: Around(block(), 6, lambda inner, x: checkpoint(inner, x, use_reentrant=True)),
    "odd sizes": Odd,
    "weight norm": lambda: normed(nn.utils.parametrizations.weight_norm, nn.utils.weight_norm),
    "spectral norm": lambda: normed(nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm),
}


def trained(name, place, *, shard, accumulate=False, clip=False):
    """Train a network for three steps; return its losses, norms and weights."""
    torch.manual_seed(0)
    model, grid = NETWORKS[name]().double(), place
    x = torch.arange(20).reshape(5, 4) * 7 % 11 if "parameter" in name else normal(5, 4, 6)
    if grid is not None:
        model, x = dc.parallelize(model, grid, shard_weights=shard), dc.scatter(x, grid)
    x = x.requires_grad_() if "reentrant" in name else x
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = {}
    for step in range(3):
        optimizer.zero_grad()
        if accumulate:
            with contextlib.nullcontext() if grid is None else dc.no_sync():
                model(x).pow(2).mean().backward()
        loss = model(x).pow(2).mean()
        loss.backward()
        if clip:
            found[f"norm {step}"] = torch.tensor(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        found[f"loss {step}"] = torch.tensor(loss.item())
    with torch.inference_mode():
        found["evaluated"] = torch.tensor(model.eval()(x).sum().item())
    model.train()(x).sum().backward()  # the gathered weights of inference are not used for training
    return found | model.state_dict()


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_as_on_one_process(comm, name: str) -> None:
    expected = trained(name, None, shard=False)
    for grid, shard in weights_over_all_axes(comm):
        found = trained(name, grid, shard=shard)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            close(found[key], value, f"{key} on {grid}, weights sharded over {shard}")


@pytest.mark.parametrize("options", [{"accumulate": True}, {"clip": True}])
def test_gradients_are_accumulated_and_clipped_as_on_one_process(comm, options) -> None:
    for name in ("odd sizes", "parameter of another layer"):
        expected = trained(name, None, shard=False, **options)
        found = trained(name, grid_over(comm, n=comm.size), shard=True, **options)
        for key, value in expected.items():
            close(found[key], value, f"{key} of {name}")


def sharded(comm, model):
    grid = grid_over(comm, n=comm.size)
    return dc.parallelize(model.double(), grid, shard_weights=True), dc.scatter(normal(5, 6), grid)


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ("q", "'q' is not one of the axes r, n, d, h, w"),
        ("n,c", "'c' is not one of the axes r, n, d, h, w; layers shard over c"),
    ],
)
def test_unknown_axes_raise(comm, axes: str, text: str) -> None:
    grid = grid_over(comm, n=comm.size)
    raises_everywhere(
        comm, dc.UnsupportedOperation, text, lambda: dc.parallelize(nn.Linear(6, 3), grid, shard_weights=axes)
    )


@pytest.mark.ranks(8)
def test_axes_that_are_no_neighbours_raise(comm) -> None:
    grid = grid_over(comm, n=2, h=2, w=2)
    text = "leaves out 'h', which lies between these axes in the order of the ranks of n=2,h=2,w=2"
    raises_everywhere(
        comm, dc.UnsupportedOperation, text, lambda: dc.parallelize(nn.Linear(6, 3), grid, shard_weights="n,w")
    )
    assert dc.parallelize(nn.Linear(6, 8), grid, shard_weights="h,w").weight.local.numel() == 6 * 8 / 4


def test_ranks_that_shard_over_different_axes_raise(comm) -> None:
    grid = grid_over(comm, n=comm.size)
    shard = "n" if comm.rank else True
    text = "weights sharded over True: .*on rank 0"
    raises_everywhere(comm, dc.MismatchError, text, lambda: dc.parallelize(nn.Linear(6, 3), grid, shard_weights=shard))


class InPlace(nn.Linear):
    """A layer that limits its weights in each forward pass."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_layer_that_changes_its_weight_raises(comm) -> None:
    model, x = sharded(comm, nn.Sequential(nn.Linear(6, 6), InPlace(6, 3)))
    text = "weight '1.weight' is sharded, and its layer changed it in place"
    raises_everywhere(comm, dc.UnsupportedOperation, text, lambda: model(x))


def test_weights_that_change_between_forward_and_backward_raise_as_in_torch(comm) -> None:
    model, x = sharded(comm, nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
    y = model(x).sum()
    with torch.no_grad():
        model[1].weight *= 2
    raises_everywhere(comm, RuntimeError, "modified by an inplace operation", y.backward)


def test_activations_that_change_between_forward_and_backward_raise_as_in_torch(comm) -> None:
    model, x = sharded(comm, nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
    hidden = model[0](x)
    y = model[1](hidden).sum()
    with torch.no_grad():
        hidden.local.mul_(2)
    raises_everywhere(comm, RuntimeError, "modified by an inplace operation", y.backward)


def test_after_an_error_in_forward_the_parameters_are_back(comm) -> None:
    model, x = sharded(comm, nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
    parameters = list(model.parameters())
    with pytest.raises(dc.ShapeError):
        model[1](model[1](x))
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    model(x).sum().backward()
    assert all(isinstance(p.grad, dc.DistTensor) for p in parameters)


def test_other_tensors_in_place_of_the_parameters_are_used(comm) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 3).double()
    model, x = sharded(comm, nn.Linear(6, 3))
    y = functional_call(model, dict(plain.named_parameters()), (x,))
    close(dc.gather(y.detach()), plain(normal(5, 6)).detach(), "y")


def test_hooks_of_the_caller_get_all_saved_tensors_but_the_weights(comm) -> None:
    torch.manual_seed(0)
    model, x = sharded(comm, nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)))
    saved = []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor.numpy(force=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        y = model(x).pow(2).sum()
    y.backward()
    rows = x.local.shape[0]
    assert saved.count((rows, 6)) == 3  # inputs of the layers, and the result of tanh
    assert not {(6, 6), (4, 6)}.intersection(saved)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    plain(normal(5, 6)).pow(2).sum().backward()
    close(dc.gather(model[0].weight.grad), plain[0].weight.grad, "dL/dw")


def test_a_layer_that_is_parallelized_twice_gathers_once(comm) -> None:
    model, _ = sharded(comm, nn.Linear(6, 3))
    dc.parallelize(model, grid_over(comm, n=comm.size), shard_weights=True)
    hooks = [
        hook for hook in model._forward_pre_hooks.values() if isinstance(getattr(hook, "__self__", 0), _LayerHooks)
    ]
    assert len(hooks) == 1


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "RMSprop": {"momentum": 0.9},
    "Adagrad": {},
    "Adafactor": {},  # uses the mean over rows and columns of a weight
    "LBFGS": {"max_iter": 3},  # uses all weights together
}


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def optimized(name, model, x):
    optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return model.state_dict(), optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_give_the_weights_of_one_process(comm, name: str) -> None:
    expected, _ = optimized(name, small(), normal(5, 6))
    found, _ = optimized(name, *sharded(comm, small()))
    for key, value in expected.items():
        close(found[key], value, key)


def test_checkpoints_of_sharded_weights_resume_with_full_ones_and_back(comm, tmp_path) -> None:
    folder = comm.bcast(tmp_path)
    grid, x = grid_over(comm, n=comm.size), dc.scatter(normal(5, 6), grid_over(comm, n=comm.size))
    model = dc.parallelize(small(), grid, shard_weights=True)
    state, optimizer = optimized("Adam", model, x)
    dc.save_checkpoint(folder, 3, model, optimizer, comm=comm)
    for shard in (False, True):
        other = dc.parallelize(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double(), grid,
                               broadcast=True, shard_weights=shard)  # fmt: skip
        resumed = torch.optim.Adam(other.parameters(), amsgrad=True)
        dc.load_checkpoint(folder, other, resumed, comm=comm)
        for key, value in state.items():
            assert torch.equal(other.state_dict()[key], value), (shard, key)
        saved, loaded = optimizer.state_dict()["state"], resumed.state_dict()["state"]
        assert saved.keys() == loaded.keys()
        assert torch.equal(saved[0]["exp_avg"], loaded[0]["exp_avg"])


def convolutions():
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.Flatten(), nn.Linear(3 * 2 * 5, 3)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("placed", ["ranks without samples", "ranks without rows", "plan", "plan of two layers"])
def test_ranks_without_work_and_plans_train_as_one_process(comm, placed: str) -> None:
    size = comm.size
    x = normal(4 if "plan" in placed else 1, 2, 2, 5)
    target = {
        "ranks without samples": lambda: grid_over(comm, n=size),
        "ranks without rows": lambda: grid_over(comm, h=size),
        "plan": lambda: dc.Plan({"*": {"n": size}, "0": {"h": size}}),
        "plan of two layers": lambda: dc.Plan({"*": {"n": size}}, shard_weights={"*": "n", "2": False}),
    }[placed]()
    shard = None if placed == "plan of two layers" else True
    model, plain = dc.parallelize(convolutions(), target, comm=comm, shard_weights=shard), convolutions()
    grid = target.input_grid(model, comm) if "plan" in placed else target
    for each, given in ((model, dc.scatter(x, grid)), (plain, x)):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(given).pow(2).mean().backward()
            optimizer.step()
    full = {name for name, parameter in model.named_parameters() if not isinstance(parameter, dc.DistTensor)}
    assert full == ({"2.weight", "2.bias"} if placed == "plan of two layers" else set())
    for name, value in plain.state_dict().items():
        close(model.state_dict()[name], value, name)


def test_a_sharded_state_dict_has_the_blocks_and_loads_with_other_blocks(comm) -> None:
    size = comm.size
    model = dc.parallelize(convolutions(), grid_over(comm, n=size), shard_weights=True)
    full = model.state_dict()
    state = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    assert all(isinstance(value, dc.DistTensor) and not value.requires_grad for value in state.values())
    held, largest = (
        sum(value.numel() for value in each) for each in ((v.local for v in state.values()), full.values())
    )
    assert held < 0.8 * largest
    for axes in ({"n": size}, {"h": size}, {"c": size}):
        other = convolutions()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        if "c" in axes and any(extent % size for extent in (4, 3)):
            continue
        dc.parallelize(other, grid_over(comm, **axes), shard_weights=True)
        other.load_state_dict(state)
        for name, value in full.items():
            assert torch.equal(other.state_dict()[name], value), (axes, name)
