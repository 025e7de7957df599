"""``distconv bench layer --layer``: the paper's layers with predictions beside measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.bench.layers.paper_layers import LAYERS, predicted
from distconv.layers.models import MODELS
from distconv.perfmodel.machine.machine import Machine
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


def test_predictions_are_those_of_the_machine(tmp_path: Path) -> None:
    planned_files.write(tmp_path)
    one_gflops = Machine.load(tmp_path / "tiny.yaml")
    flops = 2 * 4 * 28 * 28 * 512 * 128
    alone = predicted(LAYERS["res3b_branch2a"], 4, {}, 1, one_gflops)
    assert alone == {"FP": pytest.approx(flops / 1e9, rel=1e-6), "BP": pytest.approx(2 * flops / 1e9, rel=1e-6)}
    split = predicted(LAYERS["res3b_branch2a"], 4, {"h": 4}, 4, one_gflops)
    assert split["FP"] == pytest.approx(alone["FP"] / 4, rel=1e-6)


@pytest.mark.parametrize(("name", "block"), [("mesh_conv1_1", 0), ("mesh_conv6_1", 5)])
def test_mesh_layers_are_those_of_our_model(name: str, block: int) -> None:
    layer, ours = LAYERS[name].build(), MODELS["mesh2k"]().get_submodule(f"blocks.{block}.0")
    assert str(layer) == str(ours)
    assert LAYERS[name].extent == MODELS["mesh2k"].sample[1] // 2**block
