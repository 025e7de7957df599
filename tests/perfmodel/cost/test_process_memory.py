"""What a process takes beyond tensors against sums by hand, and against what torch really takes in one convolution."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.evaluation import Prediction
from distconv.perfmodel.cost.process_memory import process_memory
from distconv.perfmodel.graph.tracing import trace

MIB = 1 << 20


def prediction(memory, lasting=0.0):
    return Prediction(0.0, memory, {}, 0.0, lasting)


def workspace_of(layer, shape, **axes):
    graph = trace(nn.Sequential(layer), shape)
    ranks = 2 if axes else 1
    return process_memory(
        graph, dict.fromkeys(graph.deciding, AxisParts.from_axes(axes, ranks, 8)), prediction(0.0)
    ).convolutions


def test_float32_convolutions_rearrange_input_and_output():
    assert workspace_of(nn.Conv2d(16, 8, 3, padding=1), (1, 16, 64, 64)) == 4 * 64 * 64 * (16 + 8)
    assert workspace_of(nn.Conv2d(16, 8, 3, padding=1), (1, 16, 64, 64), h=2) == 4 * 32 * 64 * (16 + 8)


def test_float64_convolutions_have_a_column_for_each_output():
    found = workspace_of(nn.Conv2d(16, 8, 3, padding=1, stride=2).double(), (2, 16, 64, 64))
    assert found == 8 * 9 * 16 * 32 * 32


def test_volumes_of_few_planes_have_columns_although_they_are_float32():
    assert workspace_of(nn.Conv3d(4, 8, 3, padding=1), (1, 4, 64, 64, 64)) == 4 * 27 * 4 * 64**3
    assert workspace_of(nn.Conv3d(8, 8, 3, padding=1), (1, 8, 64, 64, 64)) == 4 * 16 * 64**3


def test_the_sum_is_what_a_bounded_heap_may_hold():
    graph = trace(nn.Sequential(nn.Conv2d(16, 8, 3, padding=1)), (1, 16, 64, 64))
    grids = dict.fromkeys(graph.deciding, AxisParts.from_axes({}, 1, 8))
    found = process_memory(graph, grids, prediction(1000.0 * MIB), 100.0 * MIB)
    assert found.total / MIB == pytest.approx((1000 + 340 + 100 + 0.375) * 1.10 + 128)
    assert found.fits(1.2 * found.total) and not found.fits(1.19 * found.total)


def test_no_more_is_free_than_a_step_frees():
    """What lasts leaves no holes; of a volume's convolution the columns do."""
    graph = trace(nn.Sequential(nn.Conv3d(4, 8, 3, padding=1)), (1, 4, 32, 32, 32))
    found = process_memory(
        graph, dict.fromkeys(graph.deciding, AxisParts.from_axes({}, 1, 8)), prediction(50.0 * MIB, 40.0 * MIB)
    )
    assert found.holes / MIB == pytest.approx(50 - 40 + 4 * 27 * 4 * 32**3 / MIB)


MEASURED = """
import torch, sys
model = torch.nn.Conv{dims}d({channels}, 8, 3, padding=1).to(torch.{dtype})
x = torch.randn((1, {channels}, *{extents}), dtype=torch.{dtype})
def resident(key): return 1024 * int(open("/proc/self/status").read().split(key + ":")[1].split()[0])
with torch.no_grad():
    y = model(x); del y
    before = resident("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    y = model(x)
    print(resident("VmHWM") - before - y.nbytes)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("dims", "channels", "extents", "dtype"), [(3, 4, (64, 64, 64), "float32"), (2, 16, (256, 256), "float64")]
)
def test_columns_are_what_torch_takes(dims, channels, extents, dtype):
    code = MEASURED.format(dims=dims, channels=channels, extents=extents, dtype=dtype)
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"OMP_NUM_THREADS": "1"}
    )
    layer = getattr(nn, f"Conv{dims}d")(channels, 8, 3, padding=1).to(getattr(torch, dtype))
    assert float(out.stdout) == pytest.approx(workspace_of(layer, (1, channels, *extents)), rel=0.1)


def test_convolutions_work_one_after_the_other():
    layers = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 32, 3, padding=1)
    graph = trace(nn.Sequential(*layers), (1, 16, 64, 64))
    found = process_memory(graph, dict.fromkeys(graph.deciding, AxisParts.from_axes({}, 1, 8)), prediction(0.0))
    assert found.convolutions == 4 * 64 * 64 * (8 + 32)
