"""Operators take the names that torch has for arguments."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

import distconv.layers  # noqa: F401 - fills the registry
from distconv import dispatch

WITHOUT = frozenset({"out", "out_dtype", "generator", "self", "input", "cudnn_enabled"})
"""Names that no operator need take: for results, of recent versions, and of what comes first."""


def parameters(function):
    """Names of the parameters of ``function``, and whether it takes any others."""
    found = inspect.signature(function).parameters.values()
    others = {p.name for p in found if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return {p.name for p in found} - others, bool(others)


def named_by_torch(function):
    """Names that torch has, from the signature of a Python function or from the schema of another."""
    if inspect.isfunction(function) and not hasattr(function, "__wrapped__"):
        return parameters(function)[0]
    name = getattr(function, "__name__", "")
    packet = getattr(torch.ops.aten, name, None)
    if getattr(torch, name, None) is not function or not hasattr(packet, "overloads"):
        return set()
    return {a.name for a in getattr(packet, packet.overloads()[0])._schema.arguments}


def functions():
    return sorted(dispatch.rules(), key=dispatch.name_of)


def missing(function):
    taken, others = parameters(dispatch.operator_for(function))
    return set() if others else named_by_torch(function) - taken - WITHOUT


def test_the_names_of_torch_are_known():
    assert named_by_torch(F.pixel_shuffle) | named_by_torch(torch.pixel_shuffle) >= {"upscale_factor"}
    assert named_by_torch(F.interpolate) >= {"input", "size", "scale_factor"}


def test_operators_take_the_names_that_torch_has():
    found = {dispatch.name_of(f): sorted(missing(f)) for f in functions() if missing(f)}
    assert not found
    assert sum(bool(named_by_torch(f)) for f in functions()) > 200


@pytest.mark.parametrize("function", [F.pad, F.conv2d], ids=["pad", "conv2d"])
def test_a_missing_name_is_found(function, monkeypatch):
    monkeypatch.setitem(dispatch._RULES, function, dispatch.OperatorRule(lambda input: input))
    assert missing(function)
