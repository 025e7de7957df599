"""Values are the same if they are equal and of one type, and so is what is in them."""

from __future__ import annotations

import collections
import collections.abc
import contextvars
import functools
import os
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from distconv.capture.watch.values import Contents, changed, place_of_change, same


def test_values_are_the_same_if_equal_and_of_one_type():
    x = torch.ones(1)
    assert same(1, 1)
    assert same((1, "a", (x,)), (1, "a", (x,)))
    assert not same(1, True)
    assert not same(x, torch.ones(1))
    assert not same([1], [1])


def test_circles_large_containers_and_what_cannot_change():
    circle, fixed = [1], (1, ("a", 2.0))
    circle.append(circle)
    before = Contents()(circle)
    assert same(Contents()(circle), before)
    circle[0] = 2
    assert not same(Contents()(circle), before)
    assert Contents()(fixed) is fixed
    large = [0] * 2000
    before = Contents()(large)
    large[0] = 1
    assert same(Contents()(large), before)
    large.append(1)
    assert not same(Contents()(large), before)
    assert Contents()(test_circles_large_containers_and_what_cannot_change) is (
        test_circles_large_containers_and_what_cannot_change
    )


def test_attributes_count_by_their_names():
    value = types.SimpleNamespace(a=1, b=types.SimpleNamespace(a=2, c=3))
    named, every = Contents({"a", "b"})(value), Contents()(value)
    value.b.c = 4
    assert same(Contents({"a", "b"})(value), named)
    assert not same(Contents()(value), every)
    value.b.a = 5
    assert not same(Contents({"a", "b"})(value), named)


class Slots:
    __slots__ = ("__hidden", "rate")

    def __init__(self):
        self.rate = self.__hidden = 1.0

    def hide(self):
        self.__hidden = 2.0

    def loss(self):
        return self.rate


@dataclass(slots=True)
class Options:
    rate: float = 1.0


VARIABLE = contextvars.ContextVar("rate", default=1.0)

CHANGES = {
    "a number in a list": (lambda: [1.0], lambda v: v.append(2.0), "v"),
    "a key": (lambda: {"rate": 1.0}, lambda v: v.update(more=1.0), "v['more']"),
    "a number under a key": (lambda: {"rate": [1.0]}, lambda v: v["rate"].__setitem__(0, 2.0), "v['rate'][0]"),
    "an attribute": (types.SimpleNamespace, lambda v: setattr(v, "rate", 2.0), "v.rate"),
    "another attribute": (lambda: types.SimpleNamespace(a=1), lambda v: setattr(v, "rate", 2.0), "v.rate"),
    "an attribute in a slot": (Slots, lambda v: setattr(v, "rate", 2.0), "v.rate"),
    "a private one": (Slots, lambda v: v.hide(), "v._Slots__hidden"),
    "a slot that is empty now": (Slots, lambda v: delattr(v, "rate"), "v"),
    "a dataclass with slots": (Options, lambda v: setattr(v, "rate", 2.0), "v.rate"),
    "an array": (lambda: np.ones(3), lambda v: v.__imul__(2), "v"),
    "a large array": (lambda: np.ones(5000), lambda v: v.__setitem__(4999, 2), "v"),
    "bytes": (lambda: bytearray(b"a"), lambda v: v.extend(b"b"), "v"),
    "a deque": (lambda: collections.deque([1.0]), lambda v: v.rotate() or v.__setitem__(0, 2.0), "v[0]"),
    "a set": (lambda: {1}, lambda v: v.add(2), "v"),
    "a chain of dictionaries": (lambda: collections.ChainMap({"a": 1}), lambda v: v.update(a=2), "v['a']"),
    "a variable of a context": (lambda: VARIABLE, lambda v: v.set(2.0), "v.get()"),
    "an argument of a partial function": (
        lambda: functools.partial(print, [1.0]),
        lambda v: v.args[0].append(2.0),
        "v.args[0]",
    ),
    "the object of a method": (lambda: Slots().loss, lambda v: setattr(v.__self__, "rate", 2.0), "v.__self__.rate"),
    "os.environ": (lambda: os.environ, lambda v: v.update(OF_A_TEST="1"), "v['OF_A_TEST']"),
}


@pytest.mark.parametrize(("make", "change", "place"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_found_and_its_place_is_named(make, change, place, monkeypatch):
    monkeypatch.setattr(os.environ, "_data", dict(os.environ._data))
    value = make()
    before = Contents()(value)
    assert same(Contents()(value), before)
    assert place_of_change(before, Contents()(value), "v") == changed(before, Contents()(value), "v") == ""
    contextvars.copy_context().run(lambda: _changed(value, change, before, place))


def _changed(value, change, before, place):
    change(value)
    now = Contents()(value)
    assert not same(now, before)
    assert place_of_change(before, now, "v") == place
    assert changed(before, now, "v").startswith(f"{place} is not what it was")


def test_numbers_are_shown():
    before = Contents()({"a": [1.0]})
    assert changed(before, Contents()({"a": [2.0]}), "v") == "v['a'][0] is not what it was (1.0 before, 2.0 now)"
    assert changed(before, Contents()({"a": [[2.0]]}), "v") == "v['a'][0] is not what it was"


class File(collections.abc.Mapping):
    """A mapping that does work."""

    def __getitem__(self, key):
        raise AssertionError("it is read")

    __iter__ = __len__ = __getitem__


def test_a_mapping_that_is_no_dictionary_is_not_looked_into():
    file = File()
    assert Contents()(file) is file
    file.mode = "r"
    assert not same(Contents({"mode"})(file), file)


def test_another_method_of_the_same_object_is_another():
    one = Slots()
    assert not same(Contents()([one.loss]), Contents()([one.hide]))
    assert same(Contents()([one.loss]), Contents()([one.loss]))
