"""Arguments that are not what they were are described; what arguments and results of a captured step may be."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.capture.watch.arguments import Arguments
from tests.distconv.capture.trained import batches, both, network, recordings
from tests.distconv.layouts import grid_over, grids, raises_everywhere


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, 4),
        torch.ones(3, 2).t(),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(2, 3, requires_grad=True),
        torch.ones(9)[3:].view(2, 3),
        nn.Parameter(torch.ones(2, 3)),
    ],
)
def test_another_tensor_is_described(other):
    known = Arguments([torch.ones(2, 3), 5])
    assert known.difference([torch.zeros(2, 3), 5], [torch.zeros(2, 3), 5]) == ""
    assert known.difference([other, 5], [other, 5]).startswith("argument 0 is ")
    assert known.difference([torch.ones(2, 3), 6], [torch.ones(2, 3), 6]) == "argument 1 is 6, it was 5"
    assert known.difference([torch.ones(2, 3)], [torch.ones(2, 3)]) == "other arguments"


def test_arguments_that_are_one_tensor():
    x, y = torch.ones(2), torch.ones(2)
    assert Arguments([x, y]).difference([x, x], [x, x]) == "other arguments are one tensor"
    assert Arguments([x, x]).difference([y, y], [y, y]) == ""


def test_another_distribution_is_described(comm):
    x = torch.ones(4, 4, 4, 4)
    rows, samples = dc.scatter(x, grid_over(comm, h=comm.size)), dc.scatter(x, grid_over(comm, n=comm.size))
    assert Arguments([rows]).difference([rows], [rows]) == ""
    assert bool(Arguments([rows]).difference([samples], [samples])) == (comm.size > 1)


@dataclass
class Batch:
    x: object
    t: object
    weight: float = 1.0


@dataclass
class Output:
    loss: object
    more: dict


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
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
    "mappingproxy": lambda y: MappingProxyType({"y": y}),
}


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("kind", "make"), OBJECTS.items(), ids=OBJECTS)
def test_results_that_a_replay_cannot_fill_are_refused(comm, kind, make):
    grid = grids(comm, "n")[0]
    model, (x, _) = dc.parallelize(network(), grid).eval(), batches(grid, 1)[0]
    refused = f"the step returns an object of type {kind}"
    raises_everywhere(comm, dc.CaptureError, refused, lambda: dc.capture(torch.no_grad()(lambda x: make(model(x))), x))


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
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


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
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


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
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


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
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
