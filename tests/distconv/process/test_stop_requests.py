"""Signals that ask a training to stop: every rank hears of one that has reached any of them, at one step."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from distconv.process.stop_requests import PreemptionHandler


@pytest.mark.fault(50)
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_signal_to_one_rank_is_heard_by_all_in_the_same_step(comm: Any, sent: signal.Signals, ahead: int) -> None:
    before = signal.getsignal(sent)
    with PreemptionHandler(comm, ahead) as requests:
        assert not requests.stop_requested()
        if comm.rank == comm.size - 1:
            os.kill(os.getpid(), sent)
        assert [requests.stop_requested() for _ in range(ahead + 1)] == [False] * ahead + [True]
    assert signal.getsignal(sent) is before


@pytest.mark.parametrize("ahead", [0, 2])
def test_the_least_that_was_written_is_the_same_on_all_ranks(comm: Any, ahead: int) -> None:
    here = iter(range(comm.rank, comm.rank + 7))
    found = []
    with PreemptionHandler(comm, ahead, lambda: next(here)) as requests:
        for _ in range(7):
            requests.stop_requested()
            found.append(requests.least_written)
    assert found == ([0] * ahead + list(range(7)))[:7]
