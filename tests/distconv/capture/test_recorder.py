"""Recorded operations, and errors on all ranks with the user's line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from tests.distconv.capture.trained import (
    assert_equal,
    batches,
    capture_one_step,
    compare,
    make_step,
    network,
    recordings,
    training_state,
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
    "dropout": lambda: (nn.Dropout(0.4), nn.Dropout2d(0.4), nn.AlphaDropout(0.3), nn.RReLU()),
    "norm": lambda: (nn.GroupNorm(3, 6), nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
    "resized": lambda: (nn.MaxPool2d(3, 1, 1), nn.ConvTranspose2d(6, 6, 2, stride=2)),
    "upsample": lambda: (nn.Upsample(scale_factor=2, mode="bilinear"),),
}


@pytest.mark.long
@pytest.mark.parametrize("layers", LAYERS)
def test_layers_leave_what_eager_ones_do(comm, layers):
    for grid in grids(comm, "hc"):
        compare(grid, lambda: network(*LAYERS[layers]()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_computed_again_draw_the_same_numbers(comm, reentrant):
    for grid in grids(comm, "nh"):
        compare(grid, lambda: Checkpointed(reentrant))


def in_two_halves(model):
    """A step that is taken twice before the optimizer's."""

    def step(x, t):
        with dc.no_sync():
            make_step(model)(x, t)
        return make_step(model)(x * 0.5, t)

    return step


def in_half_precision(model):
    def step(x, t):
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = F.cross_entropy(model(x), t)
        loss.backward()
        return loss

    return step


def with_numbers(model):
    """Numbers of Python, tensors that are made of them and written to, and random ones."""

    def loss_of(y, t):
        weight = torch.tensor([1.0, 2.0, 0.5]).to(t.device)
        weight.mul_(torch.tensor(1.5))
        return F.cross_entropy(y, t, weight=weight) * torch.tensor(0.5)

    return lambda x, t: make_step(model, loss_of)(x * torch.rand(1, device=x.device), t)


def ignoring_a_class(model):
    weight = torch.tensor([1.0, 2.0, 3.0])
    return make_step(model, lambda y, t: F.cross_entropy(y, t, weight=weight, ignore_index=2))


def with_a_penalty(model):
    """A loss whose gradient has a gradient."""

    def step(x, t):
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(model(x), t)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.pow(2).sum()
        loss.backward()
        return loss

    return step


def seeded(model):
    def step(x, t):
        torch.manual_seed(7)
        return make_step(model)(F.dropout(x), t)

    return step


STEPS = [in_two_halves, in_half_precision, with_numbers, with_a_penalty]


@pytest.mark.parametrize("make", [*STEPS, ignoring_a_class, seeded])
def test_steps_of_other_kinds(comm, make):
    for grid in grids(comm, "h"):
        compare(grid, make=make)


def test_steps_inside_no_sync_and_outside_have_recordings_of_their_own(comm):
    def accumulated(step, *batch):
        with dc.no_sync():
            step(*batch)
        return step(*batch)

    for grid in grids(comm, "nc"):
        compare(grid, call=accumulated, on_change="record")


def test_noise_from_generators_of_the_users_own(comm):
    def make(model):
        generators.append(torch.Generator().manual_seed(3))

        def step(x, t, generator=generators[-1]):
            noise = torch.empty(4, 2, 9, 8).normal_(generator=generator)
            return make_step(model)(x + 0.1 * noise + torch.rand_like(x), t)

        return step

    for grid in grids(comm, "nh"):
        generators = []
        compare(grid, make=make)
        assert_equal(*([generator.get_state()] for generator in generators))


def _memory(model, x, t):
    y = torch.zeros(3)
    y.data = torch.ones(3)
    return y


def _printed_in_a_hook(model, x, t):
    y = model(x)
    y.register_hook(lambda grad: print(f"{grad.mean():.3f}"))
    y.sum().backward()


