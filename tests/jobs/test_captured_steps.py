"""Steps are captured as the choice says, and a training leaves the same weights whatever that is."""

from __future__ import annotations

import pytest

import distconv as dc
from distconv.jobs import captured_steps
from distconv.jobs.captured_steps import AutoCapturedStep
from tests.distconv.capture.trained import assert_equal, batches, make_step, network, sgd, training_state
from tests.distconv.layouts import grids


@pytest.mark.parametrize("choice", ["on", "auto"])
def test_a_training_leaves_the_same_whatever_is_chosen(comm, choice):
    grid = grids(comm, "nh")[0]
    found = []
    for each in ("off", choice):
        model = dc.parallelize(network(), grid)
        steps, optimizer = AutoCapturedStep(make_step(model), each, comm), sgd(model.parameters())
        losses = []
        for batch in batches(grid, 11):
            optimizer.zero_grad()
            losses.append(steps(*batch).local.detach().clone())
            optimizer.step()
        found.append([*losses, *training_state(model)])
    assert_equal(*found)


@pytest.mark.parametrize(("eager_s", "replay_s", "taken"), [(0.3, 0.2, "captured"), (0.1, 0.2, "eager")])
def test_the_faster_kind_is_taken_and_said_once(comm, eager_s, replay_s, taken, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(captured_steps.time, "perf_counter", lambda: clock[0])

    def takes(seconds, kind):
        def step(*args):
            clock[0] += seconds
            return kind

        return step

    steps = AutoCapturedStep(takes(eager_s, "eager"), "auto", comm)
    monkeypatch.setattr(captured_steps, "capture", lambda *_, **__: takes(replay_s, "captured"))
    kinds = [steps(1) for _ in range(11)]
    assert kinds == ["eager"] * 4 + ["captured"] * 4 + [taken] * 3
    said = capsys.readouterr().out
    line = f"steps are {taken}: a step without the optimizer takes {eager_s * 1e3} ms, a replay {replay_s * 1e3} ms\n"
    assert said == (line if comm.rank == 0 else "")


def test_long_steps_are_not_recorded_and_nor_are_a_few(comm, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(captured_steps.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(captured_steps, "capture", lambda *_, **__: pytest.fail("a step was recorded"))

    def step(seconds):
        clock[0] += seconds
        return "eager"

    long = AutoCapturedStep(step, "auto", comm, lambda: 1000)
    assert [long(1.5) for _ in range(9)] == ["eager"] * 9
    line = "steps are eager: one takes 1500.0 ms without the optimizer, of which little is Python's\n"
    assert capsys.readouterr().out == (line if comm.rank == 0 else "")
    few = AutoCapturedStep(step, "auto", comm, lambda: 99)
    assert [few(0.1) for _ in range(9)] == ["eager"] * 9
    assert capsys.readouterr().out == ""


def test_what_cannot_be_recorded_is_taken_eagerly_and_said(comm, capsys):
    grid = grids(comm, "nh")[0]
    x, _ = batches(grid, 1)[0]
    steps = AutoCapturedStep(lambda x: x.sum().item(), "auto", comm)
    values = [steps(x) for _ in range(6)]
    assert len(set(values)) == 1
    assert capsys.readouterr().out.count("steps are eager, since this step cannot be captured") == (comm.rank == 0)
    with pytest.raises(dc.CaptureError, match="a value is read"):
        AutoCapturedStep(lambda x: x.sum().item(), "on", comm)(x)
