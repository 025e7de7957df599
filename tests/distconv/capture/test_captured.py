"""Captured steps leave what eager ones do, bit for bit, and notice what differs from its recording."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
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
from tests.distconv.layouts import grid_over, grids, raises_everywhere

pytestmark = pytest.mark.ranks(2)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("to_none", [True, False])
def test_twenty_steps_leave_what_eager_ones_do(comm, optimizer, to_none):
    for grid in grids(comm, "nhc"):
        compare(grid, network, steps=20, optimizer=optimizer, to_none=to_none)


@pytest.mark.cpu
def test_float64_and_layers_without_bias(comm):
    for grid in grids(comm, "nh"):
        data = [(dc.scatter(x.gather().double(), grid), t) for x, t in batches(grid, 3)]
        compare(grid, lambda: network(bias=False).double(), data)


@pytest.mark.ranks(2, 3)
def test_a_plan_with_several_grids(comm):
    plan = dc.Plan({"0": {"n": comm.size}, "3": {"h": comm.size}, "8": {"n": comm.size}})
    grid = grid_over(comm, n=comm.size)
    data = batches(grid, 4, shape=(6, 2, 9, 8))

    def build():
        return dc.parallelize(network(), plan, comm=comm)

    equal(trained(build(), data, sgd, True), trained(build(), data, sgd, False))


def test_recording_changes_nothing(comm):
    for grid in grids(comm, "nhc"):
        for accumulated in (False, True):
            model = dc.parallelize(network(nn.Dropout(0.3)), grid)
            (batch,) = batches(grid, 1)
            if accumulated:
                step_of(model)(*batch)
            torch.manual_seed(3)
            before = left(model)
            grads = [p.grad for p in model.parameters()]
            values = [batch[0].local.clone(), batch[1].local.clone()]
            dc.capture(step_of(model), *batch)
            equal(left(model), before)
            equal([batch[0].local, batch[1].local], values)
            assert all(
                a is b
                for a, b in zip(grads, (p.grad for p in model.parameters()), strict=True)
                if not isinstance(a, dc.DistTensor)
            )


def test_gradients_are_added_to_those_that_are_there(comm):
    """Also where they come and go in one training: each state has a recording."""
    for grid in grids(comm, "nh"):
        models = [dc.parallelize(network(), grid) for _ in range(2)]
        data = batches(grid, 6)
        steps = [step_of(models[0]), dc.capture(step_of(models[1]), *data[0])]
        for number, batch in enumerate(data):
            for model, step in zip(models, steps, strict=True):
                if number in (2, 4):
                    model.zero_grad(set_to_none=number == 2)
                step(*batch)
            equal(left(models[1]), left(models[0]))
        assert recordings(steps[1]) == 2


def _assigned(parameters, optimizer):
    for parameter in parameters:
        parameter.grad = None


def _deleted(parameters, optimizer):
    for parameter in parameters:
        del parameter.grad


def _by_the_optimizer(parameters, optimizer):
    optimizer.zero_grad()


def _zeroed(parameters, optimizer):
    optimizer.zero_grad(set_to_none=False)


def _assigned_where_there_are_any(parameters, optimizer):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = None


@pytest.mark.parametrize("clear", [_assigned, _deleted, _by_the_optimizer, _zeroed, _assigned_where_there_are_any])
def test_a_step_may_clear_gradients_itself(comm, clear):
    """Those of a model that no variable of the step is: recording leaves them, and what is recorded serves."""
    for grid in grids(comm, "nhc"):
        data, found = batches(grid, 5), []
        for capture in (False, True):
            held = {"model": dc.parallelize(network(), grid)}
            optimizer = sgd(held["model"].parameters())

            def step(x, t, held=held, optimizer=optimizer):
                clear(list(held["model"].parameters()), optimizer)
                step_of(held["model"])(x, t)

            step(*data[0])
            before = left(held["model"])
            taken = dc.capture(step, *data[0]) if capture else step
            equal(left(held["model"]), before)
            for batch in data:
                optimizer.step()
                taken(*batch)
            found.append(left(held["model"]))
            assert not capture or recordings(taken) == 1
        equal(*found)


def _stepping(grid, optimizer, first):
    """A model and a step in which its optimizer takes its own, ``first`` without a recording; and the optimizer."""
    model = dc.parallelize(network(), grid)
    opt = optimizer(model.parameters())

    def step(x, t):
        opt.zero_grad()
        loss = step_of(model)(x, t)
        opt.step()
        return loss

    if first:
        step(*batches(grid, 1, seed=8)[0])
    return model, step, opt


def _plain(parameters):
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)


@pytest.mark.parametrize(("optimizer", "first"), [(sgd, True), (_plain, False)])
def test_an_optimizer_may_take_its_step_inside(comm, optimizer, first):
    for grid in grids(comm, "nh"):
        data, found = batches(grid, 5), []
        for capture in (False, True):
            model, step, _ = _stepping(grid, optimizer, first)
            taken = dc.capture(step, *data[0]) if capture else step
            losses = [taken(*batch).local.detach().clone() for batch in data]
            found.append([*losses, *left(model)])
        equal(*found)


def test_an_optimizer_that_has_no_state_yet_is_refused_and_stays_without(comm):
    grid = grids(comm, "nh")[0]
    (batch,) = batches(grid, 1)
    model, step, opt = _stepping(grid, sgd, False)
    before = left(model)
    raises_everywhere(comm, dc.CaptureError, "SGD has other state", lambda: dc.capture(step, *batch))
    assert not opt.state
    equal(left(model), before)
    step(*batch)
    dc.capture(step, *batch)(*batch)


def test_another_learning_rate_is_noticed_where_the_optimizer_steps_inside(comm):
    grid = grids(comm, "nh")[0]
    (batch,) = batches(grid, 1)
    found = []
    for capture in (False, True):
        model, step, opt = _stepping(grid, _plain, False)
        taken = dc.capture(step, *batch, on_change="record") if capture else step
        for rate in (0.1, 0.05, 0.05, 0.02):
            opt.param_groups[0]["lr"] = rate
            taken(*batch)
        found.append(left(model))
    equal(*found)
    opt.param_groups[0]["lr"] = 0.03
    taken = dc.capture(step, *batch)
    opt.param_groups[0]["lr"] = 0.04
    raises_everywhere(comm, dc.CaptureError, "SGD's lr is 0.04, recorded with 0.03", lambda: taken(*batch))


def _classes(x, t):
    return F.mse_loss(x.softmax(1), F.one_hot(t, 3).float())


def _ignoring(x, t):
    return F.cross_entropy(x, t, weight=torch.tensor([1.0, 2.0, 3.0]), ignore_index=2)


@pytest.mark.parametrize("loss_of", [_classes, _ignoring])
def test_losses_that_look_at_labels(comm, loss_of):
    def step_of(model):
        def step(x, t):
            loss = loss_of(model(x), t)
            loss.backward()
            return loss

        return step

    for grid in grids(comm, "nhc"):
        compare(grid, network, steps=4, step_of=step_of)


@pytest.mark.cpu
def test_labels_that_are_no_classes_are_found_in_a_replay(comm):
    grid = grids(comm, "nh")[0]
    t = dc.scatter(torch.tensor([0, 1, 2, 1]), grid, dims="n")
    taken = dc.capture(lambda t: F.one_hot(t, 3), t)
    assert torch.equal(taken(t).gather(), F.one_hot(torch.tensor([0, 1, 2, 1]), 3))
    t.local.fill_(3)
    raises_everywhere(comm, RuntimeError, "Class values must be smaller than num_classes", lambda: taken(t))


def test_old_gradients_stay_what_they_were(comm):
    grid = grids(comm, "nh")[0]
    model = dc.parallelize(network(), grid)
    data = batches(grid, 3)
    step = dc.capture(step_of(model), *data[0])
    step(*data[0])
    held = [p.grad for p in model.parameters()]
    values = [g.clone() for g in held]
    model.zero_grad()
    loss = step(*data[1])
    kept = loss.local.clone()
    model.zero_grad()
    step(*data[2])
    equal(held, values)
    equal([loss.local], [kept])


def test_another_shape_raises_or_is_recorded(comm):
    grid = grids(comm, "nh")[0]
    small, large = batches(grid, 1)[0], batches(grid, 1, shape=(4, 2, 11, 8))[0]
    models = [dc.parallelize(network(), grid) for _ in range(2)]
    raising = dc.capture(step_of(models[0]), *small)
    raises_everywhere(
        comm,
        dc.CaptureError,
        r"argument 0 has shape \(4, 2, 11, 8\), recorded with \(4, 2, 9, 8\)",
        lambda: raising(*large),
    )
    step, eager = dc.capture(step_of(models[0]), *small, on_change="record"), step_of(models[1])
    for batch in (small, large, small, large):
        step(*batch)
        eager(*batch)
    equal(left(models[0]), left(models[1]))


def _other_storage(model, grid):
    model[0].weight.data = model[0].weight.data.clone()


def _other_buffer(model, grid):
    model[1].running_mean = model[1].running_mean.clone()


def _evaluated(model, grid):
    model.eval()


def _layer(model, grid):
    model[2] = nn.Identity()


CHANGES = [_other_storage, _other_buffer, _evaluated, _layer]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(comm, change):
    grid = grids(comm, "nh")[0]
    batch = batches(grid, 1)[0]
    models = [dc.parallelize(network(), grid) for _ in range(2)]
    raising = dc.capture(step_of(models[0]), *batch)
    recording, eager = dc.capture(step_of(models[0]), *batch, on_change="record"), step_of(models[1])
    change(models[0], grid)
    change(models[1], grid)
    before = left(models[0])
    raises_everywhere(comm, dc.CaptureError, "differs from its recording", lambda: raising(*batch))
    equal(left(models[0]), before)
    for _ in range(2):
        recording(*batch)
        eager(*batch)
    equal(left(models[0]), left(models[1]))


@pytest.mark.ranks(2, 3)
def test_a_change_on_one_rank_raises_on_all_where_no_calls_are_compared(comm, monkeypatch):
    monkeypatch.setattr(agreement, "level", "off")
    test_a_change_on_one_rank_raises_on_all(comm, CHANGES[0])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_one_rank_raises_on_all(comm, change):
    grid = grids(comm, "nh")[0]
    batch = batches(grid, 1)[0]
    model = dc.parallelize(network(), grid)
    step = dc.capture(step_of(model), *batch)
    step(*batch)
    if comm.rank == comm.size - 1:
        change(model, grid)
    raises_everywhere(comm, dc.CaptureError, f"differs from its recording.*rank {comm.size - 1}", lambda: step(*batch))


@pytest.mark.ranks(2, 3)
def test_gradients_that_are_missing_on_one_rank_are_no_hang(comm):
    """As one rank's zero_grad would be: all record anew together."""
    grid = grids(comm, "nh")[0]
    batch = batches(grid, 1)[0]
    model = dc.parallelize(network(), grid)
    step = dc.capture(step_of(model), *batch)
    step(*batch)
    if comm.rank == 0:
        model.zero_grad()
    step(*batch)
    assert comm.allreduce(1) == comm.size


