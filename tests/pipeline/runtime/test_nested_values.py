"""Mini-batches and boundaries of several tensors, dictionaries, None and numbers: results of one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.errors import ShapeError
from distconv.pipeline import Pipeline, SerialPipeline, split
from tests.distconv.layouts import normal, raises_everywhere
from tests.pipeline.training import SGD, assert_close, assert_same


class Begin(nn.Module):
    """Two inputs, one of them optional; a dictionary with None and a number."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, image, mask=None, scale=1.0):
        y = self.conv(image) * scale
        return {"x": y if mask is None else y * mask, "skip": y.relu(), "mask": mask, "size": tuple(y.shape[-2:])}


class Middle(nn.Module):
    """Keyword arguments; a tuple of a tensor, a dictionary and None."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, stride=2, padding=1)

    def forward(self, *, x, skip, mask, size):
        return self.conv(x), {"skip": [skip, mask], "size": size}, None


class End(nn.Module):
    """Positional arguments; two outputs by name."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 3, 1)

    def forward(self, x, kept, unused):
        assert unused is None
        skip, mask = kept["skip"]
        y = self.conv(torch.cat([F.interpolate(x, size=kept["size"]), skip], 1))
        return {"map": y if mask is None else y * mask, "mean": y.mean((2, 3))}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin, self.middle, self.end = Begin(), Middle(), End()

    def forward(self, image, mask=None, scale=1.0):
        return self.end(*self.middle(**self.begin(image, mask, scale)))


def loss_of(output, target):
    labels, mean = target["labels"], target["mean"]
    return F.cross_entropy(output["map"], labels) + F.mse_loss(output["mean"], mean)


def minibatch(number, kind):
    image = normal(5, 2, 8, 6, seed=number)
    target = {"labels": normal(5, 8, 6, seed=9 + number).gt(0).long(), "mean": normal(5, 3, seed=7 + number)}
    mask = normal(5, 1, 8, 6, seed=3 + number).gt(0).double()
    given = {
        "one": image,
        "positions": (image, mask),
        "names": {"mask": mask, "image": image, "scale": 0.5},
        "a list with None": [image, None, 2.0],
    }
    return given[kind], target


def cut(value, begin, end):
    if isinstance(value, dict):
        return {name: cut(each, begin, end) for name, each in value.items()}
    if isinstance(value, list):
        return [cut(each, begin, end) for each in value]
    return value[begin:end] if isinstance(value, torch.Tensor) else value


def parts(kind, x, target, count):
    """Arguments and targets of each micro-batch, and the share of its samples."""
    for begin, end in [(0, 3), (3, 5)] if count == 2 else [(0, 5)]:
        names = cut(x, begin, end) if kind == "names" else {}
        values = [cut(x, begin, end)] if kind == "one" else [] if names else cut(list(x), begin, end)
        yield values, names, cut(target, begin, end), (end - begin) / 5


def train_plainly(model, kind, count, steps):
    updates, losses = SGD(model.parameters()), []
    for number in range(steps):
        updates.zero_grad()
        total = 0.0
        for values, names, target, share in parts(kind, *minibatch(number, kind), count):
            loss = loss_of(model(*values, **names), target)
            (loss * share).backward()
            total += float(loss.detach()) * share
        updates.step()
        losses.append(total)
    return losses


def new_model():
    torch.manual_seed(0)
    return Model().double()


KINDS = ["one", "positions", "names", "a list with None"]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["1f1b-so", "zero-bubble", "gpipe"])
def test_stages_exchange_dictionaries_none_numbers_and_keyword_arguments(comm, kind, schedule):
    model, alone = new_model(), new_model()
    stages = [model.begin, model.middle, model.end]
    with Pipeline(stages, comm, schedule, loss_of, microbatches=2, optimizer=SGD) as pipe:
        losses = [pipe.step(*minibatch(number, kind)) for number in range(3)]
        pipe.synchronize()
    assert losses == train_plainly(alone, kind, 2, 3)
    assert_same([model], [alone])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("weights", ["newest", "stash", "recompute"])
def test_asynchronous_schedules_exchange_them_too(comm, weights):
    model, alone = new_model(), new_model()
    serial = SerialPipeline([alone.begin, alone.middle, alone.end], loss_of, SGD, weights=weights)
    with Pipeline([model.begin, model.middle, model.end], comm, "stale", loss_of, optimizer=SGD, weights=weights) as p:
        for number, kind in enumerate(KINDS):
            assert p.step(*minibatch(number, kind)) == serial.step(*minibatch(number, kind))
        p.drain()
        serial.drain()
        p.synchronize()
        assert p.losses == serial.losses
    assert_same([model], [alone])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"plans": [{"h": 2}, None, None]}, {"plans": [None, None, {"n": 2}]},
                                     {"replicas": [1, 2, 1]}], ids=str)  # fmt: skip
def test_they_pass_between_grids_and_replicas(comm, kind, options):
    model, alone = new_model(), new_model()
    stages = [model.begin, model.middle, model.end]
    with Pipeline(stages, comm, "1f1b-sno", loss_of, microbatches=2, optimizer=SGD, **options) as pipe:
        losses = [pipe.step(*minibatch(number, kind)) for number in range(3)]
        pipe.synchronize()
    torch.testing.assert_close(losses, train_plainly(alone, kind, 2, 3), rtol=1e-11, atol=1e-12)
    assert_close([model], [alone])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_split_model_takes_them(comm, kind):
    model, alone = new_model(), new_model()
    stages = split(model, ["middle.conv", "end.conv"][: comm.size - 1], minibatch(0, kind)[0])
    with Pipeline(stages, comm, "1f1b-so", loss_of, microbatches=2, optimizer=SGD) as pipe:
        losses = [pipe.step(*minibatch(number, kind)) for number in range(3)]
        pipe.synchronize()
    assert losses == train_plainly(alone, kind, 2, 3)
    assert_same([model], [alone])


