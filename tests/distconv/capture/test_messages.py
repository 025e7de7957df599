"""Messages and sums of a replay, and waits that the watchdog sees."""

from __future__ import annotations

import threading

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.capture.messages import Outcome, Posting, Summing, wait
from distconv.process import watchdog


def test_messages_go_round_a_ring_again_and_again(comm):
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    posting = Posting(comm, [after], [before])
    for round in range(3):
        sent, received = torch.arange(5.0) + comm.rank + 10 * round, torch.empty(5)
        wait(posting(sent, received), lambda: "ring")
        assert received.tolist() == (torch.arange(5.0) + before + 10 * round).tolist()


@pytest.mark.parametrize(("operation", "expected"), [(MPI.SUM, sum), (MPI.MAX, max)])
def test_sums_are_taken_in_place(comm, operation, expected):
    summing = Summing(comm, operation)
    for _ in range(2):
        total = torch.full((3,), float(comm.rank + 1))
        wait(summing(total), lambda: "sum")
        assert total.tolist() == [float(expected(range(1, comm.size + 1)))] * 3


def test_waits_are_seen_while_they_last(comm):
    seen = []

    class Request:
        @staticmethod
        def waitall(requests):
            seen.append(watchdog.waits[threading.get_ident()][1]())

    from distconv.capture import messages

    before, messages._wait_all = messages._wait_all, Request.waitall
    try:
        wait([], lambda: "halo exchange")
    finally:
        messages._wait_all = before
    assert seen == ["halo exchange"]
    assert threading.get_ident() not in watchdog.waits


def test_a_failure_of_one_rank_is_one_of_all(comm):
    outcome = Outcome(comm)
    outcome(None)
    with pytest.raises(dc.NumericalError, match="too large"):
        outcome(ValueError("too large") if comm.rank == 0 else None)
