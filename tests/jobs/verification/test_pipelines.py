"""``distconv verify pipelines``: measured and predicted, and what it refuses."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.verification import pipelines
from tests.jobs.command_lines import assert_refused


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


@pytest.mark.ranks(1, 2)
def test_one_rank_and_unknown_networks_are_refused(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given, text = (
        (["--models", "foo"], "--models foo: there is no such network") if comm.size > 1 else ([], "mpiexec -n 2")
    )
    assert_refused(capsys, ["verify", "pipelines", *given], text)