@pytest.mark.ranks(1, 2)
def test_chunks_exchange_them_with_and_without_messages(comm):
    model, alone = new_model(), new_model()
    stages = [nn.Sequential(model.begin), model.middle, model.end, nn.Identity()][: 3 if comm.size == 1 else 4]
    chunks = len(stages) // comm.size
    with Pipeline(stages, comm, "interleaved", loss_of, 2, optimizer=SGD, chunks=chunks) as pipe:
        losses = [pipe.step(*minibatch(number, "one")) for number in range(3)]
        pipe.synchronize()
    assert losses == train_plainly(alone, "one", 2, 3)
    assert_same([model], [alone])


@pytest.mark.ranks(2)
def test_a_nested_mini_batch_with_other_numbers_of_samples_raises_on_all_ranks(comm):
    pipe = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], comm, "gpipe", F.mse_loss)
    x, y = torch.ones(3, 2), torch.ones(2, 2)
    raises_everywhere(comm, ShapeError, r"step: x\[0\] \(3, 2\), x\[1\] \(2, 2\)", lambda: pipe.step((x, y), x))
    raises_everywhere(comm, ShapeError, "step: x contains a ndarray", lambda: pipe.step((x, y.numpy()), x))
    pipe.close()


# --- Samples of the caller ---


class HalvesInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(x.mul_(0.5))


def loss_in_place(output, target):
    return F.cross_entropy(output, target.clamp_(max=1))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("schedule", "weights"), [("gpipe", None), ("stale", "newest"), ("stale", "recompute")])
def test_mini_batches_are_not_changed_by_stages_and_losses_that_work_in_place(comm, schedule, weights):
    torch.manual_seed(0)
    stages = [HalvesInPlace().double(), *(nn.ReLU(inplace=True) for _ in range(comm.size - 1))]
    pipe = Pipeline(stages, comm, schedule, loss_in_place, optimizer=SGD, weights=weights)
    x, target = normal(4, 2, 5, 5), normal(4, 5, 5, seed=1).gt(0).long() * 2
    kept = x.clone(), target.clone()
    for _ in range(3):
        pipe.step(x, target)
    pipe.drain()
    assert torch.equal(x, kept[0]) and torch.equal(target, kept[1])
    pipe.close()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("schedule", ["1f1b-so", "zero-bubble"])
@pytest.mark.parametrize("leaf", [True, False])
def test_samples_that_require_a_gradient_receive_it_on_all_ranks(comm, schedule, leaf):
    torch.manual_seed(0)
    stages = [HalvesInPlace().double(), *(nn.Conv2d(3, 3, 1).double() for _ in range(comm.size - 1))]
    options = {2: {}, 3: {"replicas": [2, 1]}, 4: {"plans": [{"h": 3}, None]}}[comm.size]
    stages = stages[:2] if options else stages
    alone = nn.Sequential(*copy.deepcopy(stages))
    x, target = normal(5, 2, 6, 5).requires_grad_(), normal(5, 6, 5, seed=1).gt(0).long()
    expected = x.detach().clone().requires_grad_()
    with Pipeline(stages, comm, schedule, F.cross_entropy, microbatches=2, optimizer=SGD, **options) as pipe:
        for _ in range(2):  # gradients are added
            pipe.step(x if leaf else x * 3, target)
    updates = SGD(alone.parameters())
    for _ in range(2):
        updates.zero_grad()
        F.cross_entropy(alone(expected.clone() if leaf else expected * 3), target).backward()
        updates.step()
    torch.testing.assert_close(x.grad, expected.grad, rtol=1e-10, atol=1e-14)


class TakesSome(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, unused, scale):
        return self.linear(x) * scale


@pytest.mark.ranks(2)
def test_of_several_inputs_those_that_require_a_gradient_receive_it(comm):
    torch.manual_seed(0)
    stages = [TakesSome().double(), nn.Tanh()]
    x, unused, scale = normal(4, 3).requires_grad_(), normal(4, 3).requires_grad_(), torch.tensor(1.5).requires_grad_()
    with Pipeline(stages, comm, "gpipe", F.mse_loss, microbatches=3) as pipe:
        pipe.step((x, unused, scale), normal(4, 3, seed=2))
    one, other = x.detach().clone().requires_grad_(), scale.detach().clone().requires_grad_()
    F.mse_loss(stages[1](stages[0](one, None, other)), normal(4, 3, seed=2)).backward()
    torch.testing.assert_close(x.grad, one.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(scale.grad, other.grad)
    assert unused.grad is None


@pytest.mark.ranks(2)
def test_a_gradient_of_samples_raises_with_an_asynchronous_schedule(comm):
    pipe = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], comm, "stale", F.mse_loss)
    x = torch.ones(3, 2, requires_grad=True)
    raises_everywhere(comm, dc.pipeline.ScheduleError, "x requires a gradient, which stale", lambda: pipe.step(x, x))
    pipe.close()
