"""Nested values between stages: which are accepted, how the next stage is called, and mini-batches of them."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from distconv.errors import ShapeError
from distconv.layers.sparse import SparseTensor
from distconv.pipeline.stage.structures import Boundary, call_arguments, count_samples, flatten, split_samples

Pair = namedtuple("Pair", "x y")


def values():
    one, two = torch.ones(2, 3), torch.zeros(2)
    return [
        one,
        (one, two),
        [one, two],
        (one,),
        (),
        None,
        {"x": one, "y": None},
        OrderedDict(b=one, a=(two, 3)),
        Pair(one, [two, "name", 1.5, True, torch.float64]),
        (one, {"skips": [two, {"deep": one}]}),
    ]


@pytest.mark.parametrize("value", values(), ids=lambda value: type(value).__name__)
def test_a_nested_value_is_restored_from_its_tensors(value):
    boundary = flatten(value, "x")
    assert all(isinstance(tensor, torch.Tensor) for tensor in boundary.tensors)
    found, expected = tree_flatten(boundary.value()), tree_flatten(value)
    assert found[1] == expected[1]
    assert all(one is other for one, other in zip(found[0], expected[0], strict=True))
    doubled = Boundary([tensor * 2 for tensor in boundary.tensors], boundary.structure).value()
    for one, other in zip(tree_flatten(doubled)[0], expected[0], strict=True):
        assert torch.equal(one, other * 2) if isinstance(other, torch.Tensor) else one is other


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ((torch.ones(1), np.ones(1)), "ndarray"),
        ({"x": object()}, "object"),
        (SparseTensor(torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 1)), "SparseTensor"),
        ([torch.device("cpu")], "device"),
    ],
)
def test_other_objects_raise(value, name):
    with pytest.raises(TypeError, match=f"the output of a stage contains a {name}; use tensors, None, numbers"):
        flatten(value, "the output of a stage")


class Two(nn.Module):
    def forward(self, x, y=None):
        return x, y


class One(nn.Module):
    def forward(self, batch):
        return batch


def test_tuples_and_dictionaries_are_arguments_if_the_signature_accepts_them_and_objects_otherwise():
    x, y = torch.ones(1), torch.zeros(1)
    assert call_arguments(Two(), x) == ((x,), {})
    assert call_arguments(Two(), None) == ((None,), {})
    for several in ((x, y), [x, y]):
        assert call_arguments(Two(), several) == ((x, y), {})
        assert call_arguments(One(), several) == ((several,), {})
        assert call_arguments(nn.Sequential(One()), several) == ((several,), {})
    assert call_arguments(Two(), {"y": y, "x": x}) == ((), {"x": x, "y": y})
    for names in ({"x": x, "z": y}, {"y": y}):
        assert call_arguments(Two(), names) == ((names,), {})
        assert call_arguments(One(), names) == ((names,), {})
    assert call_arguments(One(), {"batch": x}) == ((), {"batch": x})
    assert call_arguments(Two(), {1: x}) == (({1: x},), {})


def test_samples_of_a_mini_batch_are_split_and_other_values_belong_to_all():
    x = {"image": torch.arange(10.0).view(5, 2), "scale": torch.tensor(2.0), "name": "a"}
    target = (torch.arange(5), None)
    assert count_samples("step", x=x, target=target) == 5
    assert count_samples("step", x=x, target=None) == 5
    pieces = split_samples(x, 3)
    assert [len(piece["image"]) for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([piece["image"] for piece in pieces]), x["image"])
    assert all(piece["scale"] is x["scale"] and piece["name"] == "a" for piece in pieces)
    assert split_samples((), 2) == [(), ()] and split_samples(None, 2) == [None, None]


@pytest.mark.parametrize(
    ("x", "target", "words"),
    [
        (torch.ones(3, 1), torch.ones(2), r"step: x \(3, 1\), target \(2,\): tensors must have the same number"),
        ((torch.ones(3), torch.ones(2)), torch.ones(3), r"step: x\[0\] \(3,\), x\[1\] \(2,\), target \(3,\)"),
        (torch.ones(0, 1), torch.ones(0), r"step: x \(0, 1\)"),
        (torch.ones(()), torch.ones(3), r"step: x \(\)"),
        (torch.ones(3), torch.ones(()), r"step: x \(3,\), target \(\)"),
        (None, None, "step: x is a NoneType without tensors; pass samples as tensors"),
        ({"x": torch.tensor(1.0)}, 3, "step: x"),
        (np.ones(3), torch.ones(3), "step: x contains a ndarray; use tensors"),
        (torch.ones(3), ["a", b"b"], "step: target contains a bytes; use tensors"),
    ],
)
def test_a_mini_batch_without_a_number_of_samples_raises(x, target, words):
    with pytest.raises(ShapeError, match=words):
        count_samples("step", x=x, target=target)
