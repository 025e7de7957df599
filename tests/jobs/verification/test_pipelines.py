"""``distconv verify pipelines``: measured and predicted, and what it refuses."""

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
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused
from tests.jobs.verification.pretended import two_ranks


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.time_limit(300)
def test_what_is_explored_and_what_is_not_are_measured_and_summarised(
    comm: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = argparse.Namespace(model="lenet5", input=(1, 28, 28), batch=4, width=None, classes=10)
    monkeypatch.setattr(pipelines, "CASES", {"lenet5": tiny})
    assert cli.main(["verify", "pipelines", "--models", "lenet5", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    if comm.rank:
        assert lines == []
        return
    rows = [line for line in lines if " measured " in line and " predicted " in line]
    assert len(rows) == 12
    for name in ("explored", "gpipe, early cut", "pipedream explored", "samples", "rows", "replicas"):
        assert any(row.split(maxsplit=1)[1].startswith(name) for row in rows)
    assert "12 configurations: median error" in lines[-2] and "Spearman" in lines[-2]
    assert lines[-1].startswith("lenet5: the choice (")


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