@pytest.mark.cpu
def test_a_replay_with_other_numbers_is_refused(comm, monkeypatch):
    """A program that does something else than the step is found at its first replay."""
    grid = grids(comm, "nh")[0]
    batch = batches(grid, 1)[0]
    model = dc.parallelize(network(), grid)
    step = dc.capture(step_of(model), *batch)
    (replay,) = step._replays.values()
    right = replay._take
    replay._take = lambda *given: tuple(t + (comm.rank == 0) * 1e-3 for t in right(*given))
    before = left(model)
    raises_everywhere(comm, dc.CaptureError, "gives other numbers than the step: result 0", lambda: step(*batch))
    equal(left(model), before)  # taken eagerly now, the step adds its gradients once


def test_only_some_options_are_taken(comm):
    with pytest.raises(dc.UnsupportedOperation, match="on_change='warn' must be one of raise, record"):
        dc.capture(lambda: None, on_change="warn")


def test_what_is_returned_has_the_same_structure(comm):
    grid = grids(comm, "nh")[0]
    x, _ = batches(grid, 1)[0]
    model = dc.parallelize(network(), grid).eval()

    @torch.no_grad()
    def step(x):
        y = model(x)
        return {"y": y, "more": [y.sum(), dc.gather(y), None, 3]}, x

    taken = dc.capture(step, x)
    for _ in range(2):
        found, same = taken(x)
        expected, _ = step(x)
        assert same.local is not None
        assert found["more"][2:] == [None, 3]
        equal(
            [found["y"].local, found["more"][0].local, found["more"][1], same.local],
            [expected["y"].local, expected["more"][0].local, expected["more"][1], x.local],
        )
        assert found["y"].dist == expected["y"].dist
        assert F.relu(found["y"]).shape == expected["y"].shape


