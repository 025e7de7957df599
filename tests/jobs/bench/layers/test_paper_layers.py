"""``distconv bench layer --layer``: the paper's layers with predictions beside measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distconv import cli
from tests.jobs.planning import planned_files


@pytest.fixture
def machine(comm: Any, shared_tmp_path: Path) -> str:
    """Path of a machine file."""
    if comm.rank == 0:
        planned_files.write(shared_tmp_path)
    comm.Barrier()
    return str(shared_tmp_path / "tiny.yaml")


def output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["bench", "layer", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grid", ["h=2", "c=2"])
def test_fp_and_bp_are_measured_and_predicted(
    comm: Any, machine: str, capsys: pytest.CaptureFixture[str], grid: str
) -> None:
    lines = output(["--layer", "res3b_branch2a", "--grid", grid, "--machine", machine], capsys)
    if comm.rank:
        assert lines == []
        return
    assert lines[0].startswith("res3b_branch2a: C=512, 28 x 28, F=128, K=1, S=1, float32, N=1, cpu, over " + grid)
    found = json.loads(lines[-1])
    for name in ("FP, 1 rank", "BP, 1 rank", f"FP, {grid}", f"BP, {grid}"):
        assert found[name]["mean_s"] > 0
        assert found[name]["deviation_s"] >= 0
        assert found[name]["predicted_s"] > 0
        assert any(line.startswith(name) for line in lines)
