"""``distconv train mesh``: what it writes, how it resumes, what it refuses; and how predictors are judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.commands import train_mesh
from distconv.plan import Plan
from tests.distconv.data.sample_files import flip_bit
from tests.jobs.command_lines import assert_refused
from tests.jobs.mesh.mesh_files import GRIDS, on_ranks, written


def command(path: Path, out: Path, comm: Any, *more: str) -> list[str]:
    grid = ",".join(f"{axis}={parts}" for axis, parts in GRIDS[comm.size].items())
    base = ["train", "mesh", "--data", str(path), "--out", str(out), "--width", "2", "--epochs", "2", "--grid", grid]
    return [*base, *more]


@pytest.mark.long
@pytest.mark.ranks(1, 4)
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
    names = [verdict["name"] for verdict in summary["f1"]]
    assert names[:2] == ["all negative", "all positive"]
    assert names[2].startswith("channel ")
    assert names[3:] == ["frozen velocities, fitted", "frozen velocities, at q*", "perceptron on one cell", "unet"]
    assert len(summary["peak_memory_bytes"]) == comm.size
    assert sorted(p.name for p in (out / "checkpoints").glob("step-*")) == ["step-000003", "step-000004"]
    assert (out / "result.png").read_bytes()[:4] == b"\x89PNG"
    if comm.rank == 0:
        assert "positive cells: 8.0 % of the training samples" in printed
        assert "frozen velocities, at q*" in printed
        assert f"figure: {out / 'result.png'}" in printed
    else:
        assert printed == ""
    text = "written with different settings: lr was 0.004 and is 0.5"
    assert_refused(capsys, command(path, out, comm, "--resume", "--lr", "0.5"), text)
    assert cli.main(command(path, out, comm, "--resume", "--epochs", "3")) == 0


@pytest.mark.long
@pytest.mark.ranks(2)
def test_batch_norm_is_as_the_option_or_the_plan_says_and_stays_so(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plan = written(shared_tmp_path / "mesh.h5", comm), shared_tmp_path / "plan.json"
    if comm.rank == 0:
        Plan({"*": GRIDS[comm.size]}, batch_norm="local").save(plan)
    comm.Barrier()
    at = ["--steps", "2", "--width", "2", "--dtype", "float64", "--check-replicas-every", "1", "--data", str(path)]
    grid = ["--grid", ",".join(f"{axis}={parts}" for axis, parts in GRIDS[comm.size].items())]
    places = {"plan": ["--plan", str(plan)], "local": [*grid, "--batch-norm", "local"], "global": grid}
    losses = {}
    for name, place in places.items():
        out = shared_tmp_path / name
        assert cli.main(["train", "mesh", *at, *place, "--out", str(out)]) == 0
        comm.Barrier()
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["loss"] for line in lines if "loss" in line]
    assert losses["plan"] == losses["local"]
    assert losses["local"] != losses["global"]
    capsys.readouterr()
    again = [*at, *grid, "--out", str(shared_tmp_path / "plan"), "--resume"]
    assert_refused(capsys, ["train", "mesh", *again], "batch_norm was 'local' and is 'global'")


@pytest.mark.long
@on_ranks
@pytest.mark.slow
def test_split_optimizer_state_changes_no_number_and_may_be_given_up(comm: Any, shared_tmp_path: Path) -> None:
    path = written(shared_tmp_path / "mesh.h5", comm)
    runs = {"whole": [], "split": ["--shard-optimizer"]}
    for name, later in (("whole", "split"), ("split", "whole")):
        at = command(path, shared_tmp_path / name, comm, "--dtype", "float64", "--optimizer", "adam")
        assert cli.main([*at, "--steps", "2", *runs[name]]) == 0
        assert cli.main([*at, "--steps", "4", "--resume", *runs[later]]) == 0
    comm.Barrier()
    losses = [
        [json.loads(line).get("loss") for line in (shared_tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in runs
    ]
    assert len(losses[0]) >= 4 and losses[0] == losses[1]


@pytest.mark.long
@pytest.mark.ranks(2)
def test_it_trains_without_held_out_samples_and_without_matplotlib(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **named: object) -> None:
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(train_mesh, "draw", missing)
    path = written(shared_tmp_path / "mesh.h5", comm, heldout=0)
    assert cli.main(command(path, shared_tmp_path / "out", comm, "--steps", "1")) == 0
    text = "no figure: matplotlib is not installed. Run pip install matplotlib."
    assert (text in capsys.readouterr().out) == (comm.rank == 0)
    comm.Barrier()
    assert json.loads((shared_tmp_path / "out" / "summary.json").read_text())["f1"] == []


@pytest.mark.ranks(2)
def test_a_flipped_bit_ends_the_command_with_code_2(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(shared_tmp_path / "mesh.h5", comm)
    if comm.rank == 0:
        flip_bit(path, "train/input", 2)
    comm.Barrier()
    assert_refused(capsys, command(path, shared_tmp_path / "out", comm), "of dataset 'train/input':")
