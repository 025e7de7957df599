"""Real models and odd stages over ranks: the bits of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

from distconv.layers.models import MODELS
from distconv.pipeline import Pipeline, PipelineError, split
from tests.distconv.layouts import normal
from tests.pipeline.training import SGD, assert_trains_as_one_process

# --- Models, cut ---

CUTS = {
    "vgg11_bn": {2: [4], 3: [2, 5], 4: [2, 4, 7]},
    "resnet20": {2: [10], 3: [6, 13], 4: [4, 9, 14]},
}
"""Behind layers; those of the ResNet lie inside of residual blocks, so that a shortcut crosses beside the trunk."""


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("name", "schedule"), [("resnet20", "zero-bubble"), ("resnet20", "stale"), ("vgg11_bn", "1f1b-sno")]
)
def test_a_model_that_is_cut_trains_as_one_process_does(comm, name, schedule):
    torch.manual_seed(0)
    stages = split(MODELS[name](width=2).double(), CUTS[name][comm.size])
    data = [(normal(3, 3, 32, 32, seed=i), torch.tensor([1, 0, 7])) for i in range(3)]
    options = {} if schedule == "stale" else {"microbatches": 2}
    if name == "vgg11_bn":
        for stage in stages:
            stage.eval()  # dropout has other random numbers in a plain loop
    assert_trains_as_one_process(comm, stages, data, schedule, **options)


# --- Stages that do unusual things ---


class Fork(nn.Module):
    """Features, which rows to take (int64), a mask (bool), and a table without gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y, x.argsort(0)[:, 0], x > 0, x.detach().exp()


class Relay(nn.Module):
    """Works on the first and hands the others on, as they are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, y, order, mask, table):
        return F.relu_(self.linear(y)), order, mask, table


class Join(nn.Module):
    def forward(self, y, order, mask, table):
        assert order.dtype is torch.int64 and mask.dtype is torch.bool
        return (y[order] * mask + table).tanh()


class Only(nn.Module):
    """Takes one of several."""

    def __init__(self, index):
        super().__init__()
        self.index = index

    def forward(self, *values):
        return values[self.index]


class Sum(nn.Module):
    def forward(self, x, y):
        return x + y


class Twice(nn.Module):
    """The same object two times."""

    def forward(self, x):
        y = x * 3
        return y, y


class Scaled(nn.Module):
    """A parameter that no graph reaches, one of no dimension, and one that is handed on itself."""

    def __init__(self):
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.scale, self.scale


class Unscaled(nn.Module):
    def forward(self, x, scale):
        return x / (scale + 3)


def frozen(module):
    return module.requires_grad_(False)


ODD = {
    "tuples, integers and tensors without gradient": lambda: [Fork(), Relay(), Relay(), Join()],
    "in place at the start": lambda: [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ELU(inplace=True)],
    "the first in place": lambda: [nn.Identity(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)],
    "no parameters": lambda: [nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(), nn.Identity()],
    "nothing to train": lambda: [nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.Identity()],
    "the first frozen": lambda: [frozen(nn.Linear(4, 4)), frozen(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Tanh()],
    "a frozen one between": lambda: [nn.Linear(4, 4), frozen(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Tanh()],
    "the last frozen": lambda: [nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), frozen(nn.Linear(4, 4))],
    "an output that needs no gradient": lambda: [Fork(), Only(3), nn.Linear(4, 4), nn.Tanh()],
    "an output that nobody uses": lambda: [Fork(), Relay(), Only(0), nn.Linear(4, 4)],
    "one object twice": lambda: [nn.Linear(4, 4), Twice(), Sum(), nn.Linear(4, 4)],
    "a parameter that is handed on": lambda: [nn.Linear(4, 4), Scaled(), Unscaled(), nn.Linear(4, 4)],
}


def unusual_model(name):
    torch.manual_seed(0)
    data = [(normal(5, 4, seed=i), normal(5, 4, seed=9 + i)) for i in range(3)]
    return [part.double() for part in ODD[name]()], data


@pytest.mark.fault(27)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize(("schedule", "microbatches"), [("zero-bubble", 2), ("pipedream", 1)])
def test_a_stage_may_have(comm, name, schedule, microbatches):
    assert_trains_as_one_process(comm, *unusual_model(name), schedule, microbatches, F.mse_loss)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ODD)
def test_a_chunk_may_have(comm, name):
    assert_trains_as_one_process(comm, *unusual_model(name), "interleaved", 2, F.mse_loss)


def test_what_plain_torch_refuses_is_refused_between_chunks_of_one_rank():
    # Tanh needs its output, which the next part overwrites.
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.ReLU(inplace=True)]
    pipe = Pipeline(parts, MPI.COMM_SELF, "interleaved", F.mse_loss, chunks=2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        pipe.step(torch.ones(2, 4), torch.zeros(2, 4))
    assert raised.value.__notes__ == ["rank 0, stage 0: B of micro-batch 0"]


class ScaledInPlace(nn.Module):
    """Begins with an operation in place that is not the same if it is done twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x.mul_(1.5)).tanh()


def halved_in_place(output, target):
    return (output - target.mul_(0.5)).square().mean()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("schedule", ["1f1b-so", "zero-bubble"])
def test_a_first_stage_and_a_loss_that_work_in_place_train_as_one_process(comm, schedule):
    def stages():
        torch.manual_seed(0)
        return [ScaledInPlace().double(), *(nn.Linear(4, 4).double() for _ in range(comm.size - 1))]

    x, target = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    pipe = Pipeline(stages(), comm, schedule, halved_in_place, microbatches=4, optimizer=SGD)
    whole = nn.Sequential(*stages())
    optimizer = SGD(whole.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = halved_in_place(whole(x.clone()), target.clone())
        loss.backward()
        optimizer.step()
        assert pipe.step(x.clone(), target.clone()) == pytest.approx(loss.item(), rel=1e-12)
    pipe.close()


@pytest.mark.ranks(2)
def test_a_loss_that_works_in_place_and_is_computed_twice_trains_as_one_that_does_not(comm):
    def losses(loss):
        torch.manual_seed(0)
        stages = [nn.Linear(4, 4).double() for _ in range(2)]
        pipe = Pipeline(stages, comm, "pipedream", loss, optimizer=SGD, weights="recompute")
        x, target = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
        for _ in range(4):
            pipe.step(x.clone(), target.clone())
        pipe.drain()
        pipe.close()
        return pipe.losses

    assert losses(halved_in_place) == losses(lambda output, target: (output - target * 0.5).square().mean())


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "loss", [lambda y, t: (y.detach() - t).square().mean(), lambda y, t: y.argmax(1).double().mean()]
)
def test_a_loss_without_a_gradient_raises_instead_of_training_nothing(comm, loss):
    pipe = Pipeline([nn.Linear(4, 4).double()], comm, "gpipe", loss, microbatches=2, optimizer=SGD)
    with pytest.raises(PipelineError, match="the loss does not require a gradient"):
        pipe.step(torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64))
