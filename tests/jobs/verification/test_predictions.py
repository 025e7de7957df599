"""``distconv verify predictions``: measured, predicted and planned, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from distconv import cli
from distconv.jobs.verification import predictions

COMMAND = ["verify", "predictions"]


@pytest.mark.ranks(2)
@pytest.mark.time_limit(180)
def test_each_grid_and_the_plan_are_measured_and_summarised(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {name: dict(vars(case)) for name, case in predictions.CASES.items()}
    assert cli.main([*COMMAND, "--models", "lenet5", "--rounds", "1"]) == 0
    assert {name: vars(case) for name, case in predictions.CASES.items()} == cases
    lines = capsys.readouterr().out.splitlines()
    if comm.rank:
        assert lines == []
        return
    grids = [line.split()[1] for line in lines if line.startswith("lenet5 ") and "measured" in line]
    assert grids == ["n=1", "n=2", "h=2", "w=2", "c=2", "planned"]
    assert any(line.startswith("6 configurations: median error") for line in lines)
    assert lines[-1].startswith("lenet5: planned ")


def refused(comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert cli.main([*COMMAND, *arguments]) == 2
    err = capsys.readouterr().err
    assert err == "" if comm.rank else (text in err and len(err.splitlines()) == 1)


@pytest.mark.ranks(2)
def test_an_unknown_network_is_refused(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    refused(comm, capsys, ["--models", "lenet5,foo"], "--models foo: there is no such network; there are lenet5, ")


@pytest.mark.ranks(1)
def test_one_rank_is_refused_before_anything_is_measured(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    refused(comm, capsys, ["--models", "lenet5"], "start it with mpiexec -n 2")


@pytest.mark.ranks(2)
def test_no_rounds_are_refused(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*COMMAND, "--rounds", "0"])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err == "" if comm.rank else "'0' is not a whole number above zero" in err
