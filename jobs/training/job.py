"""A training job from its options to result.png.

A training command defines a :class:`Job`: its samples, its trainer and its evaluation. :func:`train` is the flow that
all of them share.
"""

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
from distconv.jobs.configuration.options_file import NAME, format_options
from distconv.layers.models import MODELS
from distconv.plan import Plan
from distconv.whole_files import write_file

from .memory_format import make_in_memory_format
from .options import parallelism_from_options, select_device, settings_from_options
from .pipelines.options import Pipelining, pipelining_of, planned_pipelining
from .report import Metrics, announcement, conclude, draw_figure, format_times
from .run import prepare_run, take_steps
from .settings import TrainingSettings
from .training import Training


class JobOutcome(ABC):
    """Outcome of a run: results for summary.json, the report, and the figure."""

    @property
    @abstractmethod
    def results(self) -> dict[str, Any]:
        """Results written to summary.json."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Results in the title of the figure; may be empty."""

    @abstractmethod
    def show(self, trainer: Training, metrics: Metrics) -> None:
        """Print the outcome. Called on rank 0 alone.

        Parameters
        ----------
        trainer : Training
            The trainer after its last step.
        metrics : Metrics
            Writer of metrics.jsonl.
        """

    @abstractmethod
    def draw(self, path: Path, examples: Sequence[Any], title: str, metrics: Metrics) -> None:
        """Draw the figure. Called on rank 0 alone.

        Parameters
        ----------
        path : pathlib.Path
            File to write.
        examples : sequence
            Return value of :meth:`Job.examples`.
        title : str
        metrics : Metrics

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """Definition of a training job; :func:`train` runs it."""

    settings: type[TrainingSettings]
    samples: Callable[[argparse.Namespace, MPI.Intracomm], Any]
    """Opens the samples; :func:`train` closes them. Collective."""
    trainer: Callable[..., Training]
    """Makes the trainer from settings, samples, grid (or plan) and device."""
    pipeline: Callable[..., Training] | None = None
    """Makes the trainer from settings, samples, pipelining and device, if the command has pipeline options."""
    trainer_options: Sequence[str] = ()
    """Names of options passed to the trainer as keyword arguments."""
    one_grid: str = ""
    """Name of the kind of network, as an error states it, if ``--plan`` is not supported. Otherwise empty."""
    rest_along: str = "h"
    """Grid axis of the remaining ranks if the batch does not divide among all of them and no grid is given."""
    extents: Callable[[Any], str]
    """Describes the samples of a trainer in the announcement."""

    def announce(self, trainer: Any, resumed: bool) -> str:
        """Return the line printed before the first step.

        Parameters
        ----------
        trainer : Any
        resumed : bool
            True if the run resumes from a checkpoint.

        Returns
        -------
        str
        """
        return announcement(trainer, self.extents(trainer), resumed)

    def after_epoch(self, options: argparse.Namespace, trainer: Any, metrics: Metrics) -> None:  # noqa: B027
        """Run after each epoch but the last, for example to evaluate. Collective.

        Parameters
        ----------
        options : argparse.Namespace
            Options of the command.
        trainer : Any
        metrics : Metrics
            Receives the evaluations.
        """

    @abstractmethod
    def evaluate(self, options: argparse.Namespace, trainer: Any, metrics: Metrics) -> JobOutcome:
        """Evaluate the trained network. Collective: call on every rank.

        Parameters
        ----------
        options : argparse.Namespace
            Options of the command.
        trainer : Training
            The trainer after its last step.
        metrics : Metrics
            Receives the evaluations.

        Returns
        -------
        JobOutcome
            The outcome to report.
        """

    @abstractmethod
    def examples(self, trainer: Any, outcome: Any) -> Sequence[Any]:
        """Return samples for the figure with the network's predictions. Collective.

        Parameters
        ----------
        trainer : Any
            The trainer after its last step.
        outcome : Any
            Return value of :meth:`evaluate`.

        Returns
        -------
        sequence of Any
        """


def train(options: argparse.Namespace, job: Job) -> int:
    """Train, evaluate, and write everything to ``options.out``. Collective: call on every rank of MPI.COMM_WORLD.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command. With ``print_config`` they are printed and nothing else happens.
    job : Job
        Definition of the job.

    Returns
    -------
    int
        Exit code 0.

    Raises
    ------
    DistconvError
        On all ranks, if options do not fit, samples cannot be read, the run cannot be written, or a loss is not finite.
    SystemExit
        On all ranks, if a signal stops the training (:func:`distconv.jobs.training.run.take_steps`).
    """
    comm = MPI.COMM_WORLD
    if options.print_config:
        if comm.rank == 0:
            print(format_options(options), end="")
        return 0
    config = format_options(options)  # Before the next line, which stores the plan's batch-norm scope in the options.
    parallelism, device = _parallelism_from_options(options, comm, job), select_device(options.device, comm)
    begin = time.perf_counter()
    with closing(job.samples(options, comm)) as samples:
        make = job.pipeline if job.pipeline and isinstance(parallelism, Pipelining) else job.trainer
        more = {name: getattr(options, name) for name in job.trainer_options}

        def make_trainer(settings: TrainingSettings) -> Training:
            return make(settings, samples, parallelism, device, **more)

        trainer = make_in_memory_format(options, settings_from_options(options, job.settings), make_trainer, comm)
        choice = capture_choice(options)
        if choice != "off":
            trainer.capture(choice)
        # A resumed run has the weights of its checkpoint, which began with these.
        if options.init_from is not None and not options.resume:
            trainer.load_initial_weights(options.init_from)
        resumed = prepare_run(options, trainer)
        # After prepare_run, which may erase an earlier run's files and holds the lock of the folder.
        try_on_all_ranks(comm, lambda: write_file(options.out / NAME, config) if comm.rank == 0 else None, DataError)
        if comm.rank == 0:
            print(job.announce(trainer, resumed), flush=True)
        with Metrics(Path(options.out), trainer, options.track) as metrics:
            take_steps(options, trainer, metrics, lambda: job.after_epoch(options, trainer, metrics))
            training_s = time.perf_counter() - begin
            # The training time ends before this evaluation, which also compiles and caches.
            outcome = job.evaluate(options, trainer, metrics)
            taken = {"training_s": training_s, "total_s": time.perf_counter() - begin}
            _report(trainer, metrics, outcome, job.examples(trainer, outcome), taken)
        trainer.close()
    return 0


def capture_choice(options: argparse.Namespace) -> str:
    """Return the value of ``--capture``, or its default.

    The default is ``auto`` for reference models without ``--trace``, otherwise ``off``. Recording runs a step several
    times. Python code of a user's model may have side effects, such as counting its calls, that cannot be undone, so
    that such models are captured on request only.
    """
    if options.capture is not None:
        return str(options.capture)
    is_reference = getattr(options, "model", None) in MODELS
    # Other models may have side effects that a replay drops, and a replay has no ranges to trace.
    return "auto" if is_reference and options.trace is None else "off"


def _parallelism_from_options(
    options: argparse.Namespace, comm: MPI.Intracomm, job: Job
) -> ProcessGrid | Plan | Pipelining:
    """Return the pipeline, plan or grid selected by the options. Collective."""
    if job.pipeline is not None:
        pipelining = pipelining_of(options, comm.size) or planned_pipelining(options, comm)
        if pipelining is not None:
            return pipelining
    parallelism = parallelism_from_options(options, comm, job.rest_along)
    if job.one_grid and isinstance(parallelism, Plan):
        raise GridError(f"--plan: a {job.one_grid} has the same grid for all layers. Give it with --grid.")
    return parallelism


def _report(
    trainer: Training, metrics: Metrics, outcome: JobOutcome, examples: Sequence[Any], taken: dict[str, float]
) -> None:
    """Print, write summary.json and draw result.png, all on rank 0. Collective."""

    def show() -> None:
        outcome.show(trainer, metrics)
        print(format_times(**taken))
        path, where = metrics.folder / "result.png", f"after {trainer.step_count} steps on {trainer.distribution}"
        title = ", ".join(filter(None, (f"{trainer.settings.model} {where}", outcome.title)))
        print(draw_figure(path, lambda: outcome.draw(path, examples, title, metrics)))

    conclude(trainer, metrics, outcome.results | taken, show)