def test_recordings_are_kept_up_to_a_number(comm, monkeypatch):
    monkeypatch.setattr(captured, "_KEPT", 2)
    grid = grids(comm, "nh")[0]
    model = dc.parallelize(network(), grid)
    sizes = [batches(grid, 1, shape=(4, 2, rows, 8))[0] for rows in (9, 10, 11)]
    step = dc.capture(step_of(model), *sizes[0], on_change="record")
    for batch in sizes[:2]:
        model.zero_grad()
        step(*batch)
    model.zero_grad()
    with pytest.warns(UserWarning, match="recording number 3 of a step, since argument 0 has"):
        step(*sizes[2])
    assert recordings(step) == 2


@pytest.mark.cpu
def test_a_captured_step_in_another_one(comm):
    def make(model):
        inner = dc.capture(lambda x: torch.relu(x), batches(grid, 1)[0][0])

        def step(x, t):
            loss = F.cross_entropy(model(inner(x)), t)
            loss.backward()
            return [loss]

        return step

    for grid in grids(comm, "nh"):
        both(grid, make)


@pytest.mark.cpu
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
        model, batch = dc.parallelize(network(), grid), batches(grid, 1)[0]
        with torch.autocast("cpu", torch.bfloat16):
            make(model)(*batch)  # an eager step, whose casts are there when recording begins
            dc.capture(make(model), *batch)(*batch)


