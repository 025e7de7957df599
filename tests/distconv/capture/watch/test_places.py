"""Places are found in modules and behind variables, and get back what was in them."""

from __future__ import annotations

import sys
import types
from collections import UserDict, defaultdict
from functools import partial

import pytest
import torch
from torch import nn

from distconv.capture.watch.places import Places


class Plain:
    shared = 0

    def __init__(self):
        self.value, self.unnamed = 1, 1


class Slots:
    __slots__ = ("value",)


class Guarded:
    """Nobody may set its attributes but it itself."""

    def __init__(self):
        vars(self)["value"] = 1

    def __setattr__(self, name, value):
        raise AttributeError(name)


def variable(value, names=frozenset({"value", "shared"})):
    """Places behind a variable that holds ``value``."""
    places = Places()
    places.add_variable("v", {"": value}, "", names)
    return places


def _set(key, value):
    return lambda holder: holder.__setitem__(key, value)


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        (lambda: {"a": 1}, _set("a", 2), "v['a']"),
        (lambda: {"a": 1}, _set(None, 2), "v[None]"),
        (lambda: {"a": 1}, lambda d: d.clear(), "v['a']"),
        (lambda: defaultdict(list), lambda d: d[3], "v[3]"),
        (lambda: UserDict(a=1), _set("a", 2), "v['a']"),
        (lambda: [1, 2], lambda values: values.append(3), "v"),
        (lambda: [1, 2], _set(0, 3), "v"),
        (lambda: ([1], 2), lambda pair: pair[0].clear(), "v[0]"),
        (lambda: {"a": [{"b": 1}]}, lambda d: d["a"][0].pop("b"), "v['a'][0]['b']"),
        (Plain, lambda p: setattr(p, "value", 2), "v.value"),
        (Plain, lambda p: delattr(p, "value"), "v.value"),
        (Slots, lambda s: setattr(s, "value", 2), "v.value"),
        (Guarded, lambda g: vars(g).update(value=2), "v.value"),
        (lambda: Plain, lambda kind: setattr(kind, "shared", 2), "v.shared"),
        (lambda: types.SimpleNamespace(value=Plain()), lambda n: setattr(n.value, "value", 2), "v.value.value"),
        (lambda: types.ModuleType("mine"), lambda module: setattr(module, "value", 2), "v.value"),
        (lambda: partial(Plain().__init__), lambda p: setattr(p.func.__self__, "value", 2), "v.value"),
    ],
)
def test_what_is_changed_is_put_back(make, change, name):
    value = make()
    places = variable(value)
    assert not places.changed()
    change(value)
    (place,) = places.changed()
    assert place.name == name
    now = place.now()
    places.put_back()
    assert not places.changed()
    place.put(now)
    assert [each.identity for each in places.changed()] == [place.identity]
    places.put_back()


def test_attributes_that_no_code_names_do_not_count():
    value = Plain()
    places = variable(value)
    value.unnamed = 2
    assert not places.changed()


def test_modules_with_their_hooks():
    """What every module has does not count here: a step that sets that is refused."""
    last, model = None, nn.Sequential(nn.Linear(2, 2))

    def hook(module, args, output):
        nonlocal last
        last = output

    model[0].register_forward_hook(hook)
    places = Places()
    places.add_modules(model.modules())
    model.train(False)
    model(torch.ones(1, 2))
    model[0].features = {"y": last}
    assert [place.name for place in places.changed()] == ["last", "Linear.features"]
    places.put_back()
    assert last is None
    assert not hasattr(model[0], "features")


COUNT = 0


def test_variables_of_code_that_begins(monkeypatch):
    """Objects that a function is given count if they are known: others may have been made in the step."""
    places, known, new = Places(), Plain(), Plain()
    monkeypatch.setattr(f"{__name__}.COUNT", 0)

    def step(one, other):
        global COUNT
        COUNT += 1
        one.value = other.value = 2

    places.add_variable("known", {"": known}, "", frozenset())
    sys.settrace(lambda frame, *_: places.add_frame(frame) if frame.f_code is step.__code__ else None)
    try:
        step(known, new)
    finally:
        sys.settrace(None)
    assert [place.name for place in places.changed()] == ["COUNT", "one.value"]
    places.put_back()
    assert (COUNT, known.value, new.value) == (0, 1, 2)


def test_what_is_added_again_gets_back_what_was_there_first():
    value = {"a": 1}
    places = variable(value)
    value["a"] = 2
    places.add_variable("w", {"": value}, "", frozenset())
    value["a"] = 3
    assert [(place.name, place.before) for place in places.changed()] == [("v['a']", 1)]
    places.put_back()
    assert value == {"a": 1}


def test_of_what_a_hook_refers_to_only_what_it_names_counts():
    owner = Plain()

    def hook(module, args, output):
        owner.value = output

    model = nn.ReLU()
    model.register_forward_hook(hook)
    places = Places()
    places.add_modules([model])
    model(torch.ones(2))
    owner.unnamed = 2
    assert [place.name for place in places.changed()] == ["owner.value"]
