"""What is recorded, and what is refused, on all ranks and with the user's line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from tests.distconv.capture.trained import (
    batches,
    both,
    compare,
    equal,
    left,
    network,
    recordings,
    sgd,
    step_of,
    trained,
)
from tests.distconv.layouts import grids, raises_everywhere

pytestmark = pytest.mark.ranks(at_least=2, at_most=3)


class Checkpointed(nn.Module):
    """A network with blocks that are computed again in the backward pass."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.stem, self.first = network(nn.Dropout(0.4))[:1], network(nn.Dropout(0.4))[1:4]
        self.second, self.reentrant = network()[4:], reentrant
        self.third = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        x = checkpoint(self.first, self.stem(x), use_reentrant=self.reentrant)
        return self.second(checkpoint(self.third, x, use_reentrant=self.reentrant))


LAYERS = {
    "dropout": lambda: nn.Dropout(0.4),
    "dropout2d": lambda: nn.Dropout2d(0.4),
    "alpha_dropout": lambda: nn.AlphaDropout(0.3),
    "rrelu": lambda: nn.RReLU(),
    "group_norm": lambda: nn.GroupNorm(3, 6),
    "instance_norm": lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
    "max_pool": lambda: nn.MaxPool2d(3, 1, 1),
    "upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "transposed": lambda: nn.ConvTranspose2d(6, 6, 2, stride=2),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_leave_what_eager_ones_do(comm, layer):
    for grid in grids(comm, "nhc"):
        compare(grid, lambda: network(LAYERS[layer]()), steps=4)


def test_a_batch_norm_that_counts_batches_in_python_is_refused(comm):
    """Its momentum is 1 / float(num_batches_tracked)."""
    grid = grids(comm, "nh")[0]
    model = dc.parallelize(network(nn.BatchNorm2d(6, momentum=None)), grid)
    raises_everywhere(
        comm,
        dc.CaptureError,
        "a value is read",
        lambda: dc.capture(step_of(model), *batches(grid, 1)[0]),
        same_text=False,
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_computed_again_draw_the_same_numbers(comm, reentrant):
    for grid in grids(comm, "nh"):
        compare(grid, lambda: Checkpointed(reentrant), steps=4)


def test_noise_from_generators_of_the_users_own(comm):
    for grid in grids(comm, "nh"):
        found = []
        for captured in (False, True):
            generator = torch.Generator().manual_seed(3)
            model = dc.parallelize(network(), grid)

            def step(x, t, model=model, generator=generator):
                noise = torch.empty(4, 2, 9, 8).normal_(generator=generator)
                loss = F.cross_entropy(model(x + 0.1 * noise + torch.rand_like(x)), t)
                loss.backward()
                return loss

            found.append(
                [*trained(model, batches(grid, 4), sgd, captured, step_of=lambda _, s=step: s), generator.get_state()]
            )
        equal(*found)


def test_seeding_inside_is_done_each_time(comm):
    grid = grids(comm, "nh")[0]
    model = dc.parallelize(network(nn.Dropout(0.5)), grid)

    def build(_):
        def step(x, t):
            torch.manual_seed(7)
            loss = F.cross_entropy(model(x), t)
            loss.backward()
            return loss

        return step

    first = trained(model, batches(grid, 3), sgd, False, step_of=build)
    model = dc.parallelize(network(nn.Dropout(0.5)), grid)
    equal(trained(model, batches(grid, 3), sgd, True, step_of=build), first)


def test_constants_that_the_step_writes_to_are_new_each_time(comm):
    grid = grids(comm, "nh")[0]

    def build(model):
        def step(x, t):
            total = torch.tensor(0.5)
            loss = F.cross_entropy(model(x), t)
            total += loss.gather() if isinstance(loss, dc.DistTensor) else loss
            total.backward()
            return loss + torch.tensor([1.0, 2.0]).sum()

        return step

    data = batches(grid, 4)
    first = trained(dc.parallelize(network(), grid), data, sgd, False, step_of=build)
    equal(trained(dc.parallelize(network(), grid), data, sgd, True, step_of=build), first)


def _item(model, x, t):
    return model(x).sum().item()


def _branch(model, x, t):
    return model(x) if model(x).sum() > 1 else x


def _nonzero(model, x, t):
    return torch.nonzero(dc.gather(x) > 0)


def _masked(model, x, t):
    return x[x > 0]


def _unique(model, x, t):
    return torch.unique(t)


def _printed(model, x, t):
    return f"{model(x).sum()}"


def _array(model, x, t):
    return dc.gather(model(x).detach()).numpy()


def _list(model, x, t):
    return model(x).detach().sum().tolist()


def _message(model, x, t):
    return x.grid.world.allreduce(float(model(x).sum()))


def _memory(model, x, t):
    y = torch.zeros(3)
    y.data = torch.ones(3)
    return y


def _graph_left(model, x, t):
    return model(x)


REFUSED = {
    _item: "a value is read",
    _branch: "a value is read",
    _nonzero: "a shape that depends on values",
    _masked: "a shape that depends on values",
    _unique: "a shape that depends on values",
    _printed: "a value is read",
    _array: r"a value is read in Python \(numpy",
    _list: "a value is read",
    _message: "a value is read",
    _memory: "other memory",
    _graph_left: "needs a backward pass",
}


@pytest.mark.parametrize("step", REFUSED)
def test_what_cannot_be_recorded_raises_on_all_ranks_with_the_line(comm, step):
    grid = grids(comm, "nh")[0]
    batch = batches(grid, 1)[0]
    model = dc.parallelize(network(), grid)
    before = left(model)
    text = raises_everywhere(
        comm,
        dc.CaptureError,
        f"test_recorder.py, line.*{REFUSED[step]}",
        lambda: dc.capture(lambda *b: step(model, *b), *batch),
    )
    assert f"{__file__}, line " in text
    equal(left(model), before)


def test_a_value_that_one_rank_reads_raises_on_all(comm):
    grid = grids(comm, "nh")[0]
    x, _ = batches(grid, 1)[0]
    model = dc.parallelize(network(), grid)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        if comm.rank == comm.size - 1:
            loss.item()
        return loss

    raises_everywhere(
        comm, dc.CaptureError, f"a value is read.*rank {comm.size - 1}|a value is read", lambda: dc.capture(step, x)
    )


def test_prints_of_values_in_hooks(comm):
    grid = grids(comm, "nh")[0]
    batch = batches(grid, 1)[0]
    model = dc.parallelize(network(), grid)
    model[3].register_full_backward_hook(lambda module, into, out: print(f"{out[0].mean():.3f}"))
    raises_everywhere(comm, dc.CaptureError, "a value is read", lambda: dc.capture(step_of(model), *batch))


@pytest.mark.cpu
def test_an_error_of_the_step_is_its_own_and_leaves_nothing(comm):
    grid = grids(comm, "nh")[0]
    x, t = batches(grid, 1)[0]
    model = dc.parallelize(network(), grid)
    before = left(model)

    def step(x):
        F.cross_entropy(model(x), t).backward()
        raise KeyError("mine")

    raises_everywhere(comm, KeyError, "mine", lambda: dc.capture(step, x))
    equal(left(model), before)
    wrong = dc.scatter(torch.full((4,), 7), grid, dims="n")
    raises_everywhere(comm, dc.LabelError, "out of bounds", lambda: dc.capture(step_of(model), x, wrong))
    taken = dc.capture(step_of(model), x, t)
    taken(x, t)
    raises_everywhere(comm, dc.LabelError, "Target 7 is out of bounds", lambda: taken(x, wrong))
    model.zero_grad()
    twin = dc.parallelize(network(), grid)
    twin.load_state_dict(model.state_dict())
    taken(x, t)
    step_of(twin)(x, t)
    equal(left(model), left(twin))


class Sign(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Halved(torch.autograd.Function):
    """Changes its argument without telling autograd."""

    @staticmethod
    def forward(ctx, x):
        x.data.mul_(0.5)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.cpu
@pytest.mark.parametrize("function", [Sign, Halved])
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
def test_functions_of_a_users(comm, fallback, function):
    for grid in grids(comm, "nh"):

        def make(model):
            def step(x, t):
                y = x * 1.0
                z = function.apply(y)
                loss = F.cross_entropy(model(z + y), t)
                loss.backward()
                return [loss, y.detach()]

            return step

        assert recordings(both(grid, make)) <= 2
