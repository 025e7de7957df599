"""The operator registry, and the names that messages give to functions and to layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from distconv import dispatch
from distconv.dispatch import implements, name_of, operator_for, short_name
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import same_as_one_process


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
        del dispatch._RULES[ours]


def test_functions_are_called_what_users_call_them() -> None:
    assert name_of(F.softmax) == "torch.nn.functional.softmax"
    assert short_name(torch.conv2d) == "conv2d"
    assert short_name(torch.Tensor.__add__) == "__add__"
    assert short_name(torch.Tensor.mT.__get__) == "mT"


# -- numbers ----------------------------------------------------------------------------------------------------------

SHAPE = (2, 4, 6, 4)

NUMBERS = {
    "arguments": lambda x, n: x.reshape(n(2), n(4), -1),
    "a sequence": lambda x, n: x.view([n(2), n(24), n(4)]),
    "a dimension": lambda x, n: x.transpose(n(1), n(2)),
    "slices": lambda x, n: x[:, n(0) : n(3), :: n(2)],
    "sizes of parts": lambda x, n: x.split([n(1), n(5)], n(2))[1],
    "a keyword": lambda x, n: torch.cat([x, x], dim=n(2)),
    "tuples": lambda x, n: torch.roll(x, (n(1), n(2)), (n(2), n(3))),
    "pad": lambda x, n: F.pad(x, [n(1), n(1), n(0), n(2)]),
    "dimensions": lambda x, n: x.mean((n(2), n(3)), keepdim=True),
    "a size": lambda x, n: F.interpolate(x, size=(n(9), n(5))),
    "convolution": lambda x, n: F.conv2d(x, torch.ones(2, 4, 3, 3).double(), padding=(n(1), n(1)), stride=n(2)),
    "in Python": lambda x, n: F.normalize(x, dim=n(1)),
    "a bound": lambda x, n: x.clamp(min=n(0)),
    "a factor": lambda x, n: n(2) * x * n(3) - n(1),
    "a value": lambda x, n: x.masked_fill(x > 0, n(0)),
}
"""Calls with numbers that ``n`` makes."""


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("number", [np.int64, torch.tensor])
def test_numbers_of_numpy_and_of_torch_count_as_pythons(comm: Any, number: Any, name: str) -> None:
    for axes in ({"h": comm.size}, {"n": comm.size}):
        same_as_one_process(grid_over(comm, **axes), lambda x: NUMBERS[name](x, number), normal(*SHAPE))


def test_a_tensor_of_no_dimensions_stays_a_tensor_where_one_is_meant(comm: Any) -> None:
    x = dc.scatter(normal(4, 6).int(), grid_over(comm, n=comm.size))
    number = torch.tensor(3)
    assert (x + number).dtype == torch.int32  # as with a number of Python's
    assert ((x > 0) + number).dtype == torch.int64
    # The largest of each element and 1, not the largest along dimension 1.
    assert torch.equal(dc.gather(x.max(torch.tensor(1, dtype=torch.int32))), normal(4, 6).int().clamp(min=1))


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


class Renormed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._of(x)

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        return torch.renorm(x, 2, 0, 1.0)


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
    x, model = rows(comm), Net(Renormed()).double()
    text = raises_everywhere(comm, dc.UnsupportedOperation, "gather", lambda: model(x))
    assert text.startswith("'encoder.1.body.2' (Renormed): torch.renorm has no distributed rule;")
    text = raises_everywhere(comm, dc.UnsupportedOperation, "gather", lambda: Renormed()(x))
    assert text.startswith("Renormed: torch.renorm has")


def test_a_module_that_is_no_part_of_its_caller_is_named_by_its_class(comm):
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Sequential(Renormed())]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    text = raises_everywhere(comm, dc.UnsupportedOperation, "gather", lambda: nn.Sequential(Hidden())(rows(comm)))
    assert text.startswith("'0.Sequential.0' (Renormed): ")


def test_an_error_that_passes_through_several_operators_names_the_layer_once(comm):
    def composite(x):
        return torch.overrides.handle_torch_function(composite, (x,), x)

    class Layer(nn.Module):
        def forward(self, x):
            return composite(x)

    implements(composite)(lambda x: torch.renorm(x, 2, 0, 1.0))
    try:
        text = raises_everywhere(comm, dc.UnsupportedOperation, "gather", lambda: nn.Sequential(Layer())(rows(comm)))
    finally:
        del dispatch._RULES[composite]
    assert text.startswith("'0' (Layer): torch.renorm has")


def test_a_move_that_a_plan_asks_for_names_the_layer(comm):
    model = nn.Sequential(nn.Flatten(0, 1), nn.ReLU())
    plan = dc.Plan({"1": {"n": comm.size}}, ranks=comm.size)
    dc.parallelize(model, plan)
    x = dc.scatter(normal(2, 2, 2, 2, 2, 2, 2), grid_over(comm, n=comm.size), dims="n------")
    text = raises_everywhere(comm, dc.DistributionError, "no default distribution", lambda: model(x))
    assert text.startswith("'1' (ReLU): a tensor of 6 dimensions")


# -- what torch writes in Python -------------------------------------------------------------------------------------


def test_a_body_of_torchs_asks_nobody_and_is_else_the_same():
    body = dispatch.python_body(F.gumbel_softmax)
    assert body is not None and body.__kwdefaults__ == F.gumbel_softmax.__kwdefaults__
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = F.gumbel_softmax(normal(3, 4), tau=0.5, hard=True)
        torch.manual_seed(0)
        assert torch.equal(body(normal(3, 4), tau=0.5, hard=True), expected)
    for other in (torch.add, torch.Tensor.norm, torch.meshgrid, torch.unique_consecutive, function_of_ours):
        assert dispatch.python_body(other) is None, other


def function_of_ours():
    """No function of torch's."""


def test_all_functions_with_an_operator_are_listed():
    found = dispatch.rules()
    assert len(found) > 1000 and {torch.add, torch.Tensor.add, F.conv2d, F.max_pool2d} <= set(found)
    found.clear()
    assert dispatch.rules()


def test_functions_are_found_by_name_without_modules_and_what_modules_inherit():
    assert dispatch.functions_named("relu", torch.Tensor, torch, F) == {torch.Tensor.relu, torch.relu, F.relu}
    assert dispatch.functions_named("cpu", torch.Tensor, torch) == {torch.Tensor.cpu}
    assert dispatch.functions_named("__eq__", torch, torch.Tensor) == {torch.Tensor.__eq__}
    assert dispatch.functions_named("no such name", torch.Tensor, torch) == set()
