"""The operator registry, and the names that messages give to functions and to layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from distconv import dispatch
from distconv.dispatch import implements, name_of, operator_for, short_name
from tests.distconv.layouts import grid_over, normal, raises_everywhere


def test_a_function_gets_one_operator() -> None:
    def ours() -> None: ...

    def other() -> None: ...

    implements(ours, ours)(other)
    try:
        assert operator_for(ours) is other
        with pytest.raises(AssertionError, match=r"ours already has the operator .*other"):
            implements(ours)(print)
        assert operator_for(ours) is other
    finally:
        del dispatch._OPERATORS[ours]


def test_functions_are_called_what_users_call_them() -> None:
    assert name_of(F.softmax) == "torch.nn.functional.softmax"
    assert short_name(torch.conv2d) == "conv2d"
    assert short_name(torch.Tensor.__add__) == "__add__"
    assert short_name(torch.Tensor.mT.__get__) == "mT"


# -- layers -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Net(nn.Module):
    def __init__(self, last: nn.Module, recompute: bool = False) -> None:
        super().__init__()
        self.encoder, self.recompute = nn.ModuleList([nn.Identity(), Block(last)]), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


class Inverse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._of(x)

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x)


def rows(comm):
    return dc.scatter(normal(3, 2, 6, 6), grid_over(comm, h=comm.size))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_an_error_names_the_layer(comm, parallel, recompute):
    x, model = rows(comm), Net(nn.Conv2d(5, 2, 3), recompute).double()
    if parallel:
        torch.manual_seed(1)
        dc.parallelize(model, x.grid, broadcast=True)
    text = raises_everywhere(comm, dc.ShapeError, "channels", lambda: model(x))
    with pytest.raises(RuntimeError) as told:
        nn.Conv2d(5, 2, 3).double()(normal(3, 2, 6, 6))
    assert text == f"'encoder.1.body.2' (Conv2d): {told.value}"


def test_a_function_that_a_module_calls_names_the_module(comm):
    x, model = rows(comm), Net(Inverse()).double()
    text = raises_everywhere(comm, dc.UnsupportedOperation, "gather", lambda: model(x))
    assert text.startswith("'encoder.1.body.2' (Inverse): torch.linalg.inv has no distributed rule;")
    text = raises_everywhere(comm, dc.UnsupportedOperation, "gather", lambda: Inverse()(x))
    assert text.startswith("Inverse: torch.linalg.inv has")


def test_a_module_that_is_no_part_of_its_caller_is_named_by_its_class(comm):
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Sequential(Inverse())]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    text = raises_everywhere(comm, dc.UnsupportedOperation, "gather", lambda: nn.Sequential(Hidden())(rows(comm)))
    assert text.startswith("'0.Sequential.0' (Inverse): ")


def test_an_error_that_passes_through_several_operators_names_the_layer_once(comm):
    def composite(x):
        return torch.overrides.handle_torch_function(composite, (x,), x)

    class Layer(nn.Module):
        def forward(self, x):
            return composite(x)

    implements(composite)(torch.linalg.inv)
    try:
        text = raises_everywhere(comm, dc.UnsupportedOperation, "gather", lambda: nn.Sequential(Layer())(rows(comm)))
    finally:
        del dispatch._OPERATORS[composite]
    assert text.startswith("'0' (Layer): torch.linalg.inv has")


def test_an_autograd_function_in_a_layer_names_the_layer(comm):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    class Layer(nn.Module):
        def forward(self, x):
            return Twice.apply(x)

    model = nn.Sequential(nn.ReLU(), Layer())
    text = raises_everywhere(comm, dc.UnsupportedOperation, "Function", lambda: model(rows(comm)))
    assert text.startswith("'1' (Layer): Twice.apply (")


def test_a_move_that_a_plan_asks_for_names_the_layer(comm):
    model = nn.Sequential(nn.Flatten(0, 1), nn.ReLU())
    plan = dc.Plan({"1": {"n": comm.size}}, ranks=comm.size)
    dc.parallelize(model, plan)
    x = dc.scatter(normal(2, 2, 2, 2, 2, 2, 2), grid_over(comm, n=comm.size), dims="n------")
    text = raises_everywhere(comm, dc.DistributionError, "no default distribution", lambda: model(x))
    assert text.startswith("'1' (ReLU): a tensor of 6 dimensions")


def test_outside_of_modules_a_message_stays_as_it_is(comm):
    x = rows(comm)
    text = raises_everywhere(comm, dc.UnsupportedOperation, "gather", lambda: torch.linalg.inv(x))
    assert text.startswith("torch.linalg.inv has no distributed rule;")
