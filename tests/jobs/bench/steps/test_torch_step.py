"""The layers that ``distconv bench step`` times: each kind takes the step of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import distconv as dc
from distconv.jobs.bench.steps import torch_step
from tests.layers.compare import close, whole


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("memory_format", torch_step.FORMATS)
@pytest.mark.parametrize("kind", torch_step.KINDS)
def test_a_step_of_each_kind_equals_that_of_one_process(comm: Any, kind: str, memory_format: str) -> None:
    model, x, labels = torch_step.build(kind, 8, 4, 2, 2, memory_format=memory_format)
    start = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    expected, x, grid = copy.deepcopy(model).double(), x.double(), dc.ProcessGrid(comm, h=comm.size)
    found = dc.parallelize(model.double(), grid)
    torch_step.training(expected, x, labels).step()
    torch_step.training(found, dc.scatter(x, grid), dc.scatter(labels, grid, dims="nhw")).step()
    for (name, one), several in zip(expected.named_parameters(), found.parameters(), strict=True):
        assert one.grad is not None and several.grad is not None
        assert not torch.equal(one, start[name])
        close(whole(several.grad), one.grad, name)
        close(whole(several), one, name)
