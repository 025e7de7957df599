"""Named ranges in torch's traces: which there are, and that without a profiler there is none."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import distconv as dc
from distconv.process import profiling
from tests.distconv.layouts import grid_over, normal


def step(comm):
    """One training step of a network whose batch norm, halo, redistribution and gradients cross ranks."""
    grid = grid_over(comm, h=comm.size)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.MaxPool2d(3, 2, 1)).double()
    dc.parallelize(model, grid, broadcast=True)
    y = model(dc.scatter(normal(2, 2, 8, 6), grid))
    y.replicated().relu().sum().backward()


@pytest.mark.ranks(at_least=2)
def test_a_trace_names_operators_waits_and_what_is_communicated(comm):
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step(comm)
    names = {event.key for event in recorded.key_averages()}
    operators = {"conv2d", "batch_norm", "max_pool2d", "relu", "sum"}
    assert {f"distconv::{name}" for name in (*operators, "wait", "halo", "allreduce", "redistribute", "pack")} <= names


def test_without_a_profiler_no_range_is_entered(comm, monkeypatch):
    def refuse(name):
        raise AssertionError(name)

    monkeypatch.setattr(profiling, "record_function", refuse)
    step(comm)
    x = dc.from_local(normal(2, 2), dc.Distribution(grid_over(comm, n=comm.size), (None, None)), (2, 2))
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(AssertionError, match="distconv::relu"):
        F.relu(x)
