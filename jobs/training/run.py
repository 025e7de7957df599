"""The run of a training job: its folder, where it starts, and the loop with progress, metrics and checkpoints."""

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
from distconv.tracing.steps import StepTrace
from distconv.whole_files import Folder

from .report import METRICS, SUMMARY, Metrics
from .training import Training

CHECKPOINTS, TRACE = "checkpoints", "trace"


def prepare(options: argparse.Namespace, trainer: Training) -> bool:
    """Make the folder, resume if asked to; whether it did. Collective.

    Raises
    ------
    DataError
        On all ranks, if there is nothing to resume, the folder cannot be made, or it holds a run that this one would
        erase.
    CheckpointError
        On all ranks, if another job writes there.
    """
    folder, comm = Path(options.out), trainer.comm
    try_on_all_ranks(comm, lambda: _make(folder), DataError)
    try_on_all_ranks(comm, lambda: lock_directory(folder / CHECKPOINTS) if comm.rank == 0 else None, CheckpointError)
    if options.resume:
        if not trainer.resume(str(folder / CHECKPOINTS), fallback=options.resume == "whole"):
            raise DataError(
                f"--resume: there is no finished checkpoint in {folder / CHECKPOINTS}; start without --resume"
            )
        return True
    # Rank 0 alone looks and erases: another rank may be late, and see what this run has written already.
    try_on_all_ranks(comm, lambda: _make_room(folder, options.overwrite) if comm.rank == 0 else None, DataError)
    return False


def _make_room(folder: Path, overwrite: bool) -> None:
    """Erase the run that the folder holds; nothing else that lies there."""
    taken = [path for name in (CHECKPOINTS, METRICS, SUMMARY) if _holds_something(path := folder / name)]
    if taken and not overwrite:
        raise DataError(
            f"--out {folder} holds an earlier run ({', '.join(path.name for path in taken)}): go on with it by "
            "--resume, erase it by --overwrite, or name another folder"
        )
    for path in taken:
        for each in _inside(path) if _is_folder(path) else (path,):
            shutil.rmtree(each) if _is_folder(each) else each.unlink()


def _make(folder: Path) -> None:
    """Make the folder of the run, and in it that of its checkpoints, which is no way to elsewhere."""
    with Folder(folder, make=True) as out, Folder(CHECKPOINTS, make=True, within=out):
        pass


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _holds_something(path: Path) -> bool:
    """A link is a file that holds something, whatever it leads to."""
    return any(_inside(path)) if _is_folder(path) else os.path.lexists(path) and path.lstat().st_size > 0


def _inside(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != LOCK]


def take_steps(
    options: argparse.Namespace, trainer: Training, metrics: Metrics, evaluate: Callable[[], None] | None = None
) -> None:
    """All steps still to be taken; ``evaluate`` is called behind each epoch but the last. Collective.

    At the end of an epoch, and for a checkpoint, all that is under way is finished first. A checkpoint is written
    beside the steps, and committed in the first one in which all ranks have written it.

    Raises
    ------
    MismatchError
        On all ranks, if they are asked to compare replicas, and find a difference.
    SystemExit
        On all ranks, with ``stop_requests.EXIT_CODE``, if a signal has asked any of them to stop. There is a checkpoint
        then, and nothing is under way.
    """
    try:
        with (
            PreemptionHandler(trainer.comm, trainer.ahead, lambda: trainer.checkpoints_written) as requests,
            StepTrace(options.trace, Path(options.out) / TRACE, trainer.comm) as traced,
        ):
            stopped = _take_steps(options, trainer, metrics, requests, traced=traced, evaluate=evaluate)
    except (PipelineError, CommunicatorError):  # perhaps on this rank alone
        raise
    except DistconvError:
        trainer.finish_saving()
        raise
    trainer.finish_saving()
    if stopped:
        if trainer.comm.rank == 0:
            print(f"stopped by a signal after step {trainer.step_count} of {trainer.steps}; go on with --resume")
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
    """Take the steps; whether they were stopped."""
    directory, every = str(Path(options.out) / CHECKPOINTS), options.checkpoint_every
    lines = _StepLines(trainer, metrics)
    with progress.bar(rank=trainer.comm.rank, total=trainer.steps, initial=trainer.step_count, unit="step") as bar:
        began = time.perf_counter()
        for batch in trainer.batches():
            epoch = trainer.epoch
            with traced.step(trainer.step_count + 1):
                trainer.step(*batch.tensors)
            last, ended = trainer.step_count == trainer.steps, trainer.epoch > epoch
            stops = requests.stop_requested() and not last
            saves = stops or (every and (last or trainer.step_count % every == 0))
            if last or ended or saves:
                trainer.settle()
            if requests.least_written == trainer.checkpoints_begun:
                trainer.finish_saving()
            if options.check_replicas_every and trainer.step_count % options.check_replicas_every == 0:
                trainer.check_replicas()
            lines.add(epoch, len(batch.samples), time.perf_counter() - began)
            bar.set_postfix_str(f"epoch {epoch}, loss {lines.newest}", refresh=False)
            bar.update()
            if saves:
                trainer.start_saving(directory)
            if evaluate is not None and ended and not last:
                evaluate()
            if stops:
                return True
            began = time.perf_counter()
    return False


class _StepLines:
    """The lines of the steps, each of which is written when its loss is known."""

    def __init__(self, trainer: Training, metrics: Metrics) -> None:
        self._trainer, self._metrics = trainer, metrics
        self._waiting: dict[int, dict[str, Any]] = {}
        self._written = len(trainer.losses)
        self.newest = "unknown yet"

    def add(self, epoch: int, samples: int, seconds: float) -> None:
        """The step that was just taken."""
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
