"""``distconv plan``: what it prints, writes and draws, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv import cli
from distconv.jobs.planning import report
from distconv.jobs.training.model_factory import build_model
from distconv.perfmodel.strategy import selection
from tests.jobs.planning import planned_files

folder = planned_files.folder

NETWORK = ["--model", "planned_nets:build", "--input", "3,16,16", "--batch", "4"]


def plan(*more: str, network: list[str] = NETWORK, ranks: int = 2) -> int:
    return cli.main(["plan", *network, "--ranks", str(ranks), "--machine", "./tiny.yaml", *more])


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
def test_the_plan_trains_as_one_process_does(comm: Any, batch: int, axes: str) -> None:
    assert plan("--out", "plan.json", "--batch", str(batch), ranks=comm.size) == 0
    found = dc.Plan.load("plan.json", comm)
    assert found.ranks == comm.size
    assert math.prod(found.layers["0"].get(axis, 1) for axis in axes) == comm.size
    assert losses(comm, batch, found) == pytest.approx(losses(comm, batch, None), rel=1e-12)


@pytest.mark.ranks(1, 2)
def test_it_prints_times_memory_bound_and_pure_parallelism_once(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--out", "plan.json") == 0
    text = capsys.readouterr().out
    if comm.rank:
        assert text == ""
        return
    assert "4 samples of 3 x 16 x 16, float32, 3 convolution and linear layers, on 2 ranks of tiny" in text
    for word in (
        "FP",
        "BPx",
        "BPw",
        "BPa",
        "halo",
        "shuffle",
        "GB per rank",
        "gap 0.00%",
        "this plan",
        "pure spatial, ",
    ):
        assert word in text
    assert (
        "mpiexec -n 2 distconv train classify --data PATH --model planned_nets:build --batch 4 --plan plan.json" in text
    )


@pytest.mark.ranks(1)
def test_each_layer_has_a_line_if_asked_for(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--layers", "--method", "longest-path") == 0
    assert [line.split()[0] for line in lines_of_layers(capsys.readouterr().out)] == ["0", "2", "5"]


def lines_of_layers(text: str) -> list[str]:
    """Those of the table of layers, which is followed by what a process takes."""
    table, process = text.split("  ms of each layer", 1)[1].split("  where ranks compute on CPUs, ")
    assert process.count("\n") == 1
    return table.splitlines()[1:]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("model", "extents", "text"),
    [
        ("unet", "18,16,16", "distconv train mesh --data PATH --model unet --width 2 --batch 4 --plan p.json"),
        ("lenet5", "1,28,28", "distconv train classify --data PATH --model lenet5 --width 2 --batch 4 --plan p.json"),
        ("unet3d", "1,16,16,16", "distconv train segmentation --data PATH --model unet3d"),
    ],
)
def test_it_says_how_to_train(
    comm: Any, capsys: pytest.CaptureFixture[str], model: str, extents: str, text: str
) -> None:
    network = ["--model", model, "--width", "2", "--input", extents, "--batch", "4"]
    assert plan("--out", "p.json", network=network) == 0
    assert text in capsys.readouterr().out


@pytest.mark.ranks(1)
def test_costs_that_a_users_module_registers_are_used(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--input", "3,16,16", "--batch", "4"]
    assert plan(network=["--model", "planned_nets:Bessel", *shape]) == 0
    assert "register_cost" not in capsys.readouterr().out
    assert plan(network=["--model", "planned_nets:Unknown", *shape]) == 0
    assert "digamma" in capsys.readouterr().out


@pytest.mark.ranks(1)
def test_the_picture_is_drawn(comm: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--plot", "plan.png", ranks=4) == 0
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "figure: plan.png" in capsys.readouterr().out


@pytest.mark.ranks(1)
def test_the_curve_of_plans_is_of_one_method(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = []

    def select(*arguments: Any, **keywords: Any) -> Any:
        found = selection.select(*arguments, **keywords)
        methods.append(found.method)
        return found

    monkeypatch.setattr("distconv.jobs.commands.plan.select", select)
    monkeypatch.setattr("distconv.jobs.planning.strong_scaling.select", select)
    assert plan("--plot", "plan.png", "--method", "longest-path", ranks=4) == 0
    assert methods == ["longest-path"] * 4  # on 4 ranks, on 2 to see whether they are faster, and on 1 and 2 to draw


@pytest.mark.ranks(1)
def test_it_says_when_fewer_ranks_are_faster_and_plans_for_them(
    comm: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("slow.yaml").write_text(planned_files.MACHINE.replace("latency: 1 ns", "latency: 1 s"))
    slow = ["--machine", "./slow.yaml"]
    assert plan(*slow, ranks=4) == 0
    out = capsys.readouterr().out
    alone = re.search(
        r"^fewer ranks are faster: (\S+) ms on 1, (\S+) ms on 4; use --ranks at-most:4 to take them$", out, re.M
    )
    assert alone is not None and float(alone[1]) < float(alone[2])
    assert f"{alone[2]} ms per step" in out
    assert cli.main(["plan", *NETWORK, "--ranks", "at-most:4", *slow, "--out", "plan.json"]) == 0
    out = capsys.readouterr().out
    assert "on 1 ranks of tiny" in out and f"{alone[1]} ms per step" in out and "fewer ranks" not in out
    assert json.loads((folder / "plan.json").read_text())["ranks"] == 1
    assert plan(ranks=4) == 0
    assert "fewer ranks" not in capsys.readouterr().out


@pytest.mark.ranks(1)
def test_columns_of_long_steps_do_not_run_together(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """1 FLOP takes 1 us: steps of hours."""
    machine = planned_files.MACHINE.replace("1 GFLOP/s", "1 MFLOP/s").replace("1 GB/s", "1 kB/s")
    Path("slow.yaml").write_text(machine)
    assert plan("--layers", "--machine", "./slow.yaml") == 0
    text = capsys.readouterr().out
    totals = next(line for line in text.splitlines() if line.startswith("  this plan"))
    assert float(totals.split()[-2]) > 1e5
    assert len(totals.split()) == 2 + len(report.FIGURES) + 3
    assert all(len(line.split()) == 2 + len(report.FIGURES) for line in lines_of_layers(text))


@pytest.mark.ranks(2)
def test_without_matplotlib_a_picture_is_refused(
    comm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    refused(
        comm,
        capsys,
        plan("--plot", "plan.png"),
        "--plot plan.png: matplotlib is not installed. Run pip install matplotlib",
    )


def refused(comm: Any, capsys: pytest.CaptureFixture[str], code: int, text: str) -> None:
    """Exit code 2 on all ranks and one line on rank 0, with ``text`` in it."""
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    if comm.rank:
        assert err == ""
    else:
        assert text in err
        assert len(err.splitlines()) == 1


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
    ],
    ids=lambda value: "".join(value[0]) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2_on_all_ranks(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    refused(comm, capsys, plan(*arguments), text)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--input", "3,x"],
            "argument --input: '3,x' is not the shape of a sample, channels first, such as 3,224,224",
        ),
        (["--batch", "0"], "argument --batch: '0' is not a positive integer"),
        (["--ranks", "at-most:none"], "argument --ranks: 'none' is not a positive integer"),
        (["--ranks", "-1"], "argument --ranks: '-1' is not a positive integer"),
        (["--memory", "16"], "argument --memory: '16' is not a memory size such as '16 GB' (units: B, kB, MB, "),
        (["--memory", "16 MHz"], "argument --memory: '16 MHz' is not a memory size"),
        (["--method", "best"], "argument --method: invalid choice: 'best'"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_one_line_and_exit_code_2_on_all_ranks(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        plan(*arguments)
    refused(comm, capsys, caught.value.code, text)


@pytest.mark.ranks(1)
def test_the_smallest_limit_it_names_works(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--memory", "2kB") == 2
    error = capsys.readouterr().err
    assert "the tightest layer '" in error
    smallest = int(error.split("the smallest limit that works is ")[1].split()[0])
    assert plan("--memory", f"{smallest} B", "--out", "plan.json") == 0
    assert plan("--memory", f"{smallest - 1} B") == 2
    assert json.loads(Path("plan.json").read_text())["ranks"] == 2