# -- checks against the eager step ------------------------------------------------------------------------------------


def counted(model):
    """A step, and the list to which each of its eager runs adds an element."""
    runs = []

    def step(x, t):
        runs.append(None)
        return step_of(model)(x, t)

    return step, runs


@pytest.mark.cpu
@pytest.mark.parametrize(("every", "checked"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 3, 6]), (1000, [1])])
def test_the_first_replay_and_each_of_some_number_are_compared_with_the_step(comm, every, checked):
    grid = grids(comm, "nh")[0]
    batch = batches(grid, 1)[0]
    model = dc.parallelize(network(), grid)
    step, runs = counted(model)
    taken = dc.capture(step, *batch, check_every=every)
    found = []
    for number in range(1, 8):
        runs.clear()
        model.zero_grad()
        taken(*batch)
        found += [number] * len(runs)
    assert found == checked


def _rate(state, rank):
    state["rate"] = 0.5


def _rate_of_the_last_rank(state, rank):
    state["rate"] = 0.5 if rank == state["last"] else 1.0


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("change", [_rate, _rate_of_the_last_rank])
def test_a_constant_that_has_changed_is_found_by_the_next_check_on_all_ranks(comm, change):
    """It is used up to then: that is the contract. The failed replay changes nothing."""
    grid = grids(comm, "nh")[0]
    x, t = batches(grid, 1)[0]
    model, state = dc.parallelize(network(), grid), {"rate": 1.0, "last": comm.size - 1}

    def step(x, t):
        loss = F.cross_entropy(model(x), t)
        loss.backward()
        return loss, x.local.sum() * state["rate"]

    taken = dc.capture(step, x, t, check_every=4)
    for number in range(1, 4):
        model.zero_grad()
        equal([taken(x, t)[1]], [x.local.sum()])
        if number == 2:
            change(state, comm.rank)
    model.zero_grad()
    before = left(model)
    text = "replay 4 of a captured step gives other numbers than the step: result 1 differs.*learning rate"
    raises_everywhere(comm, dc.CaptureError, text, lambda: taken(x, t))
    equal(left(model), before)


def test_a_counter_is_found_by_the_first_replay(comm):
    grid = grids(comm, "n")[0]
    x, _ = batches(grid, 1)[0]
    numbers = iter(range(100))
    taken = dc.capture(lambda x: x * next(numbers), x)
    raises_everywhere(comm, dc.CaptureError, "result 0 differs", lambda: taken(x))


