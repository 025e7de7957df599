"""Captured steps leave what eager ones do, bit for bit, and notice what differs from its recording."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import SUPPORTED_NODES

import distconv as dc
from distconv.capture import captured
from distconv.communication import agreement
from tests.distconv.capture.trained import (
    adam,
    assert_equal,
    batches,
    block_of,
    capture_one_step,
    compare,
    make_step,
    network,
    recordings,
    sgd,
    training_state,
)
from tests.distconv.layouts import grids, raises_everywhere

pytestmark = pytest.mark.ranks(2)


@pytest.mark.long
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("optimizer", "to_none"), [(sgd, True), (adam, False)])
def test_a_training_leaves_what_an_eager_one_does(comm, optimizer, to_none):
    for grid in grids(comm, "nhc"):
        compare(grid, optimizer=optimizer, to_none=to_none)


def test_recording_changes_nothing(comm):
    for grid in grids(comm, "hc"):
        for accumulated in (False, True):
            model = dc.parallelize(network(nn.Dropout(0.3)), grid)
            ((x, t),) = batches(grid, 1)
            if accumulated:
                make_step(model)(x, t)
            torch.manual_seed(3)
            grads = [p.grad for p in model.parameters()]
            before = [*training_state(model), x.local.clone(), t.local.clone()]
            dc.capture(make_step(model), x, t)
            assert_equal([*training_state(model), x.local, t.local], before)
            now = [p.grad for p in model.parameters()]
            assert all(a is b for a, b in zip(grads, now, strict=True) if not isinstance(a, dc.DistTensor))


def test_gradients_are_added_to_those_that_are_there(comm):
    """Also where they come and go in one training: each state has a recording."""
    for grid in grids(comm, "nh"):
        models = [dc.parallelize(network(), grid) for _ in range(2)]
        data = batches(grid, 6)
        steps = [make_step(models[0]), dc.capture(make_step(models[1]), *data[0])]
        for number, batch in enumerate(data):
            for model, step in zip(models, steps, strict=True):
                if number in (2, 4):
                    model.zero_grad(set_to_none=number == 2)
                step(*batch)
            assert_equal(training_state(models[1]), training_state(models[0]))
        assert recordings(steps[1]) == 2


def _assigned(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = None


def _zeroed_by_the_optimizer(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("clear", [_assigned, _zeroed_by_the_optimizer])
def test_a_step_may_clear_gradients_itself(comm, clear):
    """Those of a model that no variable of the step is: recording leaves them, and what is recorded serves."""
    for grid in grids(comm, "hc"):
        data, found = batches(grid, 3), []
        for capture in (False, True):
            held = {"model": dc.parallelize(network(), grid)}
            optimizer = sgd(held["model"].parameters())

            def step(x, t, held=held, optimizer=optimizer):
                clear(held["model"], optimizer)
                make_step(held["model"])(x, t)

            step(*data[0])
            before = training_state(held["model"])
            taken = dc.capture(step, *data[0]) if capture else step
            assert_equal(training_state(held["model"]), before)
            for batch in data:
                optimizer.step()
                taken(*batch)
            found.append(training_state(held["model"]))
            assert not capture or recordings(taken) == 1
        assert_equal(*found)


def _stepping(grid, optimizer):
    """A model, a step in which its optimizer takes its own, and the optimizer."""
    model = dc.parallelize(network(), grid)
    opt = optimizer(model.parameters())

    def step(x, t):
        opt.zero_grad()
        loss = make_step(model)(x, t)
        opt.step()
        return loss

    return model, step, opt


def _plain(parameters):
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)


@pytest.mark.parametrize("optimizer", [sgd, _plain])
def test_an_optimizer_may_take_its_step_inside_and_its_learning_rate_is_compared(comm, optimizer):
    for grid in grids(comm, "nh"):
        data, found = batches(grid, 4), []
        for capture in (False, True):
            model, step, opt = _stepping(grid, optimizer)
            step(*data[0])
            taken = dc.capture(step, *data[0], on_change="record") if capture else step
            for batch, opt.param_groups[0]["lr"] in zip(data, (0.1, 0.05, 0.05, 0.1), strict=True):
                loss = taken(*batch).local
            found.append([loss, *training_state(model)])
        assert_equal(*found)
        assert recordings(taken) == 2


def test_old_gradients_and_results_stay_what_they_were(comm):
    grid, model, batch, step = capture_one_step(comm)
    step(*batch)
    held = [p.grad for p in model.parameters()]
    values = [g.clone() for g in held]
    model.zero_grad()
    first, second = batches(grid, 2, seed=6)
    loss = step(*first)
    kept = loss.local.clone()
    model.zero_grad()
    step(*second)
    assert_equal([*held, loss.local], [*values, kept])


def test_each_shape_has_a_recording_and_the_last_ones_are_kept(comm, monkeypatch):
    monkeypatch.setattr(captured, "_MAX_RECORDINGS", 2)
    grid = grids(comm, "nh")[0]
    models = [dc.parallelize(network(), grid) for _ in range(2)]
    small, middle, large = (batches(grid, 1, shape=(4, 2, rows, 8))[0] for rows in (9, 10, 11))
    step, eager = dc.capture(make_step(models[0]), *small, on_change="record"), make_step(models[1])
    for batch in (small, middle, small, middle):
        for model, each in zip(models, (step, eager), strict=True):
            model.zero_grad()
            each(*batch)
        assert_equal(training_state(models[0]), training_state(models[1]))
    models[0].zero_grad()
    message = r"recording number 3 of a step, since argument 0 has shape \(4, 2, 11, 8\), recorded with \(4, 2, 10, 8\)"
    with pytest.warns(UserWarning, match=message):
        step(*large)
    assert recordings(step) == 2


def _other_storage(model):
    model[0].weight.data = model[0].weight.data.clone()


def _evaluated(model):
    model.eval()


@pytest.mark.parametrize("change", [_other_storage, _evaluated])
def test_a_change_is_noticed(comm, change):
    grid, model, batch, raising = capture_one_step(comm)
    twin = dc.parallelize(network(), grid)
    recording, eager = dc.capture(make_step(model), *batch, on_change="record"), make_step(twin)
    change(model)
    change(twin)
    before = training_state(model)
    raises_everywhere(comm, dc.CaptureError, "differs from its recording", lambda: raising(*batch))
    assert_equal(training_state(model), before)
    for _ in range(2):
        recording(*batch)
        eager(*batch)
    assert_equal(training_state(model), training_state(twin))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("level", ["plan", "off"])
def test_a_change_on_one_rank_raises_on_all_even_where_no_calls_are_compared(comm, monkeypatch, level):
    """Nor has the step a distributed argument that says which ranks there are."""
    monkeypatch.setattr(agreement, "level", level)
    _, model, batch, _ = capture_one_step(comm)
    step = dc.capture(lambda: make_step(model)(*batch))
    step()
    if comm.rank == comm.size - 1:
        _other_storage(model)
    raises_everywhere(comm, dc.CaptureError, f"differs from its recording.*rank {comm.size - 1}", step)


@pytest.mark.ranks(2, 3)
def test_gradients_that_are_missing_on_one_rank_are_no_hang(comm):
    """As one rank's zero_grad would be: all record anew together."""
    _, model, batch, step = capture_one_step(comm)
    step(*batch)
    if comm.rank == 0:
        model.zero_grad()
    step(*batch)
    assert comm.allreduce(1) == comm.size


