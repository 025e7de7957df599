"""``distconv bench memory``: its table and its figures, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distconv.errors import DistconvError
from distconv.grid import ProcessGrid
from distconv.jobs.bench.child_processes import MIB, Peak
from distconv.jobs.bench.steps import memory
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused, parsed

TINY = ["memory", "--model", "mesh1k", "--width", "2", "--size", "128"]


def test_the_table_and_the_figures_of_peaks_are_as_approved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "packages_bytes", lambda model: 0)
    alone, *peaks = (Peak(n * MIB, m * MIB, 0.125 * n) for n, m in ((300, 340), (310, 330), (305, 328)))
    split = [replace(peak, peak=peak.peak - 4 * MIB) for peak in peaks]
    grid: Any = SimpleNamespace(size=2, shape={"n": 1, "h": 2}, describe=lambda: "h=2")
    for words, halves in (([], None), (["--width", "16", "--optimizer", "adam", "--shard-optimizer"], split)):
        options = parsed("bench memory", "--size", "128", *words, "--json", str(tmp_path / "memory.json"))
        memory._report(options, grid, alone, peaks, halves)
        *table, last = capsys.readouterr().out.splitlines()
        figures = json.loads((tmp_path / "memory.json").read_text())
        assert json.loads(last) == figures
        shown = {name: value for name, value in figures.items() if name not in ("command", "machine")}
        assert_approved(f"bench-memory-{len(words)}", "\n".join([*table, json.dumps(shown)]))


@pytest.mark.ranks(2)
def test_what_the_run_on_one_rank_dies_of_is_raised_on_all(comm: Any, capsys: Any, monkeypatch: Any) -> None:
    def failing(words: list[str]) -> None:
        raise DistconvError("the process that runs one rank failed (exit code 9): killed")

    monkeypatch.setattr(memory, "run_in_new_process", failing)
    assert_refused(capsys, ["bench", *TINY], "the process that runs one rank failed (exit code 9): killed")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "h=3"], "process grid h=3 has 3 parts but the communicator has 2 ranks"),
        (["--model", "nothing"], "--model nothing: no such model"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_refused(capsys, ["bench", *TINY, *arguments], message)


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ([], []),
        (["--width", "3", "--classes", "4", "--optimizer", "adamw", "--input", "1,8,9"],
         ["--input", "1,8,9", "--classes", "4", "--width", "3"]),
    ],
)  # fmt: skip
def test_the_process_of_one_rank_has_the_same_options(
    monkeypatch: pytest.MonkeyPatch, words: list[str], others: list[str]
) -> None:
    monkeypatch.setattr(memory, "run_in_new_process", lambda words: words)
    found: Any = memory.measure_by_itself(parsed("bench memory", "--batch", "2", *words))
    optimizer = "adamw" if words else "sgd"
    known = ["memory", "--alone", "--model", "mesh1k", "--size", "1024", "--batch", "2", "--optimizer", optimizer]
    assert found == known + others


@pytest.mark.parametrize(("name", "steps"), [("sgd", 1), ("momentum", 2), ("adam", 2), ("adamw", 2)])
def test_an_optimizer_takes_the_steps_that_fill_its_state(
    monkeypatch: pytest.MonkeyPatch, name: str, steps: int
) -> None:
    taken, sharded = [], []
    make, slots = memory.OPTIMIZERS[name]

    def counted(parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = make(parameters, lr)
        assert lr == 1e-3
        optimizer.register_step_post_hook(lambda *_: taken.append(len(optimizer.state)))
        return optimizer

    readings, clock = iter((100, 400)), iter((1.0, 2.0, 5.0, 7.0))
    monkeypatch.setitem(memory.OPTIMIZERS, name, (counted, slots))
    monkeypatch.setattr(memory, "peak_memory_bytes", lambda: next(readings))
    monkeypatch.setattr(memory, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(memory, "shard_optimizer", lambda optimizer, comm: sharded.append(comm))
    options = parsed("bench memory", "--model", "lenet5", "--input", "1,28,28", "--classes", "4", "--optimizer", name)
    grid = ProcessGrid(MPI.COMM_SELF)
    assert memory.measure(options, grid, split=steps == 1) == Peak(100, 400, 1.0 if steps == 1 else 3.0)
    assert len(taken) == steps and sharded == [grid.world] * (steps == 1)
    assert name != "momentum" or make.keywords == {"momentum": 0.9}


@pytest.mark.ranks(2)
def test_weights_are_sharded_and_predicted_so_if_asked(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--batch", "2", "--optimizer", "adam", "--shard-weights"]
    stored: list[str] = []

    def kept(parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(parameters)
        stored.extend(type(p).__name__ for group in optimizer.param_groups for p in group["params"])
        return optimizer

    monkeypatch.setitem(memory.OPTIMIZERS, "adam", (kept, 2))
    for axes in ("none", "all"):
        options = parsed("bench memory", "--model", "lenet5", "--input", "1,28,28", *words, axes)
        memory.measure(options, ProcessGrid(comm, n=2))
    assert stored == ["Parameter"] * 10 + ["DistTensor"] * 10
    full, sharded = (
        memory.predict_memory(
            parsed("bench memory", "--model", "vgg11_bn", "--size", "32", *words, axes), {"n": 2}, 2, 0
        ).tensors
        for axes in ("none", "all")
    )
    assert sharded < 0.85 * full


@pytest.mark.parametrize("name", memory.OPTIMIZERS)
def test_optimizers_keep_as_many_tensors_as_stated(name: str) -> None:
    make, slots = memory.OPTIMIZERS[name]
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.ones(3, 2)
    optimizer = make([weight], lr=0.1)
    optimizer.step()
    assert sum(value.shape == (3, 2) for value in optimizer.state[weight].values() if value is not None) == slots
