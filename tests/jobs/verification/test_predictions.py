"""``distconv verify predictions``: measured and planned grids, the printed text, and what it refuses."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

import distconv as dc
from distconv import cli
from distconv.jobs.verification import predictions
from distconv.perfmodel.machine.step_mode import StepMode
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused
from tests.jobs.verification.pretended import two_ranks
from tests.perfmodel.networks import machine

COMMAND = ["verify", "predictions"]


STEPS = {"n=1": 8.0, "n=2": 4.0, "h=2": 5.0, "w=2": 6.0, "c=2": 7.0, "planned": 4.5}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("chosen", "names", "ratio_to_best"),
    [
        ({"*": {"n": 2}}, ["n=1", "n=2, planned", "h=2", "w=2", "c=2"], 1.0),
        ({"*": {"h": 2}}, ["n=1", "n=2", "h=2, planned", "w=2", "c=2"], 1.25),
        ({"*": {"n": 2}, "output": {"c": 2}}, ["n=1", "n=2", "h=2", "w=2", "c=2", "planned"], 4.5 / 3.0),
    ],
)
def test_a_choice_is_measured_beside_the_best_grid_unless_it_is_one(
    comm: Any, monkeypatch: pytest.MonkeyPatch, chosen: Any, names: list[str], ratio_to_best: float
) -> None:
    counts: Counter[str] = Counter()

    def measured(case: Any, comm: Any, ranks: int, plans: Any, device: Any, **_: Any) -> dict[str, list[float]]:
        counts.update(dict.fromkeys(plans, case.rounds))
        faster = 1.0 if "planned" in plans else 0.0
        return {name: [STEPS[name] - (faster if name == "n=2" else 0.0)] * case.rounds for name in plans}

    monkeypatch.setattr(predictions.measured_steps, "time_plans", measured)
    monkeypatch.setattr(predictions, "measure_machine", lambda *_: machine())
    monkeypatch.setattr(predictions, "add_layer_times", lambda here, *_, **__: here)
    monkeypatch.setattr(predictions, "select", lambda *_: SimpleNamespace(plan=dc.Plan(chosen, 2)))
    found = predictions._compared("lenet5", 7, None, comm, StepMode())
    assert [row.name for row in found.rows] == names
    assert [row.measured for row in found.rows] == [STEPS[name.removesuffix(", planned")] for name in names]
    assert (found.best, found.ratio_to_best) == ("n=2", ratio_to_best)
    assert counts == {name: 7 for name in STEPS if name in names or f"{name}, planned" in names} | (
        {"n=2": 14} if "planned" in names else {}
    )


def test_the_printed_text_and_what_is_measured_are_as_approved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = []

    def measured(
        case: Any, comm: Any, ranks: int, plans: Any, device: Any, *, mode: StepMode
    ) -> dict[str, list[float]]:
        lines.append(f"time {vars(case)} on {ranks}: {', '.join(plans)}; {mode.name}")
        return {name: [STEPS[name] / 100 + number / 1000 for number in range(case.rounds)] for name in plans}

    def add_layer_times(here: Any, graph: Any, ranks: Any, comm: Any, device: Any, **options: Any) -> Any:
        mode = options.pop("mode")
        lines.append(f"profile {len(graph.deciding)} layers on {ranks}, {options}; {mode.name}")
        return here

    monkeypatch.setattr(predictions, "MPI", SimpleNamespace(COMM_WORLD=two_ranks()))
    monkeypatch.setattr(predictions, "profile_network", lambda *_: None)
    monkeypatch.setattr(predictions.measured_steps, "time_plans", measured)
    monkeypatch.setattr(predictions, "measure_machine", lambda *_: machine())
    monkeypatch.setattr(predictions, "measure_mode", lambda here, mode, *_: here.with_mode(mode, here.compute))
    monkeypatch.setattr(predictions, "add_layer_times", add_layer_times)
    options = "--models", "unet,lenet5", "--rounds", "8", "--memory-format", "channels_last", "--captured"
    assert cli.main([*COMMAND, *options]) == 0
    lines.append(capsys.readouterr().out)
    for model, case in predictions.CASES.items():
        lines.append(f"{model}: {vars(case)}")
    assert_approved("verify-predictions", "\n".join(lines))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--models", "lenet5,foo"], "--models foo: there is no such network; there are lenet5, "),
        (["--rounds", "0"], "'0' is not a positive integer"),
    ],
)
def test_bad_input_is_refused(comm: Any, capsys: Any, arguments: list[str], text: str) -> None:
    assert_refused(capsys, [*COMMAND, *arguments], text)


@pytest.mark.ranks(1)
def test_one_rank_is_refused_before_anything_is_measured(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, [*COMMAND, "--models", "lenet5"], "start it with mpiexec -n 2")
