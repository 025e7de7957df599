"""``distconv plan``: what it prints, writes and draws, and what it refuses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv import cli
from distconv.jobs.training.model_factory import build_model
from distconv.perfmodel.strategy import selection
from tests.jobs.command_lines import assert_refused
from tests.jobs.planning import planned_files

folder = planned_files.folder

NETWORK = ["--model", "planned_nets:build", "--input", "3,16,16", "--batch", "4"]


def words(*more: str, network: list[str] = NETWORK, ranks: int = 2) -> list[str]:
    return ["plan", *network, "--ranks", str(ranks), "--machine", "./tiny.yaml", *more]


def plan(*more: str, network: list[str] = NETWORK, ranks: int = 2) -> int:
    return cli.main(words(*more, network=network, ranks=ranks))


def losses(comm: Any, batch: int, where: dc.Plan | None) -> list[float]:
    """Losses of some steps on one process, or as a plan says."""
    model = build_model("planned_nets:build", comm, seed=0, in_channels=3).double()
    torch.manual_seed(1)
    x, labels = torch.randn(batch, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 2, 1, 1][:batch])
    if where is not None:
        grid = where.input_grid(model, comm)
        model = dc.parallelize(model, where, comm=comm)
        x = dc.scatter(x, grid)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model(x)
        target = labels if where is None else dc.scatter(labels, outputs.grid, dims="n")
        loss = F.cross_entropy(outputs, target)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("batch", "axes"), [(4, "n"), (1, "chw")])
def test_the_plan_trains_as_one_process_does(comm: Any, batch: int, axes: str, capsys: Any) -> None:
    assert plan("--out", "plan.json", "--batch", str(batch), ranks=comm.size) == 0
    assert bool(capsys.readouterr().out) == (comm.rank == 0)
    found = dc.Plan.load("plan.json", comm)
    assert found.ranks == comm.size
    assert math.prod(found.layers["0"].get(axis, 1) for axis in axes) == comm.size
    assert losses(comm, batch, found) == pytest.approx(losses(comm, batch, None), rel=1e-12)


@pytest.mark.ranks(1)
def test_costs_that_a_users_module_registers_are_used(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--input", "3,16,16", "--batch", "4"]
    assert plan(network=["--model", "planned_nets:Bessel", *shape]) == 0
    assert "register_cost" not in capsys.readouterr().out
    assert plan(network=["--model", "planned_nets:Unknown", *shape]) == 0
    assert "digamma" in capsys.readouterr().out


@pytest.mark.ranks(1)
def test_a_picture_is_drawn_whose_curve_of_plans_is_of_one_method(
    comm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = []

    def select(*arguments: Any, **keywords: Any) -> Any:
        found = selection.select(*arguments, **keywords)
        methods.append(found.method)
        return found

    monkeypatch.setattr("distconv.jobs.commands.plan.select", select)
    monkeypatch.setattr("distconv.jobs.planning.strong_scaling.select", select)
    assert plan("--plot", "plan.png", "--method", "longest-path", ranks=4) == 0
    assert methods == ["longest-path"] * 4  # on 4 ranks, on 2 to see whether they are faster, and on 1 and 2 to draw
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "figure: plan.png" in capsys.readouterr().out


@pytest.mark.ranks(2)
def test_without_matplotlib_a_picture_is_refused(
    comm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    text = "--plot plan.png: matplotlib is not installed. Run pip install matplotlib"
    assert_refused(capsys, words("--plot", "plan.png"), text)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "lenet6"], "--model lenet6: no such model. Use lenet5, "),
        (["--model", "planned_nets:gone"], "has no 'gone'"),
        (["--model", "planned_nets:number"], "returned int, but must return a torch.nn.Module"),
        (["--model", "planned_nets:Shy"], "Shy does not run on meta tensors"),
        (["--width", "3"], "--width 3: the model planned_nets:build has no parameter width"),
        (["--input", "3"], "--input 3: planned_nets:build does not accept samples of this shape ("),
        (["--model", "planned_nets:needy"], "--model planned_nets:needy needs 'num_classes'; give --classes"),
        (["--model", "planned_nets:greedy"], "needs 'depth'; give it a default: only in_channels, classes and width"),
        (["--machine", "laptop"], "machine 'laptop': no built-in machine has this name ("),
        (["--machine", "planned_nets.py"], "machine planned_nets.py cannot be read as YAML"),
        (["--memory", "2kB"], "fits into 2e-06 GB per rank; the smallest limit that works is "),
        (["--out", "gone/plan.json"], "--out gone/plan.json: no such folder (gone). Create it first."),
        (["--out", "."], "--out .: is a folder. Name a file"),
        (["--plot", "plan.doc"], "--plot plan.doc: unknown file format"),
        (["--optimizer-slots", "-1"], "optimizer_slots=-1 must be 0 or more"),
        (["--input", "3,x"], "--input: '3,x' is not the shape of a sample, channels first, such as 3,224,224"),
        (["--ranks", "at-most:none"], "argument --ranks: 'none' is not a positive integer"),
        (["--memory", "16"], "argument --memory: '16' is not a memory size such as '16 GB' (units: B, kB, MB, "),
    ],
    ids=lambda value: "".join(value[0]) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2_on_all_ranks(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert assert_refused(capsys, words(*arguments), text) == ""


@pytest.mark.ranks(1)
def test_the_smallest_limit_it_names_works(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--memory", "2kB") == 2
    error = capsys.readouterr().err
    assert "the tightest layer '" in error
    smallest = int(error.split("the smallest limit that works is ")[1].split()[0])
    assert plan("--memory", f"{smallest} B", "--out", "plan.json") == 0
    assert plan("--memory", f"{smallest - 1} B") == 2
    assert json.loads(Path("plan.json").read_text())["ranks"] == 2
