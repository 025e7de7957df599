"""What a recording depends on is compared with what it was, and what differs is described."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.capture.watch import Arguments, Modules, References, Tensors, flattened, mapped, same
from tests.distconv.layouts import grid_over


def test_values_are_the_same_if_equal_and_of_one_type():
    x = torch.ones(1)
    assert same(1, 1)
    assert same((1, "a", (x,)), (1, "a", (x,)))
    assert not same(1, True)
    assert not same(x, torch.ones(1))
    assert not same([1], [1])


def test_structures_are_taken_apart_and_put_together():
    value = {"a": [1, (2, None)], "b": torch.Size([3])}
    assert list(flattened(value)) == [1, 2, None, torch.Size([3])]
    assert mapped(lambda leaf: leaf, value) == value


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


FACTOR = 2.0


class Owner:
    def __init__(self):
        self.scale, self.count, self.model = 1.0, 0, nn.ReLU()

    def step(self, x):
        self.count += 1
        return self.model(x * self.scale) * FACTOR


def test_references_are_those_that_the_code_names(monkeypatch):
    owner = Owner()
    known = References(owner.step)
    assert owner.model in known.values
    assert known.difference() == known.set_by_the_step() == ""
    owner.unrelated = 3
    assert known.difference() == ""
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    assert known.difference() == "FACTOR is not what it was"
    monkeypatch.undo()
    owner.scale = 2.0
    assert known.difference() == "Owner.scale is not what it was"
    owner.scale = 1.0
    owner.count = 1
    assert known.set_by_the_step() == "Owner.count"


def test_a_local_variable_is_not_the_global_one_of_its_name(monkeypatch):
    def step(FACTOR):
        labels = [FACTOR for FACTOR in (FACTOR, "FACTOR")]
        return labels

    known = References(step)
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    assert known.difference() == known.set_by_the_step() == ""


def test_closures_partial_functions_and_lists():
    seen, last = [], None

    def inner(x):
        return x * 2

    def step(weight, x):
        nonlocal last
        last = inner(x)
        seen.append(last)
        return last * weight

    known = References(functools.partial(step, 3.0))
    step(1.0, 2.0)
    assert known.set_by_the_step() in ("last", "seen")
    last = None
    assert known.difference() == "seen is not what it was"  # it is longer


class Config:
    rate = 1.0


class Inner:
    def __init__(self):
        self.rate, self.other = 1.0, 1.0


class Trainer:
    shared = 1.0

    def __init__(self):
        self.inner, self.history, self.rate = Inner(), [], 1.0

    @property
    def double(self):
        return 2 * self.rate

    def loss(self):
        return self.double * self.shared

    def step(self):
        return self.loss()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = {"factor": 1.0}

    def forward(self, x):
        return x * self.options["factor"] * FACTOR


FACTOR = 1.0
constants = types.ModuleType("constants")
constants.RATE = 1.0


def _noticed(change):
    """What References to a step say before and after ``change`` of what it names."""
    options, nested, trainer = {"rate": 1.0, "deep": [1.0, {"rate": 1.0}]}, (1, [2]), Trainer()

    def step(x, given={"rate": 1.0}):  # noqa: B006 - it is the case
        use = trainer.inner.rate * options["rate"] * nested[1][0] * Config.rate * constants.RATE
        return x * use * given["rate"] * trainer.step()

    found = References(step)
    assert found.difference() == ""
    change(options, nested, trainer, step)
    return found.difference()


CHANGES = {
    "a number in a dictionary": (lambda o, n, t, s: o.update(rate=2.0), "options"),
    "a key in a dictionary": (lambda o, n, t, s: o.update(new=2.0), "options"),
    "deep in a dictionary": (lambda o, n, t, s: o["deep"][1].update(rate=2.0), "options"),
    "a list in a tuple": (lambda o, n, t, s: n[1].append(3), "nested"),
    "an attribute of an attribute": (lambda o, n, t, s: setattr(t.inner, "rate", 2.0), "trainer"),
    "an attribute that a method reads through a property": (lambda o, n, t, s: setattr(t, "rate", 2.0), "trainer"),
    "an attribute that hides that of a class": (lambda o, n, t, s: setattr(t, "shared", 2.0), "trainer"),
    "a default": (lambda o, n, t, s: s.__defaults__[0].update(rate=2.0), "a default of an argument of step"),
}


@pytest.mark.parametrize(("change", "name"), CHANGES.values(), ids=CHANGES)
def test_what_is_in_variables_counts(change, name):
    text = _noticed(change)
    assert text.endswith(" is not what it was")
    assert name in text or "Trainer." in text


def test_attributes_of_classes_and_modules_count(monkeypatch):
    for owner, name, said in ((Config, "rate", "Config"), (constants, "RATE", "constants"), (Trainer, "shared", "")):
        with monkeypatch.context() as patch:
            text = _noticed(lambda *_, owner=owner, name=name, patch=patch: patch.setattr(owner, name, 2.0))
        assert said in text
        assert text.endswith(" is not what it was")


def test_attributes_that_the_code_does_not_name_do_not_count():
    def change(options, nested, trainer, step):
        trainer.inner.other = 2.0
        trainer.history.append(1)
        trainer.more = 2.0

    assert _noticed(change) == ""


def test_circles_and_large_containers():
    circle, large = [1], [0] * 2000
    circle.append(circle)

    def step():
        return circle[0] + large[0]

    found = References(step)
    assert found.difference() == ""
    large.append(1)
    assert found.difference() == "large is not what it was"
    large.pop()
    circle[0] = 2
    assert found.difference() == "circle is not what it was"


def test_what_a_step_sets_anew_is_found():
    trainer = Trainer()

    def step(x):
        trainer.last = x
        return x

    found = References(step)
    assert found.set_by_the_step() == ""
    step(1.0)
    assert found.set_by_the_step() == "Trainer.last"
    assert found.difference() == ""


def test_what_is_in_modules_and_what_their_forward_passes_name(monkeypatch):
    module = Scaled()
    known, variables = Modules([module]), References.of_forwards([module, Scaled(), nn.ReLU()])
    assert known.difference() == variables.difference() == ""
    module.options["factor"] = 2.0
    assert known.difference() == "Scaled.options is not what it was"
    module.options["factor"] = 1.0
    assert known.difference() == ""
    monkeypatch.setitem(Scaled.forward.__globals__, "FACTOR", 2.0)
    assert variables.difference() == "FACTOR is not what it was"


def test_modules_are_looked_at_with_their_parts():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    known = Modules([model])
    assert known.modules == [model, model[0], model[1]]
    assert known.difference() == ""
    model[1].eval()
    assert known.difference() == "BatchNorm1d.training is not what it was (True before, False now)"
    model[1].train()
    model[1].eps = float("1e-05")  # an equal number
    assert known.difference() == ""
    handle = model[0].register_forward_pre_hook(lambda *_: None)
    assert known.difference() == "Linear has other parameters, buffers, parts or hooks"
    handle.remove()
    assert known.difference() == ""
    del model[0].bias
    assert known.difference() == "Linear has other parameters, buffers, parts or hooks"


def test_tensors_stay_where_they_are():
    x, w = torch.ones(4, 4), nn.Parameter(torch.ones(4, 4))
    known = Tensors([x, w, x])
    x.mul_(2)
    assert known.difference() == ""
    x.data = x.data.t()
    assert known.difference().endswith("other strides")
    x.data = torch.ones(4, 4)
    assert known.difference().endswith("another storage")
    known = Tensors([w])
    handle = w.register_hook(lambda g: g)
    assert known.difference().endswith("other hooks")
    handle.remove()
    w.requires_grad_(False)
    assert known.difference().endswith("another requires_grad")
    w.data = w.data.view(2, 8)
    assert known.difference().endswith("another shape")
