"""``distconv bench layer --layer``: the paper's layers with predictions beside measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distconv import cli
from distconv.jobs.bench.layers import paper_layers
from distconv.jobs.planning.single_layers import LAYERS
from distconv.perfmodel import Machine
from tests.jobs.bench import command
from tests.jobs.planning import planned_files

printing = command.printing


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


def test_the_printed_text_is_as_approved(printing: command.Printing) -> None:
    words = ["--grid", "h=1", "--batch", "2", "--machine", "localhost"]
    printing.approve("layer-conv6", paper_layers, "layer", "--layer", "mesh_conv6_1", *words)


def test_this_machine_is_profiled_on_one_rank_and_over_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, known = LAYERS["mesh_conv6_1"], Machine.load("localhost")
    measured = []

    def measure(calls: Any, group: Any, device: Any) -> dict[str, float]:
        ((key, _),) = calls.items()
        measured.append((key, group.size, device))
        return {key: float(len(measured))}

    monkeypatch.setattr(paper_layers, "profile_network", lambda *_: "links")
    monkeypatch.setattr(paper_layers, "measure_machine", lambda name, network, comm, device: known)
    monkeypatch.setattr(paper_layers, "measure", measure)
    device = torch.device("cpu")
    found = paper_layers.profile_this_machine(layer, 3, {"n": 1}, device)
    assert [entry.table for entry in found.compute] == [{key: number} for number, (key, *_) in enumerate(measured, 1)]
    assert len(measured) == len(known.compute) and {(size, where) for _, size, where in measured} == {(1, device)}
