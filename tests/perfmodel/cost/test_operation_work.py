"""Work of a rank in an operation: FLOPs and bytes by hand, and registered costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from distconv.perfmodel.cost import operation_work as work_module
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.cost.operation_work import Work, local_call, register_cost, work
from distconv.perfmodel.graph.tracing import trace
from tests.perfmodel.networks import FLOPS, plain


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return torch.logcumsumexp(self.conv(x), 3)


def test_unknown_functions_are_listed_and_priced_as_registered(monkeypatch):
    monkeypatch.setattr(work_module, "_registered", {})
    graph, here = trace(Odd(), (4, 4, 8, 8)), plain()
    before = evaluate(graph, {"*": {"n": 2}}, here, 2)
    assert before.unknown == ("logcumsumexp (logcumsumexp)",)
    register_cost("logcumsumexp", lambda call: (Work(flops=1e6 * call.outputs[0][0]), Work(flops=2e6)))
    after = evaluate(graph, {"*": {"n": 2}}, here, 2)
    assert after.unknown == ()
    assert after.time - before.time == pytest.approx((2e6 + 2e6) / FLOPS, rel=1e-9)


LAYERS = {
    "conv2d": (nn.Conv2d(6, 8, 3, 2, 1), (4, 6, 12, 10)),
    "grouped": (nn.Conv2d(6, 9, (3, 1), groups=3, dilation=2), (4, 6, 12, 10)),
    "conv3d": (nn.Conv3d(2, 3, 2, bias=False), (2, 2, 5, 6, 7)),
    "transposed": (nn.ConvTranspose2d(6, 8, 3, 2), (4, 6, 5, 4)),
    "linear": (nn.Linear(6, 5), (4, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_flops_are_those_that_torch_counts(name):
    layer, shape = LAYERS[name]
    x = torch.randn(shape, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    first = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}.get(len(shape), lambda *_: nn.Linear(shape[1], shape[1]))
    op = trace(nn.Sequential(first(shape[1], shape[1], 1), layer), shape).operations[1]
    call = local_call(op, AxisParts(1, 1))
    assert work(call, "forward").flops == forward.get_total_flops()
    # Of dL/dx torch counts all groups' filters for each group.
    counted = backward.get_total_flops() if call.groups == 1 else 2 * forward.get_total_flops()
    assert work(call, "input").flops + work(call, "weight").flops == counted


def test_an_operation_that_computes_little_reads_its_inputs_and_writes_its_outputs():
    graph = trace(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)), (2, 4, 8, 8))
    relu, norm = (work(local_call(op, AxisParts.from_axes({"n": 2}, 2, 2)), "forward") for op in graph.operations[1:])
    block = 4 * 1 * 4 * 8 * 8
    assert (relu.flops, relu.bytes, relu.elements) == (0, 2 * block, block / 4)
    assert norm.bytes == 3 * block  # read twice: for the statistics, and for the result


class Scaled(nn.Module):
    """Batch norm with a value for each channel, and a product of vectors of samples with a parameter."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.norm(self.conv(x)).mean((1, 2, 3)) * self.scale


def test_constants_with_a_value_for_each_channel_are_split_with_the_channels():
    _, norm, _, scaled = trace(Scaled(), (6, 3, 4, 4)).operations
    assert set(local_call(norm, AxisParts.from_axes({"c": 2}, 2, 2)).constants) == {(2,)}
    assert set(local_call(norm, AxisParts.from_axes({"n": 2}, 2, 2)).constants) == {(4,)}
    for axes in ({"c": 2}, {"h": 2}):
        assert local_call(scaled, AxisParts.from_axes(axes, 2, 2)).constants == ((6,),)
