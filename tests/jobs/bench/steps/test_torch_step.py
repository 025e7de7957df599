"""The layers that ``distconv bench step`` times: each kind takes the step of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import distconv as dc
from distconv.jobs.bench.steps import torch_step
from tests.layers.compare import close, whole


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", torch_step.KINDS)
def test_a_step_of_each_kind_equals_that_of_one_process(comm: Any, kind: str) -> None:
    model, x = torch_step.build(kind, 8, 4, 2, 2)
    expected, x = copy.deepcopy(model).double(), x.double()
    found = dc.parallelize(model.double(), dc.ProcessGrid(comm, h=comm.size))
    torch_step.step(expected, x)
    torch_step.step(found, dc.scatter(x, dc.ProcessGrid(comm, h=comm.size)))
    for (name, one), several in zip(expected.named_parameters(), found.parameters(), strict=True):
        assert one.grad is not None and several.grad is not None
        close(whole(several.grad), one.grad, name)
