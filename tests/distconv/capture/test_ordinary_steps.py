"""Steps as people write them: what they take and return, what they read, Functions of their own, steps in steps."""

from __future__ import annotations

import collections
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.capture.trained import batches, equal, left, network, recordings, sgd
from tests.distconv.layouts import grids, raises_everywhere

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.cpu]


@dataclass
class Batch:
    x: object
    t: object
    weight: float = 1.0


@dataclass
class Output:
    loss: object
    more: dict


def both(
    grid, make, call=lambda step, x, t: step(x, t), between=lambda: None, example=None, around=nullcontext, **options
):
    """What ``make(model)`` leaves in five steps, captured and not; the captured step."""
    found = []
    for captured in (False, True):
        torch.manual_seed(11)
        model, data = dc.parallelize(network(), grid), batches(grid, 5)
        optimizer, step = sgd(model.parameters()), make(model)
        with around():
            taken = dc.capture(step, *(example or (lambda *batch: batch))(*data[0]), **options) if captured else step
        kept = []
        for batch in data:
            optimizer.zero_grad()
            with around():
                kept += [y.local.detach().clone() for y in call(taken, *batch)]
            optimizer.step()
            between()
        found.append([*kept, *left(model)])
    equal(found[1], found[0])
    return taken


def test_arguments_and_results_in_dataclasses_and_dictionaries(comm):
    def make(model):
        def step(batch, more):
            y = model(batch.x)
            loss = F.cross_entropy(y, batch.t) * batch.weight + more["x"].mean()
            loss.backward()
            return collections.OrderedDict(out=Output(loss, {"y": [y.detach()]}))

        return step

    def call(step, x, t):
        out = step(Batch(x, t), collections.defaultdict(int, x=x))["out"]
        assert type(out) is Output
        return [out.loss, *out.more["y"]]

    for grid in grids(comm, "nh"):
        taken = both(grid, make, call, example=lambda x, t: (Batch(x, t), collections.defaultdict(int, x=x)))
        assert len(taken._replays) <= 2  # without gradients and with None, none for each batch
        x, t = batches(grid, 1)[0]
        other = (Batch(x, t, 2.0), collections.defaultdict(int, x=x))
        raises_everywhere(
            comm, dc.CaptureError, "argument 2 is 2.0, it was 1.0", lambda taken=taken, o=other: taken(*o)
        )


OBJECTS = {
    "SimpleNamespace": lambda y: SimpleNamespace(y=y),
    "set": lambda y: {y},
    "list_iterator": lambda y: iter([y]),
    "function": lambda y: lambda: y,
    "mappingproxy": lambda y: type.__dict__["__dict__"].__get__(type("T", (), {"y": y})),
}


@pytest.mark.parametrize(("kind", "make"), OBJECTS.items(), ids=OBJECTS)
def test_results_that_a_replay_cannot_fill_are_refused(comm, kind, make):
    grid = grids(comm, "n")[0]
    model, (x, _) = dc.parallelize(network(), grid).eval(), batches(grid, 1)[0]
    refused = f"the step returns an object of type {kind}"
    raises_everywhere(comm, dc.CaptureError, refused, lambda: dc.capture(torch.no_grad()(lambda x: make(model(x))), x))


def test_numbers_that_are_others_each_time_are_not_returned(comm):
    grid = grids(comm, "n")[0]
    x, _ = batches(grid, 1)[0]
    numbers = iter(range(100))
    refused = "the step returns an object of type int, another one, or with another value, each time"
    raises_everywhere(comm, dc.CaptureError, refused, lambda: dc.capture(lambda x: (x.sum(), next(numbers)), x))
    raises_everywhere(
        comm,
        dc.CaptureError,
        "not return the same each time",
        lambda: dc.capture(lambda x: [x] * (next(numbers) % 7), x),
    )
    assert dc.capture(lambda x: (x.sum(), 3, "a"), x)(x)[1:] == (3, "a")


@pytest.mark.parametrize("how", ["a key", "an element", "an attribute"])
def test_arguments_that_the_step_changes_are_refused(comm, how):
    grid = grids(comm, "n")[0]
    x, _ = batches(grid, 1)[0]
    given = {"a key": {"x": x}, "an element": [x], "an attribute": Batch(x, None)}[how]

    def step(given):
        y = x.sum()
        if how == "a key":
            given["y"] = y
        elif how == "an element":
            given.append(y)
        else:
            given.t = y

    raises_everywhere(comm, dc.CaptureError, "puts something into an argument", lambda: dc.capture(step, given))