@torch.library.custom_op("distconv_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


OUTSIDE = torch.ones(1, requires_grad=True) * 2

VALUE, SHAPE = "a value is read", "a shape that depends on values"
REFUSED = {
    "item": (lambda model, x, t: model(x).sum().item(), VALUE),
    "branch": (lambda model, x, t: model(x) if model(x).sum() > 1 else x, VALUE),
    "printed": (lambda model, x, t: f"{model(x).sum()}", VALUE),
    "printed in a hook": (_printed_in_a_hook, VALUE),
    "array": (lambda model, x, t: dc.gather(model(x).detach()).numpy(), rf"{VALUE} in Python \(numpy"),
    "average of batch norm": (lambda model, x, t: nn.BatchNorm2d(2, momentum=None)(x), VALUE),
    "nonzero": (lambda model, x, t: torch.nonzero(dc.gather(x) > 0), SHAPE),
    "masked": (lambda model, x, t: x[x > 0], SHAPE),
    "unique": (lambda model, x, t: torch.unique(t), SHAPE),
    "sparse": (lambda model, x, t: torch.ones(3, 3).to_sparse() @ torch.ones(3, 2), "layout torch.sparse_coo"),
    "operator of the user's own": (
        lambda model, x, t: doubled(torch.ones(3)),
        "distconv_tests::doubled is not an operator of torch",
    ),
    "graph from before": (
        lambda model, x, t: torch.ones(3) * OUTSIDE,
        "an autograd graph from outside the step. Call detach",
    ),
    "memory": (_memory, "the memory of a tensor is replaced"),
    "graph": (lambda model, x, t: model(x), "requires a backward pass"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_recorded_raises_on_all_ranks_with_the_line(comm, what):
    grid = grids(comm, "nh")[0]
    batch = batches(grid, 1)[0]
    model = dc.parallelize(network(), grid)
    step, reason = REFUSED[what]
    before = training_state(model)
    refused = f"{__file__}, line .*{reason}"
    raises_everywhere(comm, dc.CaptureError, refused, lambda: dc.capture(lambda *b: step(model, *b), *batch))
    assert_equal(training_state(model), before)


def test_a_value_that_one_rank_reads_raises_on_all(comm):
    x, _ = batches(grids(comm, "nh")[0], 1)[0]

    def step(x):
        y = x.sum()
        if comm.rank == comm.size - 1:
            y.item()
        return y

    raises_everywhere(comm, dc.CaptureError, "a value is read", lambda: dc.capture(step, x))


@pytest.mark.cpu
def test_values_that_one_rank_cannot_compute_with_raise_on_all_while_recording(comm):
    """Otherwise the other ranks would wait in the sum that follows."""
    dist = dc.Distribution(grids(comm, "h")[0], (None, "h"))
    numbers, divisor = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.int64)
    divisor[-1, -1] = 0
    x, y = dc.scatter(numbers, dist), dc.scatter(divisor, dist)
    raises_everywhere(comm, dc.NumericalError, "ZeroDivision", lambda: dc.capture(lambda x, y: (x // y).sum(), x, y))


@pytest.mark.cpu
def test_an_error_of_the_step_is_its_own_and_leaves_nothing(comm):
    grid, model, (x, t), taken = capture_one_step(comm)
    before = training_state(model)

    def step(x):
        make_step(model)(x, t)
        raise KeyError("mine")

    raises_everywhere(comm, KeyError, "mine", lambda: dc.capture(step, x))
    assert_equal(training_state(model), before)
    wrong = dc.scatter(torch.full((4,), 7), grid, dims="n")
    raises_everywhere(comm, dc.LabelError, "out of bounds", lambda: dc.capture(make_step(model), x, wrong))
    taken(x, t)
    raises_everywhere(comm, dc.LabelError, "Target 7 is out of bounds", lambda: taken(x, wrong))
    model.zero_grad()
    twin = dc.parallelize(network(), grid)
    twin.load_state_dict(model.state_dict())
    taken(x, t)
    make_step(twin)(x, t)
    assert_equal(training_state(model), training_state(twin))


class Sign(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
def test_functions_of_a_users(comm, fallback):
    def make(model):
        def step(x, t):
            y = x * 1.0
            z = Sign.apply(y)
            return make_step(model)(z + y, t), y.detach()

        return step

    for grid in grids(comm, "nh"):
        assert recordings(compare(grid, make=make)) <= 2
