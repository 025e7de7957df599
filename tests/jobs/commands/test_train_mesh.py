"""``distconv train mesh``: what it writes, and how it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distconv import cli
from tests.jobs.command_lines import assert_refused
from tests.jobs.mesh.mesh_files import GRIDS, written


def command(path: Path, out: Path, comm: Any, *more: str) -> list[str]:
    grid = ",".join(f"{axis}={parts}" for axis, parts in GRIDS[comm.size].items())
    base = ["train", "mesh", "--data", str(path), "--out", str(out), "--width", "2", "--epochs", "2", "--grid", grid]
    return [*base, *more]


@pytest.mark.long
@pytest.mark.ranks(4)
def test_it_writes_metrics_a_summary_checkpoints_and_a_picture_and_resumes(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = written(shared_tmp_path / "mesh.h5", comm), shared_tmp_path / "out"
    assert cli.main(command(path, out, comm, "--baselines", "--checkpoint-every", "3")) == 0
    comm.Barrier()
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert set(lines[0]) == {"step", "epoch", "loss", "lr", "seconds", "samples_per_s"}
    assert [line.get("epoch") for line in lines] == [0, 0, 1, 1, None]
    assert set(lines[-1]["families"]) == {"blast", "shear"}
    summary = json.loads((out / "summary.json").read_text())
    names = [verdict["name"].partition(" '")[0] for verdict in summary["f1"]]
    frozen = ["frozen velocities, fitted", "frozen velocities, at q*"]
    assert names == ["all negative", "all positive", "channel", *frozen, "perceptron on one cell", "unet"]
    assert len(summary["peak_memory_bytes"]) == comm.size
    assert sorted(p.name for p in (out / "checkpoints").glob("step-*")) == ["step-000003", "step-000004"]
    assert (out / "result.png").read_bytes()[:4] == b"\x89PNG"
    assert (f"figure: {out / 'result.png'}" in printed) == bool(printed) == (comm.rank == 0)
    text = "written with different settings: lr was 0.004 and is 0.5"
    assert_refused(capsys, command(path, out, comm, "--resume", "--lr", "0.5"), text)
    assert cli.main(command(path, out, comm, "--resume", "--epochs", "3")) == 0
