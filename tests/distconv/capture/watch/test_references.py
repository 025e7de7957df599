"""What a function names is compared with what it was, and what differs is described."""

from __future__ import annotations

import functools
import types

import pytest
from torch import nn

from distconv.capture.watch.references import References

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
