"""The time limit of a case, with a communicator and a clock of the test."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from distconv.jobs.verification.engine import watch
from distconv.jobs.verification.engine.watch import Watch


class Aborted(Exception):
    """The job was aborted."""


class Clock:
    """A clock that a wait or a sleep advances."""

    def __init__(self) -> None:
        self.now, self.waits = 100.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.waits.append(seconds)
        return self.now > 200

    sleep = wait


def test_a_case_beyond_its_limit_is_printed_and_ends_the_job(monkeypatch, capsys):
    def abort(code: int) -> None:
        raise Aborted(code)

    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch.MPI, "COMM_WORLD", SimpleNamespace(Abort=abort))
    watched = Watch(SimpleNamespace(rank=3), 4.0)
    clock.now += 50
    watched.begin("add, h=2")
    watched.case += " [rank 3]"
    with pytest.raises(Aborted, match="75"):
        watched._watch(clock)
    assert clock.waits == [1.0] * 5 + [2.0]
    assert capsys.readouterr().err == "HANG: rank 3: add, h=2 [rank 3]\n"


def test_cases_are_watched_inside_the_context_only(monkeypatch):
    seen = []
    monkeypatch.setattr(Watch, "_watch", lambda self, done: seen.append(done))
    with pytest.raises(ValueError, match="fails"), Watch(SimpleNamespace(rank=0), 4.0).running():
        while not seen:
            time.sleep(0.001)
        raise ValueError("fails")
    (done,) = seen
    assert done.is_set()
