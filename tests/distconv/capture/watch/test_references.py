"""What a function names is compared with what it was, and what differs is described."""

from __future__ import annotations

import functools
import types

import pytest
from torch import nn

from distconv.capture.watch.executed import Executed
from distconv.capture.watch.references import References

FACTOR = 2.0


class Owner:
    def __init__(self):
        self.scale, self.count, self.model = 1.0, 0, nn.ReLU()

    def step(self, x):
        self.count += 1
        return self.model(x * self.scale) * FACTOR


def references(function, *args):
    """Those of ``function``, and of what it calls."""
    executed = Executed()
    with executed.noted(lambda frame: None):
        function(*args)
    return References(function, executed.functions())


def test_references_are_those_that_the_code_names(monkeypatch):
    owner = Owner()
    known = References(owner.step)
    assert owner in known.values
    assert known.difference() == known.set_by_the_step() == ""
    owner.unrelated = 3
    assert known.difference() == ""
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    assert known.difference() == "FACTOR is not what it was (2.0 before, 3.0 now)"
    monkeypatch.undo()
    owner.scale = 2.0
    assert known.difference() == "Owner.scale is not what it was (1.0 before, 2.0 now)"
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
    assert known.set_by_the_step() == "last"
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


constants = types.ModuleType("constants")
constants.RATE = 1.0


def _noticed(change):
    """What References to a step say before and after ``change`` of what it names."""
    options, nested, trainer = {"rate": 1.0, "deep": [1.0, {"rate": 1.0}]}, (1, [2]), Trainer()

    def step(x, given={"rate": 1.0}):  # noqa: B006 - it is the case
        use = trainer.inner.rate * options["rate"] * nested[1][0] * Config.rate * constants.RATE
        return x * use * given["rate"] * trainer.step()

    found = references(step, 1.0)
    assert found.difference() == ""
    change(options, nested, trainer, step)
    return found.difference()


CHANGES = {
    "a number in a dictionary": (lambda o, n, t, s: o.update(rate=2.0), "options['rate']"),
    "a key in a dictionary": (lambda o, n, t, s: o.update(new=2.0), "options['new']"),
    "deep in a dictionary": (lambda o, n, t, s: o["deep"][1].update(rate=2.0), "options['deep'][1]['rate']"),
    "a list in a tuple": (lambda o, n, t, s: n[1].append(3), "nested[1]"),
    "an attribute of an attribute": (lambda o, n, t, s: setattr(t.inner, "rate", 2.0), "trainer.inner.rate"),
    "an attribute that a method reads through a property": (lambda o, n, t, s: setattr(t, "rate", 2.0), "trainer.rate"),
    "an attribute that hides that of a class": (lambda o, n, t, s: setattr(t, "shared", 2.0), "trainer.shared"),
    "a default": (lambda o, n, t, s: s.__defaults__[0].update(rate=2.0), "(step's defaults)[0][0]['rate']"),
}


@pytest.mark.parametrize(("change", "place"), CHANGES.values(), ids=CHANGES)
def test_what_is_in_variables_counts(change, place):
    assert _noticed(change).startswith(f"{place} is not what it was")


def test_attributes_of_classes_and_modules_count(monkeypatch):
    owners = ((Config, "rate", "Config.rate"), (constants, "RATE", "constants.RATE"), (Trainer, "shared", "shared"))
    for owner, name, place in owners:
        with monkeypatch.context() as patch:
            text = _noticed(lambda *_, owner=owner, name=name, patch=patch: patch.setattr(owner, name, 2.0))
        assert place in text


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
    assert found.difference() == "circle[0] is not what it was (1 before, 2 now)"


def test_what_a_step_sets_anew_is_found():
    trainer = Trainer()

    def step(x):
        trainer.last = x
        return x

    found = References(step)
    assert found.set_by_the_step() == ""
    step(1.0)
    assert found.set_by_the_step() == "trainer.last"
    assert found.difference() == ""


def scaled(x):
    return x * FACTOR


def rate_of(options):
    return options.rate


def test_variables_of_functions_that_are_called_count(monkeypatch):
    """Of helpers, of functions that others call, and attributes that a helper reads of its argument."""
    options = Inner()

    def inner(x):
        return x * rate_of(options)

    functions = [inner]

    def step(x):
        return sum(map(functions[0], [scaled(x)]))

    found = references(step, 1.0)
    assert found.difference() == ""
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    assert found.difference() == "FACTOR is not what it was (2.0 before, 3.0 now)"
    monkeypatch.undo()
    options.other = 2.0
    assert found.difference() == ""
    options.rate = 2.0
    assert found.difference() == "options.rate is not what it was (1.0 before, 2.0 now)"
    assert References(step).difference() == ""


def test_attributes_by_their_names_in_texts_count():
    options = Inner()

    def step():
        return getattr(options, "rate")  # noqa: B009 - it is the case

    found = references(step)
    options.rate = 2.0
    assert found.difference() == "options.rate is not what it was (1.0 before, 2.0 now)"


def test_what_is_bound_to_the_step_counts():
    options = {"rate": 1.0}

    def step(given, x):
        return x * given["rate"]

    found = references(functools.partial(step, options), 1.0)
    options["rate"] = 2.0
    assert found.difference().startswith("an argument bound to the step (0)['rate'] is not what it was")


def test_an_attribute_that_comes_counts():
    options = types.SimpleNamespace()

    def step():
        return getattr(options, "rate", 1.0)

    found = references(step)
    assert found.difference() == ""
    options.rate = 2.0
    assert found.difference() == "options.rate is not what it was"
