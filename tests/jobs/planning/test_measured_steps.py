"""Steps on random samples, and their times. (Steps by plans are timed with ``distconv bench scaling``.)"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.capture.captured import Captured
from distconv.jobs import timing
from distconv.jobs.planning import measured_steps
from distconv.jobs.planning.measured_steps import random_tensor, training_step
from distconv.jobs.timing import CPU
from distconv.jobs.training.model_factory import build_model
from distconv.perfmodel.machine.step_mode import StepMode


def test_a_step_goes_down_the_mean_square() -> None:
    model = torch.nn.Linear(2, 1, bias=False).double()
    x, before = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64), model.weight.detach().clone()
    training_step(model, x)()
    gradient = 2 * (x @ before.T).T @ x / 2
    torch.testing.assert_close(model.weight.detach(), before - 1e-6 * gradient, rtol=1e-14, atol=1e-14)


def test_a_step_is_compiled_or_computed_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    model, dtypes = torch.nn.Linear(2, 1), []
    model.register_forward_hook(lambda module, args, y: dtypes.append(y.dtype))
    x = torch.ones(3, 2)
    for named, dtype, count in (
        ({}, torch.float32, 0),
        ({"bfloat16": True}, torch.bfloat16, 0),
        ({"compiled": True}, torch.float32, 1),
    ):
        training_step(model, x, **named)()
        assert dtypes.pop() == dtype and len(compiled) == count


@pytest.mark.ranks(2, 4)
def test_random_tensors_are_the_same_on_replicas_and_others_elsewhere(comm):
    grid, before = dc.ProcessGrid(comm, n=comm.size // 2, h=2), torch.get_rng_state()
    for axes, shape in ((("n",), (6,)), (("n", None, "h"), (4, 2, 6)), ((None,), (5,))):
        x = random_tensor(dc.Distribution(grid, axes), shape, torch.device("cpu"))
        full = dc.gather(x)
        assert len(set(comm.allgather(full.numpy().tobytes()))) == 1
        assert len(set(full.flatten().tolist())) == full.numel()
    assert torch.equal(torch.get_rng_state(), before)  # dropout draws the same numbers on all ranks


def test_plans_are_timed_in_turns_each_after_a_step_that_fills_its_caches(monkeypatch) -> None:
    seen = []

    def time_interleaved(comm, variants, rounds, **options):
        seen.append((comm.size, rounds, options))
        return {name: [variant() for _ in range(rounds)] for name, variant in variants.items()}

    def planned_step(options, comm, plan, device, mode):
        assert mode == StepMode()
        return lambda: seen.append(plan)

    monkeypatch.setattr(measured_steps, "time_interleaved", time_interleaved)
    monkeypatch.setattr(measured_steps, "_planned_step", planned_step)
    clock = iter(number * number for number in range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    options = SimpleNamespace(rounds=2)
    found = measured_steps.time_plans(options, MPI.COMM_SELF, 1, {"a": "A", "b": "B"}, CPU)
    assert seen == [(1, 2, {"warm_up": 2}), *"AAAABBBB"]
    assert found == {"a": [5.0, 13.0], "b": [21.0, 29.0]}


def test_the_step_of_a_plan_trains_the_network_on_samples_of_its_grid() -> None:
    options = SimpleNamespace(model="lenet5", input=(1, 28, 28), batch=3, classes=4, width=None)
    step = measured_steps._planned_step(options, MPI.COMM_SELF, dc.Plan({"*": {"n": 1}}, 1), CPU, StepMode())
    model = build_model("lenet5", MPI.COMM_SELF, seed=0, in_channels=1, classes=4)
    x = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    given = inspect.getclosurevars(step).nonlocals
    assert torch.equal(dc.gather(given["x"]), x) and given["take"].__name__ == "gradients"  # not captured
    step()
    measured_steps.training_step(model, x)()
    (group,) = given["optimizer"].param_groups
    assert (group["lr"], group["momentum"]) == (1e-6, 0.9)
    for one, other in zip(group["params"], model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_step_is_captured_in_the_memory_format_of_its_mode() -> None:
    options = SimpleNamespace(model="lenet5", input=(1, 28, 28), batch=3, classes=4, width=None)
    plan, mode = dc.Plan({"*": {"n": 1}}, 1), StepMode("channels_last", captured=True)
    given = inspect.getclosurevars(measured_steps._planned_step(options, MPI.COMM_SELF, plan, CPU, mode)).nonlocals
    assert isinstance(given["take"], Captured)
    (group,) = given["optimizer"].param_groups
    for tensor in (given["x"].local, *(weight for weight in group["params"] if weight.dim() == 4)):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("schedule", "before", "count"), [("gpipe", 1, 3), ("pipedream", 4, 6)])
def test_a_pipeline_is_timed_full_and_emptied(monkeypatch, schedule, before, count) -> None:
    seen = []
    pipe = SimpleNamespace(step=lambda *given: seen.append(given), drain=lambda: seen.append("drain"))
    monkeypatch.setattr(measured_steps, "time_action", lambda comm, device, act: seen.append(comm) or act() or 6.0)
    assert measured_steps.pipeline_step_s(pipe, schedule, "x", "target", "comm") == 6 / count
    step = ("x", "target")
    assert seen == [*[step] * before, "comm", *[step] * count, "drain"]