# -- arguments and results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distributed", [True, False])
def test_arguments_that_require_gradients_get_theirs(comm, distributed):
    """Each argument its own, whichever the example was, with and without a gradient before."""
    grid = grids(comm, "nh")[0]

    def make():
        found = [x for x, _ in batches(grid, 3)]
        found = found if distributed else [x.gather() for x in found]
        return [x.detach().requires_grad_() for x in found]

    def step(x):
        loss = (x * x).sum()
        loss.backward()
        return loss

    eager, captured = make(), make()
    taken = dc.capture(step, captured[0])
    for number in (1, 0, 1, 2, 2):
        step(eager[number])
        taken(captured[number])
    blocks = [[getattr(x.grad, "local", x.grad) for x in each] for each in (captured, eager)]
    equal(*blocks)
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
            return OrderedDict(out=Output(loss, {"y": [y.detach()]}), size=tuple(y.shape), text="a")

        return step

    def call(step, x, t):
        found = step(Batch(x, t), {"x": x})
        assert type(found["out"]) is Output
        assert (found["size"], found["text"]) == ((4, 3), "a")
        return [found["out"].loss, *found["out"].more["y"]]

    for grid in grids(comm, "nh"):
        taken = both(grid, make, call, example=lambda x, t: (Batch(x, t), {"x": x}))
        assert recordings(taken) <= 2
        x, t = batches(grid, 1)[0]
        refused = r"argument 0\.weight is 2.0, recorded as 1.0"
        raises_everywhere(
            comm, dc.CaptureError, refused, lambda taken=taken, x=x, t=t: taken(Batch(x, t, 2.0), {"x": x})
        )


@dataclass
class Unregistered:
    x: object


@dataclass(frozen=True)
class Frozen:
    x: object


OBJECTS = {
    "Unregistered": Unregistered,
    "Frozen": Frozen,
    "SimpleNamespace": lambda y: SimpleNamespace(y=y),
    "set": lambda y: {y},
    "function": lambda y: lambda: y,
}


@pytest.mark.cpu
@pytest.mark.parametrize(("kind", "make"), OBJECTS.items(), ids=OBJECTS)
def test_objects_that_a_replay_cannot_fill_or_compare_are_refused(comm, kind, make):
    grid = grids(comm, "n")[0]
    x, _ = batches(grid, 1)[0]
    refused = f"a result has type {kind}: .*torch.export.register_dataclass"
    raises_everywhere(comm, dc.CaptureError, refused, lambda: dc.capture(lambda x: make(x * 2), x))
    if kind != "function":  # compared by identity
        refused = f"an argument has type {kind}: .*torch.export.register_dataclass"
        raises_everywhere(comm, dc.CaptureError, refused, lambda: dc.capture(lambda x, _: x * 2, x, make(x)))


@pytest.mark.cpu
@pytest.mark.parametrize("given", [{"x": 0}, [0]])
def test_arguments_that_the_step_puts_something_into_are_refused(comm, given):
    grid = grids(comm, "n")[0]
    x, _ = batches(grid, 1)[0]

    def step(x, given):
        if isinstance(given, dict):
            given["y"] = x.sum()
        else:
            given[0] = x.sum()

    raises_everywhere(comm, dc.CaptureError, "puts something into an argument", lambda: dc.capture(step, x, given))


@pytest.mark.cpu
def test_arguments_by_name(comm):
    grid = grids(comm, "n")[0]
    x, _ = batches(grid, 1)[0]

    def step(x, flip=False, *, factor=1.0):
        return (x.flip(1) if flip else x) * factor

    taken = dc.capture(step, x, on_change="record")
    assert torch.equal(taken(x=x).local, x.local)
    assert torch.equal(taken(x, flip=True).local, x.local.flip(1))
    assert recordings(taken) == 2
    raises_everywhere(comm, dc.CaptureError, "factor can only be passed by name", lambda: taken(x, factor=2.0))
    raises_everywhere(comm, TypeError, "unexpected keyword argument 'other'", lambda: taken(x, other=2.0))


def _sparse(x):
    return (torch.ones(3, 3).to_sparse() @ torch.ones(3, 2)) * x.sum()


@pytest.mark.cpu
def test_sparse_tensors_are_refused(comm):
    x, _ = batches(grids(comm, "n")[0], 1)[0]
    raises_everywhere(comm, dc.CaptureError, "layout torch.sparse_coo", lambda: dc.capture(_sparse, x), same_text=False)