def test_only_some_options_are_taken(comm):
    with pytest.raises(dc.UnsupportedOperation, match="on_change='warn' must be one of raise, record"):
        dc.capture(lambda: None, on_change="warn")


@pytest.mark.cpu
def test_a_captured_step_in_another_one(comm):
    def make(model):
        inner = dc.capture(lambda x: torch.relu(x), batches(grid, 1)[0][0])
        return make_step(lambda x: model(inner(x)))

    for grid in grids(comm, "nh"):
        compare(grid, make=make)


# -- checks against the eager step ------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize(("every", "checked"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 3, 6]), (1000, [1])])
def test_the_first_replay_and_each_of_some_number_are_compared_with_the_step(comm, every, checked):
    x, _ = batches(grids(comm, "nh")[0], 1)[0]
    runs, found = [], []

    def step(x):
        runs.append(None)
        return x * 2

    taken = dc.capture(step, x, check_every=every)
    for number in range(1, 8):
        runs.clear()
        taken(x)
        found += [number] * len(runs)
    assert found == checked


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_constant_that_has_changed_is_found_by_the_next_check_on_all_ranks(comm, everywhere):
    """It is used up to then: that is the contract. The failed replay changes nothing."""
    grid = grids(comm, "nh")[0]
    (x, t), model, state = batches(grid, 1)[0], dc.parallelize(network(), grid), {"rate": 1.0}

    def step(x, t):
        return make_step(model)(x, t), x.local.sum() * state["rate"]

    taken = dc.capture(step, x, t, check_every=4)
    for number in range(1, 4):
        model.zero_grad()
        assert_equal([taken(x, t)[1]], [x.local.sum()])
        if number == 2 and (everywhere or comm.rank == comm.size - 1):
            state["rate"] = 0.5
    model.zero_grad()
    before = training_state(model)
    text = "replay 4 of a captured step differs from the eager step: result 1 is not the same.*learning rate"
    raises_everywhere(comm, dc.CaptureError, text, lambda: taken(x, t))
    assert_equal(training_state(model), before)


