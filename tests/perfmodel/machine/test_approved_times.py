"""Times of messages and collectives on built-in machines and on one whose numbers all differ, as approved."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from distconv.perfmodel.machine.distributed_gemm import distributed_gemm
from distconv.perfmodel.machine.links import RankGroup
from distconv.perfmodel.machine.machine import Machine, built_in
from tests.jobs.approved import assert_approved
from tests.perfmodel.mixed_networks import digits, uneven_machine

SIZES = (4.0, 3e3, 2e5, 7e7)


@pytest.mark.parametrize("name", [*built_in(), "uneven"])
def test_times(name: str) -> None:
    machine, lines = uneven_machine() if name == "uneven" else Machine.load(name), []
    for across in (False, True):
        lines.append(f"send, {across}: {' '.join(digits(machine.send(size, across)) for size in SIZES)}")
    most = machine.ranks_per_node
    for ranks, per_node in {(2, min(2, most)), (2, 1), (3, most), (4, most), (6, most), (8, most), (16, 1), (24, most)}:
        group = RankGroup(ranks, per_node)
        for what in ("allreduce", "allgather"):
            times = [digits(getattr(machine, what)(group, size)) for size in SIZES]
            lines.append(f"{what}, {ranks} ranks, {per_node} on a node: {' '.join(times)}")
        for blocks in (1, ranks):
            gemm = [astuple(distributed_gemm(machine, group, blocks, size, size / 3)) for size in SIZES[1:]]
            lines.append(f"gemm, {ranks}, {per_node}, {blocks}: {[' '.join(map(digits, times)) for times in gemm]}")
    for busy in range(1, most + 1):
        roofline = machine.computing(busy).roofline
        times = [roofline.time(flops, nbytes, 500.0) for flops, nbytes in ((1e6, 1.0), (1.0, 1e6), (1e3, 1e3))]
        lines.append(f"roofline, {busy} of {machine.at_work(busy).computing(1).busy}: {' '.join(map(digits, times))}")
    assert_approved(f"perfmodel/times/{name}", "\n".join(sorted(lines)))
