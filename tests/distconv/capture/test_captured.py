"""Captured steps leave what eager ones do, bit for bit, and notice what is not what was recorded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
    raises_everywhere(comm, dc.CaptureError, r"SGD's lr is another \(0.03 before, 0.04 now\)", lambda: taken(*batch))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedules_are_refused_inside(comm):
    grid = grids(comm, "nh")[0]
    (batch,) = batches(grid, 1)
    model, _, opt = _stepping(grid, sgd, True)
    for schedule in (torch.optim.lr_scheduler.StepLR(opt, 1), torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, 100)):

        def step(x, t, schedule=schedule):
            step_of(model)(x, t)
            schedule.step()

        raises_everywhere(
            comm, dc.CaptureError, "a scheduler takes its step", lambda step=step: dc.capture(step, *batch)
        )


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
    raises_everywhere(comm, dc.CaptureError, "argument 0 is .*it was", lambda: raising(*large))
    step, eager = dc.capture(step_of(models[0]), *small, on_change="record"), step_of(models[1])
    for batch in (small, large, small, large):
        step(*batch)
        eager(*batch)
    equal(left(models[0]), left(models[1]))


def _other_storage(model, grid):
    model[0].weight.data = model[0].weight.data.clone()


def _other_parameter(model, grid):
    model[0].bias = nn.Parameter(model[0].bias.detach().clone())


def _other_buffer(model, grid):
    model[1].running_mean = model[1].running_mean.clone()


def _frozen(model, grid):
    model[0].requires_grad_(False)


def _evaluated(model, grid):
    model.eval()


def _module_hook(model, grid):
    model[2].register_forward_hook(lambda *_: None)


def _tensor_hook(model, grid):
    model[0].bias.register_hook(lambda g: g * 2)


def _accumulated_hook(model, grid):
    model[0].bias.register_post_accumulate_grad_hook(lambda p: None)


def _attribute(model, grid):
    model[1].momentum = 0.2


def _layer(model, grid):
    model[2] = nn.Identity()


CHANGES = [_other_storage, _other_parameter, _other_buffer, _frozen, _evaluated, _module_hook, _tensor_hook,
           _accumulated_hook, _attribute, _layer]  # fmt: skip


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
    raises_everywhere(comm, dc.CaptureError, "is not what was recorded", lambda: raising(*batch))
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
    raises_everywhere(comm, dc.CaptureError, f"is not what was recorded.*rank {comm.size - 1}", lambda: step(*batch))


@pytest.mark.parametrize(
    ("what", "mode"),
    [
        ("no_sync", dc.no_sync),
        ("torch.no_grad", torch.no_grad),
        ("autocast", lambda: torch.autocast("cpu", torch.bfloat16)),
    ],
)
def test_another_setting_is_noticed(comm, what, mode):
    grid = grids(comm, "nh")[0]
    batch = batches(grid, 1)[0]
    model = dc.parallelize(network(), grid)
    step = dc.capture(lambda x: model(x).detach(), batch[0])

    def call():
        with mode():
            step(batch[0])

    raises_everywhere(comm, dc.CaptureError, what, call)


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


def test_variables_and_attributes_that_the_step_reads_are_looked_at(comm):
    grid = grids(comm, "nh")[0]
    x, _ = batches(grid, 1)[0]
    model, factor = dc.parallelize(network(), grid), 2.0

    class Trainer:
        def __init__(self):
            self.weight, self.steps = 1.0, 0

        def step(self, x):
            loss = model(x).sum() * self.weight
            loss.backward()
            return loss

    def step(x):
        return (model(x) * factor).detach()

    taken = dc.capture(step, x)
    taken(x)
    factor = 3.0
    raises_everywhere(comm, dc.CaptureError, "factor is not what it was", lambda: taken(x))
    trainer = Trainer()
    taken = dc.capture(trainer.step, x)
    trainer.steps += 1
    taken(x)
    trainer.weight = 2.0
    raises_everywhere(comm, dc.CaptureError, r"Trainer\.weight is not what it was", lambda: taken(x))


def test_numbers_in_containers_that_the_step_reads_are_looked_at(comm):
    """On one rank alone, too; what the step changes itself is refused."""
    grid = grids(comm, "nh")[0]
    x, t = batches(grid, 1)[0]
    model, options, count = dc.parallelize(network(), grid), {"factor": 1.0}, [0]

    def step(x, t):
        (F.cross_entropy(model(x), t) * options["factor"]).backward()

    def counting(x, t):
        count[0] += 1
        step(x, t)

    taken = dc.capture(step, x, t)
    taken(x, t)
    options["factor"] += comm.rank == comm.size - 1
    raises_everywhere(comm, dc.CaptureError, r"options\['factor'\] is not what it was", lambda: taken(x, t))
    raises_everywhere(comm, dc.CaptureError, "the step sets count", lambda: dc.capture(counting, x, t))


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
    with pytest.warns(UserWarning, match="recorded for time number 3, since argument 0 is"):
        step(*sizes[2])
    assert recordings(step) == 2


@pytest.mark.cpu
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


@pytest.mark.cpu
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


class Rated(nn.Module):
    rate = 1.0

    def forward(self, x):
        return x * self.rate


@pytest.mark.cpu
def test_attributes_of_a_modules_class_are_looked_at(comm, monkeypatch):
    grid = grids(comm, "n")[0]
    x, _ = batches(grid, 1)[0]
    model = dc.parallelize(nn.Sequential(Rated()), grid)
    taken = dc.capture(lambda x: model(x), x)
    assert torch.equal(taken(x).local, x.local)
    monkeypatch.setattr(Rated, "rate", 2.0)
    raises_everywhere(comm, dc.CaptureError, r"Rated\.rate is not what it was", lambda: taken(x))
