"""Memory format of a training's images and weights (``--memory-format``): given, or the faster one.

Called once at the start of a training job. Formats differ in rounding, so a resumed run keeps the one that it began
with.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mpi4py import MPI

from distconv.checkpoint.manifest import newest_first, read
from distconv.checkpoint.values import from_json
from distconv.communication.agreement import try_on_rank_0
from distconv.errors import CheckpointError
from distconv.jobs.captured_steps import now
from distconv.memory_format import FORMATS

from .run import CHECKPOINTS
from .settings import TrainingSettings
from .training import Trainer, Training

S = TypeVar("S", bound=TrainingSettings)

_WORTHWHILE = 100
"""Minimum of steps for which ``auto`` measures, since the measurement takes ten steps."""

_MEASURED, _WARM_UP = 5, 2
"""Steps taken with each format, and those of them that are not counted."""


def add_memory_format_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--memory-format``."""
    parser.add_argument(
        "--memory-format",
        choices=("auto", *FORMATS),
        default="auto",
        help="order of images and weights in memory; auto: the one with faster steps, measured once at the start of a "
        f"run of {_WORTHWHILE} or more steps (default: %(default)s)",
    )


def make_in_memory_format(
    options: argparse.Namespace, settings: S, make: Callable[[S], Training], comm: MPI.Intracomm
) -> Training:
    """Return a training whose tensors have the memory format that the options select. Collective.

    Parameters
    ----------
    options : argparse.Namespace
        ``memory_format``, ``resume`` and ``out`` are used. Commands without images lack the first.
    settings : TrainingSettings
        With contiguous memory.
    make : callable
        Makes the training from settings. ``auto`` makes one for each format, takes steps, and drops it.
    comm : mpi4py.MPI.Intracomm

    Returns
    -------
    Training
        No step has been taken.
    """
    choice = getattr(options, "memory_format", FORMATS[0])
    if choice == "auto" and options.resume:
        choice = try_on_rank_0(comm, lambda: _format_of_checkpoint(options.out), CheckpointError)
    training = make(settings if choice == "auto" else replace(settings, memory_format=choice))
    measurable = isinstance(training, Trainer) and training.image_dims in (4, 5) and training.steps >= _WORTHWHILE
    if choice != "auto" or not measurable:
        return training
    contiguous = _seconds_per_step(training)
    try:
        channels_last = _seconds_per_step(make(replace(settings, memory_format=FORMATS[1])))
    # A model may call view() on a result of a convolution. All ranks raise the same error.
    except RuntimeError as error:
        chosen, reason = FORMATS[0], f"with channels_last tensors the model raises {type(error).__name__}: {error}"
    else:
        chosen = FORMATS[contiguous > channels_last]
        reason = (
            f"a step takes {1e3 * contiguous:.1f} ms with contiguous tensors and {1e3 * channels_last:.1f} ms with "
            "channels_last ones"
        )
    if comm.rank == 0:
        print(f"memory format {chosen}: {reason}", flush=True)
    # Made again, since the steps have changed the weights, and drawn random numbers.
    return make(replace(settings, memory_format=chosen))


def _format_of_checkpoint(out: Path) -> str:
    """Return the memory format of the newest readable checkpoint, or contiguous if it has none."""
    for folder in newest_first(out / CHECKPOINTS, MPI.COMM_SELF):
        with contextlib.suppress(CheckpointError):  # A damaged checkpoint is reported when it is loaded.
            settings = from_json(read(folder)["values"]).get("settings")
            found = settings.get("memory_format") if isinstance(settings, dict) else None
            return FORMATS[1] if found == FORMATS[1] else FORMATS[0]
    return FORMATS[0]


def _seconds_per_step(training: Training) -> float:
    """Return the median time of the measured steps on the slowest rank, and close the training. Collective."""
    seconds = []
    # Both are closed also if a step raises: the loader reads ahead in threads of its own.
    with closing(training), closing(training.batches()) as batches:  # type: ignore[type-var]  # a generator
        for batch in itertools.islice(batches, _MEASURED):
            began = now()
            training.step(*batch.tensors)
            seconds.append(now() - began)
    # Freed here: the next training has tensors of the same sizes, and Python frees this one later.
    training.optimizer.zero_grad()
    training.optimizer.state.clear()
    return float(training.comm.allreduce(statistics.median(seconds[_WARM_UP:]), MPI.MAX))
