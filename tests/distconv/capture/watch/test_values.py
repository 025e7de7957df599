"""Values are the same if they are equal and of one type, and so is what is in them."""

from __future__ import annotations

import types

import torch

from distconv.capture.watch.values import Contents, flattened, mapped, same


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


def test_circles_large_containers_and_what_cannot_change():
    circle, fixed = [1], (1, ("a", 2.0))
    circle.append(circle)
    before = Contents()(circle)
    assert same(Contents()(circle), before)
    circle[0] = 2
    assert not same(Contents()(circle), before)
    assert Contents()(fixed) is fixed
    assert Contents()(large := [0] * 2000) == (list, len(large))
    assert Contents()(function := test_structures_are_taken_apart_and_put_together) is function


def test_attributes_count_by_their_names():
    value = types.SimpleNamespace(a=1, b=types.SimpleNamespace(a=2, c=3))
    named, every = Contents({"a", "b"})(value), Contents()(value)
    value.b.c = 4
    assert same(Contents({"a", "b"})(value), named)
    assert not same(Contents()(value), every)
    value.b.a = 5
    assert not same(Contents({"a", "b"})(value), named)
