"""Graphs of torch.fx, and errors for models that such a graph cannot repeat."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.layers.models import MODELS
from distconv.pipeline.splitting.fx_graph import trace_steps
from distconv.pipeline.splitting.graph_cuts import COMPUTATIONS, SplitError
from distconv.pipeline.splitting.split import split
from tests.pipeline.splitting.modules import linears, model_of


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rejected_case(name, forward, cuts, message, **modules):
    return pytest.param(model_of(forward, **modules), cuts, message, id=name)


def _autograd_off(self, x):
    with torch.no_grad():
        x = self.a(x)
    return self.b(x)


class _Same(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 1)
    backward = staticmethod(lambda ctx, gradient: gradient)


def _buffer_replaced(self, x):
    self.count = self.count + 1
    return self.b(self.a(x))


def _asks_for_its_class(self, x):
    x = self.a(x)
    return self.b(x) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize(
    ("model", "cuts", "message"),
    [
        rejected_case(
            "called_twice",
            lambda self, x: self.b(self.a(self.a(x))),
            ["a"],
            "cut 'a': the module is called 2 times",
            **linears("a", "b"),
        ),
        rejected_case(
            "shared_buffer",
            lambda self, x: self.norm(self.b(self.norm(self.a(x)))),
            ["b"],
            "'norm.running_mean' is used by stages 0 and 1; cut where one stage has all its uses",
            norm=nn.BatchNorm1d(3),
            **linears("a", "b"),
        ),
        rejected_case(
            "branch",
            lambda self, x: self.b(x) if self.a(x).sum() > 0 else x,
            ["b"],
            r"cannot follow test_fx_graph.py:\d+: .*self.a\(x\).sum\(\) > 0.* list of stages by hand",
            **linears("a", "b"),
        ),
        rejected_case(
            "buffer_replaced",
            _buffer_replaced,
            ["b"],
            "it replaces a buffer",
            count=torch.ones(()),
            **linears("a", "b"),
        ),
        rejected_case("class", _asks_for_its_class, ["b"], "tests if a value is a tensor", **linears("a", "b")),
        rejected_case(
            "function", lambda self, x: self.b(_Same.apply(self.a(x))), ["b"], "_Same.apply is", **linears("a", "b")
        ),
        rejected_case("autograd_off", _autograd_off, ["b"], "switches autograd or autocast", **linears("a", "b")),
        rejected_case(
            "mode",
            lambda self, x: self.b(F.dropout(self.a(x), training=self.training)),
            ["b"],
            r"train\(\) and eval\(\).*'dropout'.*nn.Dropout",
            **linears("a", "b"),
        ),
        rejected_case(
            "random_constant",
            lambda self, x: self.b(self.a(x) + torch.rand(3)),
            ["b"],
            "does not run the same operations",
            **linears("a", "b"),
        ),
    ],
)
def test_a_model_that_stages_would_not_equal_is_refused(model, cuts, message):
    buffers = dict(model.named_buffers())
    with pytest.raises(SplitError, match=message):
        split(model, cuts)
    assert dict(model.named_buffers()) == buffers


def test_a_model_that_torch_fx_cannot_follow_is_refused_with_the_line():
    with pytest.raises(SplitError, match=r"CosmoFlow: torch.fx cannot follow cosmoflow.py:\d+: if min\(x.shape"):
        split(MODELS["cosmoflow"](width=4), [2])


def test_calls_say_what_is_a_layer_and_where_they_begin():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)), nn.Flatten())
    steps = trace_steps(model)
    assert [(call.name, call.layer) for call in steps.calls] == [
        ("", False),
        ("0", True),
        ("1", False),
        ("1.0", False),
        ("1.1", True),
        ("2", False),
    ]
    begins = [call.begin for call in steps.calls if call.name in ("0", "1.0", "1.1", "2")]
    assert begins == steps.computing  # one step each
    x = torch.randn(4, 3)
    first, second, third = steps.build(lambda calls, computing: [computing[1], computing[3]])
    assert torch.equal(third(second(first(x))), model(x))
    assert [sum(node.op in COMPUTATIONS for node in stage.graph.nodes) for stage in (first, second, third)] == [1, 2, 1]
