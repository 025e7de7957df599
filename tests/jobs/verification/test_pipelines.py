"""``distconv verify pipelines``: timed plans, the printed text, and what it refuses."""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.commands import explore
from distconv.jobs.planning.pipeline_overheads import assumed_overheads
from distconv.jobs.verification import pipelines
from distconv.perfmodel import Machine, predicted_profile
from distconv.pipeline import PipelinePlan
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused
from tests.jobs.verification.pretended import two_ranks


@pytest.mark.ranks(2)
def test_each_plan_is_timed_in_each_round(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = argparse.Namespace(model="lenet5", input=(1, 28, 28), batch=4, width=None, classes=10)
    plans = {
        schedule: PipelinePlan("lenet5", 4, 2, ("c5",), (1, 1), (None, None), schedule, microbatches)
        for schedule, microbatches in (("gpipe", 2), ("pipedream", 1))
    }
    asked: list[Any] = []
    step_s = pipelines.pipeline_step_s
    monkeypatch.setattr(pipelines, "pipeline_step_s", lambda *given: asked.append(given[1:3]) or step_s(*given))
    found = pipelines._measured(case, plans, 2, comm)
    assert [(name, len(times), min(times) > 0) for name, times in found.items()] == [(name, 2, True) for name in plans]
    assert [(name, tuple(x.shape)) for name, x in asked] == [(name, (4, 1, 28, 28)) for name in plans] * (
        pipelines.WARM_UP + 2
    )


def test_the_printed_text_and_what_is_measured_are_as_approved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = []
    machine = Machine.load("localhost")
    overheads = replace(assumed_overheads(machine), pass_s=1e-4)

    def measure_once(case: argparse.Namespace, network: Any, comm: Any) -> explore.Measurements:
        lines.append(f"profile {vars(case)}")
        profiles = {size: predicted_profile(explore.graph_of(case, size), machine, ranks=1) for size in (4, 2, 1)}
        return explore.Measurements(machine, overheads, profiles)

    def measured(case: argparse.Namespace, plans: Any, rounds: int, comm: Any) -> dict[str, list[float]]:
        lines.append(f"time {len(plans)} plans in {rounds} rounds")
        return {name: [(7 + len(name) % 5) / 1000 + number / 10000 for number in range(rounds)] for name in plans}

    tiny = argparse.Namespace(model="lenet5", input=(1, 28, 28), batch=9, width=None, classes=10)
    monkeypatch.setattr(pipelines, "MPI", SimpleNamespace(COMM_WORLD=two_ranks()))
    monkeypatch.setattr(pipelines, "CASES", {**pipelines.CASES, "lenet5": tiny})
    monkeypatch.setattr(pipelines, "profile_network", lambda *_: None)
    monkeypatch.setattr(pipelines, "measure_once", measure_once)
    monkeypatch.setattr(pipelines, "combine_measurements", lambda known: known[-1])
    monkeypatch.setattr(pipelines, "_measured", measured)
    assert cli.main(["verify", "pipelines", "--models", "lenet5", "--rounds", "8", "--batch", "4"]) == 0
    lines.append(capsys.readouterr().out)
    lines += [f"{name}: {vars(case)}" for name, case in pipelines.CASES.items()]
    assert_approved("verify-pipelines", "\n".join(lines))


@pytest.mark.ranks(1, 2)
def test_one_rank_and_unknown_networks_are_refused(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given, text = (
        (["--models", "foo"], "--models foo: there is no such network") if comm.size > 1 else ([], "mpiexec -n 2")
    )
    assert_refused(capsys, ["verify", "pipelines", *given], text)
