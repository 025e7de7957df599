"""Memory of a process beyond tensors, compared with sums by hand and with torch's convolution."""

from __future__ import annotations

import pytest
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


def test_float32_convolutions_rearrange_input_output_and_weights():
    weights = 8 * 16 * 9
    assert workspace_of(nn.Conv2d(16, 8, 3, padding=1), (1, 16, 64, 64)) == 4 * (64 * 64 * (16 + 8) + weights)
    assert workspace_of(nn.Conv2d(16, 8, 3, padding=1), (1, 16, 64, 64), h=2) == 4 * (32 * 64 * (16 + 8) + weights)


def test_float64_convolutions_have_a_column_for_each_output():
    found = workspace_of(nn.Conv2d(16, 8, 3, padding=1, stride=2).double(), (2, 16, 64, 64))
    assert found == 8 * 9 * 16 * 32 * 32


def test_volumes_of_few_planes_have_columns_although_they_are_float32():
    assert workspace_of(nn.Conv3d(4, 8, 3, padding=1), (1, 4, 64, 64, 64)) == 4 * 27 * 4 * 64**3
    assert workspace_of(nn.Conv3d(8, 8, 3, padding=1), (1, 8, 64, 64, 64)) == 4 * (16 * 64**3 + 8 * 8 * 27)


def test_the_sum_is_what_a_bounded_heap_may_hold():
    graph = trace(nn.Sequential(nn.Conv2d(16, 8, 3, padding=1)), (1, 16, 64, 64))
    grids = dict.fromkeys(graph.deciding, AxisParts.from_axes({}, 1, 8))
    found = process_memory(graph, grids, prediction(1000.0 * MIB), 100.0 * MIB)
    workspace = 4 * (64 * 64 * (16 + 8) + 8 * 16 * 9) / MIB
    assert found.total / MIB == pytest.approx((1000 + 340 + 100 + workspace) * 1.10 + 128)
    assert found.fits(1.2 * found.total) and not found.fits(1.19 * found.total)


def test_no_more_is_free_than_a_step_frees():
    """Lasting tensors leave no free gaps in the heap; the columns of a 3-D convolution do."""
    graph = trace(nn.Sequential(nn.Conv3d(4, 8, 3, padding=1)), (1, 4, 32, 32, 32))
    found = process_memory(
        graph, dict.fromkeys(graph.deciding, AxisParts.from_axes({}, 1, 8)), prediction(50.0 * MIB, 40.0 * MIB)
    )
    assert found.holes / MIB == pytest.approx(50 - 40 + 4 * 27 * 4 * 32**3 / MIB)
