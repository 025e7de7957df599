"""Memory of the payloads between stages."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from distconv.pipeline.runtime.p2p import P2P
from distconv.pipeline.runtime.placement import StagePlacement
from distconv.pipeline.schedules.actions import Kind, Message
from distconv.pipeline.stage.stage_inputs import Minibatch
from distconv.pipeline.stage.structures import Boundary
from tests.distconv.layouts import normal


def bytes_alive(least: int) -> int:
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.uint8 and x.nbytes >= least]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}.values())


@pytest.mark.ranks(2)
def test_payloads_between_stages_are_let_go_of_when_they_have_arrived(comm: Any) -> None:
    placement = StagePlacement(2, (1, 1))
    box = P2P(comm, placement, placement.positions[comm.rank], None, torch.device("cpu"))
    for step in range(4):
        message, batch = Message(Kind.F, step, 1), Minibatch(step, 4)
        if comm.rank == 0:
            box.send(message, 1, batch, Boundary([normal(100, 100)]), loss=0.0, what="a test")
        else:
            found, _ = box.receive(message, 0, batch, "a test")
            del found
        comm.Barrier()
    assert bytes_alive(50_000) <= 2 * 81_000 + 4096
    box.close()
