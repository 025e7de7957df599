"""A training job from its options to result.png: what each command supplies, and the flow that all of them share."""

from __future__ import annotations

import argparse
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI

from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import DataError, GridError
from distconv.grid import ProcessGrid
from distconv.jobs.configuration.options_file import NAME, text_of
from distconv.layers.models import MODELS
from distconv.plan import Plan
from distconv.whole_files import write_file

from .options import device_for, place_of, settings_of
from .pipelines.options import Pipelining, pipelining_of, planned_pipelining
from .report import Metrics, announcement, conclude, picture, times
from .run import prepare, take_steps
from .settings import TrainingSettings
from .training import Training


class JobOutcome(ABC):
    """What a run came to."""

    @property
    @abstractmethod
    def results(self) -> dict[str, Any]:
        """For summary.json."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What the title of the picture says of it; may be empty."""

    @abstractmethod
    def show(self, trainer: Training, metrics: Metrics) -> None:
        """Print it, on rank 0."""

    @abstractmethod
    def draw(self, path: Path, examples: Sequence[Any], title: str, metrics: Metrics) -> None:
        """Draw it, on rank 0; raises ImportError if matplotlib is not installed."""


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """What differs between training jobs; :func:`train` is what they share."""

    settings: type[TrainingSettings]
    samples: Callable[[argparse.Namespace, MPI.Intracomm], Any]
    """Opens them; they are closed with the job."""
    trainer: Callable[..., Training]
    """Of settings, samples, grid (or plan) and device."""
    pipeline: Callable[..., Training] | None = None
    """Of settings, samples, pipelining and device, if the command has options for one."""
    trainer_options: Sequence[str] = ()
    """Options that the trainer takes by their names."""
    one_grid: str = ""
    """What the network is, if it takes no plan."""
    rest_along: str = "h"
    """Axis of the ranks that do not divide the batch, unless a grid is given."""
    extents: Callable[[Any], str]
    """What the samples of a trainer are like, as it is announced."""

    def announce(self, trainer: Any, resumed: bool) -> str:
        """What is about to be trained."""
        return announcement(trainer, self.extents(trainer), resumed)

    def after_epoch(self, options: argparse.Namespace, trainer: Any, metrics: Metrics) -> None:  # noqa: B027
        """What is done behind each epoch but the last, if anything. Collective."""

    @abstractmethod
    def judge(self, options: argparse.Namespace, trainer: Any, metrics: Metrics) -> JobOutcome:
        """What the trained network is worth. Collective."""

    @abstractmethod
    def examples(self, trainer: Any, outcome: Any) -> Sequence[Any]:
        """Samples for the picture with what the network makes of them. Collective."""


def train(options: argparse.Namespace, job: Job) -> int:
    """Train, evaluate, and write everything to ``options.out``. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DistconvError
        On all ranks, if options do not fit, samples cannot be read, the run cannot be written, or a loss is not finite.
    """
    comm = MPI.COMM_WORLD
    if options.print_config:
        if comm.rank == 0:
            print(text_of(options), end="")
        return 0
    config = text_of(options)
    place, device = _place_of(options, comm, job), device_for(options.device, comm)
    begin = time.perf_counter()
    with closing(job.samples(options, comm)) as samples:
        make = job.pipeline if job.pipeline and isinstance(place, Pipelining) else job.trainer
        more = {name: getattr(options, name) for name in job.trainer_options}
        trainer = make(settings_of(options, job.settings), samples, place, device, **more)
        choice = capture_of(options)
        if choice != "off":
            trainer.capture(choice)
        if options.init_from is not None and not options.resume:
            trainer.begin_with(options.init_from)
        resumed = prepare(options, trainer)
        try_on_all_ranks(comm, lambda: write_file(options.out / NAME, config) if comm.rank == 0 else None, DataError)
        if comm.rank == 0:
            print(job.announce(trainer, resumed), flush=True)
        with Metrics(Path(options.out), trainer, options.track) as metrics:
            take_steps(options, trainer, metrics, lambda: job.after_epoch(options, trainer, metrics))
            training_s = time.perf_counter() - begin
            outcome = job.judge(options, trainer, metrics)
            taken = {"training_s": training_s, "total_s": time.perf_counter() - begin}
            _report(trainer, metrics, outcome, job.examples(trainer, outcome), taken)
        trainer.close()
    return 0


def capture_of(options: argparse.Namespace) -> str:
    """Return True if steps are captured, where nothing is said about it.

    Recording a step runs it a few times: of models of the user's own only if that is asked for, since their Python may
    count calls, which nothing could put back.
    """
    if options.capture is not None:
        return str(options.capture)
    is_reference = getattr(options, "model", None) in MODELS
    return "auto" if is_reference and options.trace is None else "off"


def _place_of(options: argparse.Namespace, comm: MPI.Intracomm, job: Job) -> ProcessGrid | Plan | Pipelining:
    """How the ranks share the work. Collective."""
    if job.pipeline is not None:
        pipelining = pipelining_of(options, comm.size) or planned_pipelining(options, comm)
        if pipelining is not None:
            return pipelining
    place = place_of(options, comm, job.rest_along)
    if job.one_grid and isinstance(place, Plan):
        raise GridError(f"--plan: the layers of a {job.one_grid} are all on one grid; give it with --grid")
    return place


def _report(
    trainer: Training, metrics: Metrics, outcome: JobOutcome, examples: Sequence[Any], taken: dict[str, float]
) -> None:
    """Print, write summary.json and draw result.png, all on rank 0. Collective."""

    def show() -> None:
        outcome.show(trainer, metrics)
        print(times(**taken))
        path, where = metrics.folder / "result.png", f"after {trainer.step_count} steps on {trainer.where}"
        title = ", ".join(filter(None, (f"{trainer.settings.model} {where}", outcome.title)))
        print(picture(path, lambda: outcome.draw(path, examples, title, metrics)))

    conclude(trainer, metrics, outcome.results | taken, show)
