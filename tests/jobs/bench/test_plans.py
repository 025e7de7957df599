"""``distconv bench plans``: plan files side by side, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distconv.cli import main
from distconv.jobs.bench import plans
from distconv.pipeline import PipelinePlan
from tests.jobs.bench import command
from tests.jobs.command_lines import assert_refused, parsed

printing = command.printing

FIRST = PipelinePlan("lenet5", 4, 2, ("c5",), (1, 1), (None, None), "pipedream", kinds=("old", "new"))
PLANS = {
    "first": FIRST,
    "second": replace(FIRST, cuts=("c3",), kinds=("new", "old")),
    "third": replace(FIRST, schedule="1f1b-so", microbatches=2, kinds=()),
    "other": replace(FIRST, batch=8),
}


def words(comm: Any, folder: Path, names: list[str], *more: str) -> list[str]:
    if comm.rank == 0:
        for name, plan in PLANS.items():
            plan.save(folder / f"{name}.json")
    comm.Barrier()
    files = [str(folder / f"{name}.json") for name in names]
    return ["bench", "plans", *files, "--input", "1,28,28", "--rounds", "1", *more]


@pytest.mark.ranks(2)
def test_plans_are_timed_in_turns_against_the_first(comm: Any, shared_tmp_path: Path, capsys: Any) -> None:
    assert main(words(comm, shared_tmp_path, ["first", "second", "third"], "--devices", "old:1,new:1")) == 0
    out = capsys.readouterr().out
    if comm.rank == 0:
        *lines, figures = out.splitlines()
        assert lines[0].startswith("training step, float32, lenet5, 4 samples of 1x28x28")
        assert [line.split()[-3:] for line in lines if line.startswith("first ")] == [["1.000", "of", "first"]]
        assert any(line.startswith("second ") and line.endswith("of first") for line in lines)
        assert any("second.json: pipedream; cut at c3; replicas [1, 1]; on new, old" in line for line in lines)
        assert all(len(values) == 1 and values[0] > 0 for values in json.loads(figures)["times_s"].values())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("names", "more", "text"),
    [
        (["first"], [], "specify the kind of device of each rank (--devices)"),
        (["first"], ["--devices", "old:2"], "made for old:1,new:1, found old:2"),
        (["first", "other"], ["--devices", "old:1,new:1"], "Compare plans of one model and mini-batch"),
    ],
)
def test_plans_that_cannot_be_compared_are_refused(
    comm: Any, shared_tmp_path: Path, capsys: Any, names: list[str], more: list[str], text: str
) -> None:
    assert_refused(capsys, words(comm, shared_tmp_path, names, *more), text)


def test_the_printed_text_is_as_approved(
    printing: command.Printing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([*range(100, 104), *(number * number / 1000 for number in range(1, 100))])

    def pipeline_step_s(pipe: Any, schedule: str, x: Any, target: Any, comm: Any) -> float:
        pipe.step(x, target)
        printing.seen.append(f"{schedule} {tuple(x.shape)}, labels below {int(target.max()) + 1}")
        return next(clock)

    monkeypatch.chdir(tmp_path)
    for name, microbatches in (("gpipe", 4), ("pipedream", 1)):
        plan = PipelinePlan("lenet5", 8, 1, (), (1,), (None,), name, microbatches)
        plan.save(Path(f"{name}.json"))
    monkeypatch.setattr(plans, "pipeline_step_s", pipeline_step_s)
    words = ["plans", "gpipe.json", "pipedream.json", "--input", "1,28,28", "--classes", "3", "--rounds", "4"]
    printing.approve("plans", None, *words)
    several = {"first.json": FIRST, "third.json": replace(PLANS["third"], ranks=4, replicas=(2, 2))}
    times = {
        name: [0.001 * (1 + (index + number) ** 2 % 7) for number in range(4)] for index, name in enumerate(several)
    }
    print(plans._report(parsed("bench plans", *words[1:]), several, times))
    printing.approve_printed("plans-report")
