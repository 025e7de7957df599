"""Raw MPI moves what a plan moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distconv as dc
from distconv.communication.transfer import transfer_plan
from distconv.distribution import Distribution, default_axes
from distconv.jobs.bench.messages.raw_transfer import RawTransfer
from tests.distconv.layouts import grid_over


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("way", [RawTransfer.point_to_point, RawTransfer.all_to_all])
def test_the_block_of_the_target_arrives(comm: Any, way: Any) -> None:
    source, target = grid_over(comm, h=comm.size), grid_over(comm, n=comm.size // 2, w=2)
    x = torch.arange(3 * 2 * 5 * 7.0).view(3, 2, 5, 7)
    split, to = dc.scatter(x, source), Distribution(target, default_axes(None, 4))
    plan = transfer_plan(split.dist, to, x.shape)
    parts = [torch.zeros(shape) for shape in plan.destination_shapes]
    way(RawTransfer(plan, split.local, parts))
    assert torch.equal(parts[0], split.redistribute(to).local)
