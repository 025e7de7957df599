"""Modules and functions of a run, in the order in which torch calls them."""

import pytest
import torch
import torch.nn.functional as F

from distconv.perfmodel.graph.recorder import FunctionRecorder, module_calls


class Inner(torch.nn.Module):
    def forward(self, x, *, shift):
        return F.relu(x) + shift


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.inner(x * self.scale, shift=2.0)


def test_modules_are_seen_with_their_arguments_and_their_results():
    calls = []
    with module_calls(Outer(), lambda name, _, given: calls.append((name, given[1])), lambda out: calls.append(out)):
        calls.append(Outer()(torch.tensor(-3.0)).item())  # another model
    assert calls == [2.0]
    model, calls = Outer(), []
    with module_calls(
        model, lambda name, _, given: calls.append((name, given[1])), lambda out: calls.append(out.item())
    ):
        model(torch.tensor(1.0))
    assert calls == [("", {}), ("inner", {"shift": 2.0}), 3.0, 3.0]
    model(torch.tensor(1.0))
    assert len(calls) == 4


def test_only_those_that_are_asked_for():
    model, calls = Outer(), []
    inner = lambda name, module: name == "inner"  # noqa: E731
    with module_calls(model, lambda name, *_: calls.append(name), lambda _: None, inner):
        model(torch.ones(()))
    assert calls == ["inner"]


class ModuleRecorder(FunctionRecorder):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        vars(self).setdefault("seen", []).append((self.running_module, func.__name__))
        return func(*args, **(kwargs or {}))


def test_each_function_has_its_module():
    model, x = Outer(), torch.ones(3)
    places = ModuleRecorder()
    with places.record_modules(model):
        model(x)
    assert places.seen == [("", "mul"), ("inner", "relu"), ("inner", "add")]


def test_hooks_go_when_the_run_fails():
    def fail(*_):
        raise RuntimeError("stop")

    model = Outer()
    model.inner.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"), ModuleRecorder().record_modules(model):
        model(torch.ones(3))
    assert not model._forward_pre_hooks and len(model.inner._forward_pre_hooks) == 1