def test_an_object_as_an_argument_must_stay_with_all_that_is_in_it(comm):
    grid = grids(comm, "n")[0]
    given = SimpleNamespace(x=batches(grid, 1)[0][0], factor=1.0)

    def step(given):
        return given.x * given.factor

    taken = dc.capture(step, given)
    assert torch.equal(taken(given).local, given.x.local)
    refused = "argument 0, of type SimpleNamespace, is another object, or something else is in it"
    given.factor = 2.0
    raises_everywhere(comm, dc.CaptureError, refused, lambda: taken(given))
    given.factor, given.x = 1.0, given.x * 2
    raises_everywhere(comm, dc.CaptureError, refused, lambda: taken(given))


def test_arguments_by_keyword(comm):
    grid = grids(comm, "n")[0]
    x, _ = batches(grid, 1)[0]

    def step(x, flip=False, *, factor=1.0):
        return (x.flip(1) if flip else x) * factor

    taken = dc.capture(step, x, on_change="record")
    assert torch.equal(taken(x=x).local, x.local)
    assert torch.equal(taken(x, flip=True).local, x.local.flip(1))
    assert recordings(taken) == 2
    raises_everywhere(comm, dc.CaptureError, "factor cannot be one of them", lambda: taken(x, factor=2.0))
    raises_everywhere(comm, TypeError, "unexpected keyword argument 'other'", lambda: taken(x, other=2.0))


def test_a_captured_step_in_another_one(comm):
    def make(model):
        inner = dc.capture(lambda x: torch.relu(x) * FACTOR, batches(grid, 1)[0][0])

        def step(x, t):
            loss = F.cross_entropy(model(inner(x)), t)
            loss.backward()
            return [loss]

        return step

    for grid in grids(comm, "nh"):
        both(grid, make)


FACTOR = 1.0


def scaled(loss, options):
    return loss * options.factor


def test_variables_that_change_are_recorded_anew(comm):
    """With ``on_change="record"``: numbers in an object that only a helper reads, and a rebound tensor."""
    options, mask = SimpleNamespace(factor=1.0), None

    def make(model):
        nonlocal mask
        options.factor, mask = 1.0, batches(grid, 1)[0][0]

        def step(x, t):
            loss = scaled(F.cross_entropy(model(x * mask), t), options)
            loss.backward()
            return [loss]

        return step

    def between():
        nonlocal mask
        options.factor *= 1.5
        mask = mask * 0.5

    for grid in grids(comm, "nh"):
        both(grid, make, between=between, on_change="record")


def test_inside_autocast(comm):
    """Weights that one run has cast are not taken for those of the next."""

    def make(model):
        def step(x, t):
            loss = F.cross_entropy(model(x), t)
            loss.backward()
            return [loss]

        return step

    for grid in grids(comm, "nhc"):
        both(grid, make, around=lambda: torch.autocast("cpu", torch.bfloat16))


class Sign(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad * SLOPE


SLOPE = 1.0


class Halved(torch.autograd.Function):
    """Changes its argument without telling autograd."""

    @staticmethod
    def forward(ctx, x):
        x.data.mul_(0.5)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


class Clamped(torch.autograd.Function):
    """Changes its argument only if that is large, which the first one is not."""

    @staticmethod
    def forward(ctx, x):
        x.data.clamp_(max=1.0)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("function", [Sign, Halved, Clamped])
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
def test_functions_of_a_users(comm, fallback, function):
    for grid in grids(comm, "nh"):

        def make(model):
            SCALE[:] = [1.0, 1.0, 1.0, 1.0, 0.01]

            def step(x, t):
                y = x * 1.0
                z = function.apply(y)
                loss = F.cross_entropy(model(z + y), t)
                loss.backward()
                return [loss, y.detach()]

            return step

        taken = both(grid, make, call=lambda step, x, t: step(x * SCALE.pop(), t), example=lambda x, t: (x * 0.01, t))
        assert recordings(taken) <= 2


SCALE = []
"""By what the next batches are multiplied, from behind."""


@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
def test_a_backward_pass_that_reads_a_variable_is_looked_at(comm, fallback, monkeypatch):
    grid = grids(comm, "n")[0]
    model, (x, t) = dc.parallelize(network(), grid), batches(grid, 1)[0]

    def step(x, t):
        F.cross_entropy(Sign.apply(model(x)), t).backward()

    taken = dc.capture(step, x, t)
    taken(x, t)
    monkeypatch.setitem(globals(), "SLOPE", 2.0)
    raises_everywhere(comm, dc.CaptureError, "SLOPE is not what it was", lambda: taken(x, t))
