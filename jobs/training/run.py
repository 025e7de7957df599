"""The run of a training job: its folder, its first step, and the loop with progress, metrics and checkpoints.

Called by :mod:`distconv.jobs.training.job`. It must not depend on how ranks divide the work.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distconv.checkpoint.lock import LOCK, lock_directory
from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import CheckpointError, CommunicatorError, DataError, DistconvError, PipelineError
from distconv.jobs import progress
from distconv.process.stop_requests import EXIT_CODE, PreemptionHandler
from distconv.tracing.trace import StepTrace
from distconv.whole_files import Folder

from .report import METRICS, SUMMARY, Metrics
from .training import Training

CHECKPOINTS, TRACE = "checkpoints", "trace"


def prepare_run(options: argparse.Namespace, trainer: Training) -> bool:
    """Create the folder of the run and resume with ``--resume``. Collective: call on every rank.

    Parameters
    ----------
    options : argparse.Namespace
        ``out``, ``resume`` and ``overwrite`` are used.
    trainer : Training
        The training to resume.

    Returns
    -------
    bool
        True if the run was resumed. Otherwise it starts from step 0.

    Raises
    ------
    DataError
        On all ranks, if there is nothing to resume, the folder cannot be made, or it holds a run that this one would
        erase.
    CheckpointError
        On all ranks, if another job writes to the folder, or the checkpoint does not belong to the run.
    """
    folder, comm = Path(options.out), trainer.comm
    try_on_all_ranks(comm, lambda: _create_folders(folder), DataError)
    try_on_all_ranks(comm, lambda: lock_directory(folder / CHECKPOINTS) if comm.rank == 0 else None, CheckpointError)
    # The lock is held from here on, so no other job writes to the folder between the checks and the first checkpoint.
    if options.resume:
        if not trainer.resume(str(folder / CHECKPOINTS), fallback=options.resume == "whole"):
            raise DataError(f"--resume: no finished checkpoint in {folder / CHECKPOINTS}. Start without --resume.")
        return True
    # Rank 0 alone checks and erases: a late rank would find the files that this run has already written.
    try_on_all_ranks(comm, lambda: _erase_earlier_run(folder, options.overwrite) if comm.rank == 0 else None, DataError)
    return False


def _erase_earlier_run(folder: Path, overwrite: bool) -> None:
    """Erase an earlier run in the folder, but no other files."""
    taken = [path for name in (CHECKPOINTS, METRICS, SUMMARY) if _is_nonempty(path := folder / name)]
    if taken and not overwrite:
        raise DataError(
            f"--out {folder}: holds an earlier run ({', '.join(path.name for path in taken)}). Resume it with "
            "--resume, delete it with --overwrite, or choose another folder."
        )
    for path in taken:
        # Not the folder of the checkpoints itself: this process holds the lock file in it.
        for each in _inside(path) if _is_folder(path) else (path,):
            shutil.rmtree(each) if _is_folder(each) else each.unlink()


def _create_folders(folder: Path) -> None:
    """Create the folder of the run and its folder of checkpoints, which must not be a link to another location."""
    with Folder(folder, make=True) as out, Folder(CHECKPOINTS, make=True, within=out):
        pass


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_nonempty(path: Path) -> bool:
    """Return True if the path is a file or folder that is not empty; a link counts as such, wherever it points."""
    return any(_inside(path)) if _is_folder(path) else os.path.lexists(path) and path.lstat().st_size > 0


def _inside(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != LOCK]


def take_steps(
    options: argparse.Namespace, trainer: Training, metrics: Metrics, evaluate: Callable[[], None] | None = None
) -> None:
    """Take all remaining steps. Collective: call on every rank.

    Steps in flight are finished before a checkpoint and at the end of an epoch. A checkpoint is written in the
    background, and committed in the first step after which all ranks have written it.

    Parameters
    ----------
    options : argparse.Namespace
        ``out``, ``checkpoint_every``, ``check_replicas_every`` and ``trace`` are used.
    trainer : Training
        The training.
    metrics : Metrics
        Receives a line per step.
    evaluate : callable, optional
        Called after each epoch but the last. Collective.

    Raises
    ------
    MismatchError
        On all ranks, if ``--check-replicas-every`` finds replicas that differ.
    SystemExit
        On all ranks, with ``stop_requests.EXIT_CODE``, if any rank received a signal to stop. A checkpoint has been
        written, and no step is in flight.
    """
    try:
        with (
            PreemptionHandler(trainer.comm, trainer.steps_in_flight, lambda: trainer.checkpoints_written) as requests,
            StepTrace(options.trace, Path(options.out) / TRACE, trainer.comm) as traced,
        ):
            stopped = _take_steps(options, trainer, metrics, requests, traced=traced, evaluate=evaluate)
    except (PipelineError, CommunicatorError):
        raise  # Perhaps on this rank alone: the collective finish_saving would wait for the other ranks.
    except DistconvError:
        trainer.finish_saving()
        raise
    trainer.finish_saving()
    if stopped:
        if trainer.comm.rank == 0:
            print(f"stopped by a signal after step {trainer.step_count} of {trainer.steps}. Continue with --resume.")
        trainer.close()
        sys.exit(EXIT_CODE)


def _take_steps(
    options: argparse.Namespace,
    trainer: Training,
    metrics: Metrics,
    requests: PreemptionHandler,
    *,
    traced: StepTrace,
    evaluate: Callable[[], None] | None,
) -> bool:
    """Take the steps; return True if a signal stopped them. Collective."""
    directory, every = str(Path(options.out) / CHECKPOINTS), options.checkpoint_every
    lines = _StepLines(trainer, metrics)
    with progress.progress_bar(
        rank=trainer.comm.rank, total=trainer.steps, initial=trainer.step_count, unit="step"
    ) as bar:
        began = time.perf_counter()
        for batch in trainer.batches():
            epoch = trainer.epoch
            with traced.step(trainer.step_count + 1):
                trainer.step(*batch.tensors)
            # A step that completes an epoch has already advanced trainer.epoch.
            last, ended = trainer.step_count == trainer.steps, trainer.epoch > epoch
            # Collective, so it comes first: every rank calls it exactly once per step.
            stops = requests.stop_requested() and not last
            saves = stops or (every and (last or trainer.step_count % every == 0))
            # Pipelines finish the steps in flight, so that weights and losses are those of this step.
            if last or ended or saves:
                trainer.finish_steps()
            # least_written is the minimum over all ranks, so that all ranks commit in the same step without waiting.
            if requests.least_written == trainer.checkpoints_begun:
                trainer.finish_saving()
            if options.check_replicas_every and trainer.step_count % options.check_replicas_every == 0:
                trainer.check_replicas()
            lines.add(epoch, len(batch.samples), time.perf_counter() - began)
            bar.set_postfix_str(f"epoch {epoch}, loss {lines.newest}", refresh=False)
            bar.update()
            if saves:
                trainer.start_saving(directory)
            # After the last epoch, train() evaluates for the report.
            if evaluate is not None and ended and not last:
                evaluate()
            if stops:
                return True
            began = time.perf_counter()
    return False


class _StepLines:
    """Lines of metrics.jsonl for steps, each written when its loss is known: a pipeline reports losses late."""

    def __init__(self, trainer: Training, metrics: Metrics) -> None:
        self._trainer, self._metrics = trainer, metrics
        # Lines whose loss a pipeline does not know yet, by step.
        self._waiting: dict[int, dict[str, Any]] = {}
        self._written = len(trainer.losses)
        self.newest = "unknown yet"

    def add(self, epoch: int, samples: int, seconds: float) -> None:
        """Add the step that was just taken, and write all lines whose losses are known now."""
        step = self._trainer.step_count
        self._waiting[step] = {
            "step": step,
            "epoch": epoch,
            "loss": None,
            "lr": self._trainer.optimizer.param_groups[0]["lr"],
            "seconds": round(seconds, 6),
            "samples_per_s": round(samples / seconds, 3),
        }
        for number, loss in self._trainer.losses[self._written :]:
            self._metrics.write(**self._waiting.pop(number) | {"loss": loss})
            self.newest = f"{loss:.4f}"
        self._written = len(self._trainer.losses)
