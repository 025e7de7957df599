"""What all training jobs do in the same order; each job is tested with its command."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import distconv as dc
from distconv.jobs.training.job import Job, JobOutcome, capture_choice, train
from distconv.jobs.training.settings import TrainingSettings
from tests.distconv.layouts import raises_everywhere
from tests.jobs.training.stand_in import StandIn
from tests.jobs.training.test_run import options as options_of_runs

ONE_GRID = {1: {"n": 1}, 2: {"n": 1, "w": 2}}


class Told(JobOutcome):
    results: ClassVar[dict[str, Any]] = {"worth": 7}
    title = "worth 7"

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def show(self, trainer: Any, metrics: Any) -> None:
        self.events.append("show")

    def draw(self, path: Path, examples: Any, title: str, metrics: Any) -> None:
        self.events.append((path.name, examples, title))


class Known(StandIn):
    """Trains what has a name and a place."""

    distribution, placement = "a grid", {}

    def __init__(self, settings: TrainingSettings, samples: Any, place: Any, device: str, *, method: str) -> None:
        super().__init__(place.world)
        self.settings, self.samples, self.device = settings, samples, device
        samples.events.append(("made", place.shape, method))

    def close(self) -> None:
        self.samples.events.append("trainer closed")


class Judged(Job):
    def announce(self, trainer: Any, resumed: bool) -> str:
        return f"announced, resumed {resumed}"

    def after_epoch(self, options: Any, trainer: Any, metrics: Any) -> None:
        trainer.samples.events.append(f"epoch {trainer.epoch}")

    def evaluate(self, options: Any, trainer: Any, metrics: Any) -> Told:
        trainer.samples.events.append("judged")
        return Told(trainer.samples.events)

    def examples(self, trainer: Any, outcome: Any) -> list[int]:
        return [1, 2]


def job(events: list[Any], **more: Any) -> Job:
    def opened(options: Any, comm: Any) -> Any:
        return SimpleNamespace(events=events, close=lambda: events.append("samples closed"))

    return Judged(
        settings=TrainingSettings, samples=opened, trainer=Known, trainer_options=["method"], extents=str, **more
    )


def given(folder: Path, **values: Any) -> Namespace:
    settings = vars(TrainingSettings(model="net", batch=1))
    return Namespace(
        print_config=False,
        init_from=None,
        track=None,
        **settings
        | vars(options_of_runs(folder))
        | dict(plan=None, grid=None, device="cpu", method="seq", capture="off")
        | values,
    )


@pytest.mark.ranks(1, 2)
def test_a_job_opens_trains_judges_and_closes_in_this_order(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[Any] = []
    assert train(given(shared_tmp_path), job(events, rest_along="w")) == 0
    comm.Barrier()
    told = ["show", ("result.png", [1, 2], "net after 6 steps on a grid, worth 7")] if comm.rank == 0 else []
    name, shape, method = events.pop(0)
    assert (name, method) == ("made", "seq")
    assert {axis: shape[axis] for axis in ONE_GRID[comm.size]} == ONE_GRID[comm.size]
    assert events == ["epoch 1", "judged", *told, "trainer closed", "samples closed"]
    (summary,) = shared_tmp_path.rglob("summary.json")
    found = json.loads(summary.read_text())
    assert (found["worth"], found["steps"]) == (7, 6) and 0 <= found["training_s"] <= found["total_s"]
    assert ("announced, resumed False" in capsys.readouterr().out) == (comm.rank == 0)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({}, "auto"),
        ({"capture": "off"}, "off"),
        ({"capture": "on", "model": "mine:Model"}, "on"),
        ({"model": "mine:Model"}, "off"),
        ({"trace": range(3)}, "off"),
    ],
)
def test_steps_of_reference_models_are_captured_where_nothing_is_said(given: dict[str, Any], choice: str) -> None:
    options = Namespace(**{"capture": None, "model": "unet", "trace": None} | given)
    assert capture_choice(options) == choice


@pytest.mark.ranks(2)
def test_a_plan_is_refused_where_all_layers_are_on_one_grid(comm: Any, shared_tmp_path: Path) -> None:
    plan = shared_tmp_path / "plan.json"
    if comm.rank == 0:
        dc.Plan({"*": {"n": 2}}, 2).save(plan)
    comm.Barrier()
    message = "--plan: a knot has the same grid for all layers. Give it with --grid"
    raises_everywhere(
        comm, dc.GridError, message, lambda: train(given(shared_tmp_path, plan=plan), job([], one_grid="knot"))
    )
