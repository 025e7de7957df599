"""Overheads of pipelined steps: measured on ranks, or assumed of a machine that is described."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from distconv.jobs.planning.pipeline_overheads import assumed_overheads, measured_overheads
from distconv.perfmodel import Machine
from distconv.perfmodel.machine.machine import Overlap


def test_messages_occupy_the_ranks_of_a_machine_that_hides_none() -> None:
    machine = Machine.load("localhost")
    assert assumed_overheads(machine).blocking
    hiding = replace(machine, overlap=Overlap(halo=True, allreduce=True))
    assert not assumed_overheads(hiding).blocking
    assert assumed_overheads(machine).pass_s == assumed_overheads(machine).update_s_per_byte == 0


@pytest.mark.ranks(1, 2, 3)
def test_what_is_measured_is_the_same_on_all_ranks_and_takes_time(comm: Any) -> None:
    found = measured_overheads(Machine.load("localhost"), torch.nn.Linear(64, 64), comm)
    assert found.pass_s > 0 and found.update_s_per_byte > 0 and found.blocking
    assert (found.message_s == 0) or comm.size > 1
    assert comm.allgather(found) == [found] * comm.size
