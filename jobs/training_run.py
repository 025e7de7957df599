"""The run of a training job: its folder, where it starts, and the loop with progress, metrics and checkpoints."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from distconv.agreement import together
from distconv.errors import DataError

from .training import Trainer
from .training_report import Metrics

CHECKPOINTS = "checkpoints"


def prepare(options: argparse.Namespace, trainer: Trainer) -> bool:
    """Make the folder, resume if asked to; whether it did. Collective.

    Raises
    ------
    DataError
        On all ranks, if there is nothing to resume, or the folder cannot be made.
    """
    folder, comm = Path(options.out), trainer.comm
    together(comm, lambda: folder.mkdir(parents=True, exist_ok=True), DataError)
    if options.resume:
        if not trainer.resume(str(folder / CHECKPOINTS)):
            raise DataError(
                f"--resume: there is no finished checkpoint in {folder / CHECKPOINTS}; start without --resume"
            )
        return True
    # A new run must not take the older one's checkpoints for its own.
    together(comm, lambda: _put_aside(folder / CHECKPOINTS) if comm.rank == 0 else None, DataError)
    return False


def _put_aside(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
        print(f"the checkpoints of an earlier run are now in {aside}")


def take_steps(
    options: argparse.Namespace, trainer: Trainer, metrics: Metrics, evaluate: Callable[[], None] | None = None
) -> None:
    """All steps still to be taken; ``evaluate`` is called behind each epoch but the last. Collective."""
    directory, every = str(Path(options.out) / CHECKPOINTS), options.checkpoint_every
    with tqdm(
        total=trainer.steps, initial=trainer.step_count, disable=trainer.comm.rank != 0, unit="step", mininterval=1.0
    ) as bar:
        began = time.perf_counter()
        for batch in trainer.batches():
            epoch = trainer.epoch
            loss = trainer.step(*batch.tensors)
            seconds = time.perf_counter() - began
            metrics.write(
                step=trainer.step_count,
                epoch=epoch,
                loss=loss,
                lr=trainer.optimizer.param_groups[0]["lr"],
                seconds=round(seconds, 6),
                samples_per_s=round(len(batch.samples) / seconds, 3),
            )
            bar.set_postfix_str(f"epoch {epoch}, loss {loss:.4f}", refresh=False)
            bar.update()
            last = trainer.step_count == trainer.steps
            if evaluate is not None and trainer.epoch > epoch and not last:
                evaluate()
            if every and (last or trainer.step_count % every == 0):
                trainer.save(directory)
            began = time.perf_counter()
