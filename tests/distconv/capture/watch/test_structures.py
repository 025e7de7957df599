"""Lists, tuples, dictionaries and dataclasses are taken apart and put together; other objects are not."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

import pytest
import torch

from distconv.capture.watch.structures import flattened, mapped, opened, structure

Pair = collections.namedtuple("Pair", "a b")


class Attributes(dict):
    """A dictionary with attributes."""

    __getattr__ = dict.__getitem__


@dataclass
class Output:
    loss: object
    more: list = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    loss: object
    count: int = 0

    def __post_init__(self):
        assert self.count == 0, "it is not made anew"


def _with_default():
    value = collections.defaultdict(list)
    value["a"] = 1
    return value


VALUES = {
    "nested": ({"a": [1, (2, None)], "b": torch.Size([3])}, [1, 2, None, torch.Size([3])]),
    "a named tuple": (Pair(1, [2]), [1, 2]),
    "what torch returns": (torch.tensor([[1.0, 2.0]]).max(1), [torch.tensor([2.0]), torch.tensor([1])]),
    "an ordered dictionary": (collections.OrderedDict(a=1, b=2), [1, 2]),
    "a default dictionary": (_with_default(), [1]),
    "a user's dictionary": (Attributes(a=1, b=(2,)), [1, 2]),
    "a wrapped dictionary": (collections.UserDict(a=1), [1]),
    "a deque": (collections.deque([1, 2], maxlen=2), [1, 2]),
    "a dataclass": (Output(1, [2, 3]), [1, 2, 3]),
    "a frozen dataclass with slots": (Frozen(1), [1, 0]),
}


@pytest.mark.parametrize(("value", "leaves"), VALUES.values(), ids=VALUES)
def test_structures_are_taken_apart_and_put_together(value, leaves):
    assert list(map(str, flattened(value))) == list(map(str, leaves))
    again = mapped(lambda leaf: leaf, value)
    assert type(again) is type(value)
    assert str(again) == str(value)
    assert structure(again) == structure(value)
    assert again is not value
    other = mapped(lambda leaf: [leaf], value)
    assert list(map(str, flattened(value))) == list(map(str, leaves))
    assert list(map(str, flattened(other))) == list(map(str, leaves))
    assert structure(other) != structure(value)


def test_what_else_a_container_has_stays():
    assert mapped(lambda leaf: leaf, _with_default())["new"] == []
    assert mapped(lambda leaf: leaf, collections.deque([1], maxlen=2)).maxlen == 2


@pytest.mark.parametrize("value", [{1}, iter([1]), range(2), "ab", Output, object(), torch.ones(2)], ids=str)
def test_other_objects_are_not_opened(value):
    assert opened(value) is None
    assert list(flattened(value)) == [value]


def test_keys_and_their_order_count():
    assert structure({"a": 1}) != structure({"b": 1})
    assert structure([1]) != structure((1,))
    assert structure([1, 2]) != structure([1])
    assert structure(Output(1)) != structure(Output(1, [1]))
