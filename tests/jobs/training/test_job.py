"""Steps that all training jobs take in the same order; each job is tested with its command."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from mpi4py import MPI

import distconv as dc
from distconv.jobs.training import job as of_jobs
from distconv.jobs.training.job import Job, JobOutcome, capture_choice, train
from distconv.jobs.training.settings import TrainingSettings
from tests.distconv.layouts import raises_everywhere
from tests.jobs.training.pipelines.pipelined import pipelining
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
    settings = vars(TrainingSettings(model="net", batch=1)) | vars(options_of_runs(folder))
    more: dict[str, Any] = {"print_config": False, "device": "cpu", "method": "seq", "capture": "off"}
    more |= dict.fromkeys(("init_from", "track", "plan", "grid"))
    return Namespace(**settings | more | values)


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


def test_the_options_choose_capture_first_weights_and_the_trainer_of_pipelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Asked(Known):
        def capture(self, choice: str) -> None:
            self.samples.events.append(("capture", choice))

        def load_initial_weights(self, path: str) -> None:
            self.samples.events.append(("weights", path))

        def resume(self, directory: str, *, fallback: bool) -> bool:
            return True

    class Piped(Asked):
        def __init__(self, settings: Any, samples: Any, place: Any, device: str, *, method: str) -> None:
            super().__init__(
                settings, samples, SimpleNamespace(world=MPI.COMM_SELF, shape=place), device, method=method
            )

    monkeypatch.setattr(of_jobs, "pipelining_of", lambda options, ranks: None)
    monkeypatch.setattr(of_jobs, "planned_pipelining", lambda options, comm: piped)
    piped = pipelining(1, "gpipe")
    first: dict[str, list[Any]] = {}
    for name, values in {
        "plain": {},
        "captured": {"capture": "on", "init_from": "w.pt"},
        "resumed": {"capture": "auto", "init_from": "w.pt", "resume": True},
    }.items():
        events: list[Any] = []
        assert train(given(tmp_path / name, **values), replace(job(events), trainer=Asked, pipeline=Piped)) == 0
        first[name] = events[: events.index("epoch 1")]
    made = [("made", piped, "seq")]
    assert first["plain"] == made
    assert first["captured"] == [*made, ("capture", "on"), ("weights", "w.pt")]
    assert first["resumed"] == [*made, ("capture", "auto")]
    capsys.readouterr()
    assert train(given(tmp_path / "printed", print_config=True), job([])) == 0
    assert "method: seq\n" in capsys.readouterr().out and not (tmp_path / "printed" / "out").exists()
    assert "method: seq\n" in (tmp_path / "plain" / "out" / "config.yaml").read_text()


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
