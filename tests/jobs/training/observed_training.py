"""Settings, samples, grid, trainer and run that ``distconv train TASK`` makes from options. Nothing is trained."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distconv.jobs.training import classifier, memory_format
from distconv.jobs.training import job as jobs
from distconv.jobs.training import options as training_options
from distconv.jobs.training.pipelines.options import Pipelining
from distconv.plan import Plan
from tests.jobs.command_lines import parsed

OPENERS = {
    "classify": "ImageSamples",
    "mesh": "MeshSamples",
    "pointcloud": "CloudSamples",
    "segmentation": "open_samples",
    "sequence": "SequenceSamples",
}
"""By task, what its module opens samples with."""


class Told:
    """Takes any call of any method, and notes those that it is asked to."""

    def __init__(self, found: dict[str, Any], epochs: int = 6) -> None:
        self.found, self.epoch, self.comm = found, 0, None
        self.samples = SimpleNamespace(groups=("train", "test"))

    def capture(self, choice: str) -> None:
        self.found["capture"] = choice

    def load_initial_weights(self, path: Path) -> None:
        self.found["init_from"] = str(path)

    def close(self) -> None:
        pass


class Written(AbstractContextManager["Written"]):
    """Stands for the metrics of a run."""

    def __init__(self, found: dict[str, Any], folder: Path, track: str | None) -> None:
        found.update(metrics=str(folder), track=track)

    def __exit__(self, *_: object) -> None:
        pass


def observed(
    monkeypatch: pytest.MonkeyPatch, task: str, words: Sequence[str], *, ranks: int, plan: Plan | None = None
) -> dict[str, Any]:
    """Return the values that a command line passes on with so many ranks, by name."""
    module: Any = importlib.import_module(f"distconv.jobs.commands.train_{task}")
    found: dict[str, Any] = {"capture": "off", "init_from": None}
    comm = SimpleNamespace(size=ranks, rank=0)

    def opened(path: object, comm: object, **more: Any) -> Told:
        recipe = more.pop("recipe", None)
        found.update(
            {f"samples.{name}": value for name, value in more.items()}, data=None if path is None else str(path)
        )
        found.update({} if recipe is None else {f"samples.{name}": value for name, value in asdict(recipe).items()})
        return Told(found)

    def made(name: str) -> Callable[..., Told]:
        def make(settings: Any, samples: object, place: Any, device: str, **more: Any) -> Told:
            found.update(settings=asdict(settings), part=settings.part_size, device=device, trainer=name, more=more)
            found["place"] = asdict(place) if isinstance(place, Pipelining) else place
            return Told(found)

        return make

    def prepared(options: Any, trainer: object) -> bool:
        found.update(out=str(options.out), resume=options.resume, overwrite=options.overwrite)
        return False

    def taken(options: Any, trainer: Told, metrics: object, evaluate: Callable[[], None]) -> None:
        found.update(every=options.checkpoint_every, replicas=options.check_replicas_every, trace=options.trace)
        found["evaluated"] = []
        for trainer.epoch in range(1, 7):
            evaluate()

    class Communicators:
        COMM_WORLD = comm

    with monkeypatch.context() as patch:
        patch.setattr(module, OPENERS[task], opened)
        patch.setattr(memory_format, "try_on_rank_0", lambda comm, attempt, error: "contiguous")  # no checkpoint
        patch.setattr(jobs, "MPI", Communicators)
        patch.setattr(jobs, "select_device", lambda name, comm: name)
        patch.setattr(jobs, "try_on_all_ranks", lambda comm, action, error: None)
        patch.setattr(jobs, "prepare_run", prepared)
        patch.setattr(jobs, "Metrics", lambda folder, trainer, track: Written(found, folder, track))
        patch.setattr(jobs, "take_steps", taken)
        patch.setattr(jobs, "_report", lambda *_: None)
        for where in (module, classifier):
            note = lambda trainer, metrics, group: found["evaluated"].append(trainer.epoch)  # noqa: E731
            patch.setattr(where, "_evaluate_and_log", note, raising=False)
        patch.setattr(training_options, "ProcessGrid", lambda comm, **extents: extents)
        patch.setattr(training_options.Plan, "load", lambda path, comm: plan)
        job = replace(module.JOB, trainer=made("grid"), pipeline=module.JOB.pipeline and made("pipeline"))
        patch.setattr(type(job), "announce", lambda *_: "announced")
        patch.setattr(type(job), "evaluate", lambda *_: None)
        patch.setattr(type(job), "examples", lambda *_: [])
        jobs.train(parsed(f"train {task}", *words), job)
    return found