# -- arguments and results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distributed", [True, False])
def test_arguments_that_require_gradients_get_theirs(comm, distributed):
    """Each argument its own, whichever the example was, with and without a gradient before."""
    grid = grids(comm, "nh")[0]

    def make():
        found = [x if distributed else x.gather() for x, _ in batches(grid, 3)]
        return [x.detach().requires_grad_() for x in found]

    def step(x):
        loss = (x * x).sum()
        loss.backward()
        return loss

    eager, arguments = make(), make()
    taken = dc.capture(step, arguments[0])
    for number in (1, 0, 1, 2, 2):
        step(eager[number])
        taken(arguments[number])
    assert_equal(*([block_of(x.grad) for x in each] for each in (arguments, eager)))
    assert recordings(taken) == 2


@dataclass
class Batch:
    x: object
    t: object
    weight: float = 1.0


class Output(NamedTuple):
    loss: object
    more: dict


@pytest.mark.cpu
def test_arguments_and_results_in_trees(comm):
    if Batch not in SUPPORTED_NODES:
        torch.export.register_dataclass(Batch)

    def make(model):
        def step(batch, more):
            y = model(batch.x)
            loss = F.cross_entropy(y, batch.t) * batch.weight + more["x"].mean()
            loss.backward()
            y = y.detach()
            return OrderedDict(out=Output(loss, {"y": [y, dc.gather(y), None]}), text="a", size=y.shape, x=batch.x)

        return step

    def call(step, x, t):
        found = step(Batch(x, t), {"x": x})
        y, whole, nothing = found["out"].more["y"]
        assert (type(found["out"]), nothing, found["text"], found["size"]) == (Output, None, "a", (4, 3))
        assert torch.equal(F.relu(y).gather(), F.relu(whole))
        return found

    for grid in grids(comm, "nh"):
        taken = compare(grid, make=make, call=call, example=lambda x, t: (Batch(x, t), {"x": x}))
        assert recordings(taken) <= 2
        x, t = batches(grid, 1)[0]
        refused = r"argument 0\.weight is 2.0, recorded as 1.0"
        other = Batch(x, t, 2.0), {"x": x}
        raises_everywhere(comm, dc.CaptureError, refused, lambda taken=taken, other=other: taken(*other))


@dataclass
class Unregistered:
    x: object


@dataclass(frozen=True)
class Frozen:
    x: object


OBJECTS = {"Unregistered": Unregistered, "Frozen": Frozen, "set": lambda y: {y}, "function": lambda y: lambda: y}


@pytest.mark.cpu
@pytest.mark.parametrize(("kind", "make"), OBJECTS.items(), ids=OBJECTS)
def test_objects_that_a_replay_cannot_fill_or_compare_are_refused(comm, kind, make):
    x, _ = batches(grids(comm, "n")[0], 1)[0]
    refused = f"a result has type {kind}: .*torch.export.register_dataclass"
    raises_everywhere(comm, dc.CaptureError, refused, lambda: dc.capture(lambda x: make(x * 2), x))
    if kind != "function":  # compared by identity
        refused = f"an argument has type {kind}: .*torch.export.register_dataclass"
        raises_everywhere(comm, dc.CaptureError, refused, lambda: dc.capture(lambda x, _: x * 2, x, make(x)))


@pytest.mark.cpu
@pytest.mark.parametrize("given", [{0: 0}, [0]])
def test_arguments_that_the_step_puts_something_into_are_refused(comm, given):
    x, _ = batches(grids(comm, "n")[0], 1)[0]

    def step(x, given):
        given[0] = x.sum()

    raises_everywhere(comm, dc.CaptureError, "stores a value in an argument", lambda: dc.capture(step, x, given))


@pytest.mark.cpu
def test_arguments_by_name(comm):
    x, _ = batches(grids(comm, "n")[0], 1)[0]

    def step(x, flip=False, *, factor=1.0):
        return (x.flip(1) if flip else x) * factor

    taken = dc.capture(step, x, on_change="record")
    assert torch.equal(taken(x=x).local, x.local)
    assert torch.equal(taken(x, flip=True).local, x.local.flip(1))
    assert recordings(taken) == 2
    raises_everywhere(comm, dc.CaptureError, "factor can only be passed by name", lambda: taken(x, factor=2.0))
    raises_everywhere(comm, TypeError, "unexpected keyword argument 'other'", lambda: taken(x, other=2.0))
