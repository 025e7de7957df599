"""What a training goes on from: its checkpoints, and which of them are its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from distconv import checkpoint
from distconv.communication.agreement import try_on_all_ranks
from distconv.data.loader import EpochLoader
from distconv.errors import CheckpointError, DistconvError
from distconv.parameters.weight_files import load_weights
from distconv.tensor import DistTensor

from .settings import TrainingSettings

FREE = ("epochs", "steps", "shard_optimizer")
"""The settings in which a run may differ from the one that it goes on with."""


class Recoverable(ABC):
    """A training that writes checkpoints and goes on from them."""

    settings: TrainingSettings
    model: torch.nn.Module
    average: torch.optim.swa_utils.AveragedModel | None
    """The moving average of the weights, if there is one."""
    optimizer: torch.optim.Optimizer
    comm: MPI.Intracomm
    loader: EpochLoader
    """Of the training samples; a job sets it up."""

    def __init__(self) -> None:
        self.step_count = 0
        """Steps that have been taken."""
        self.checkpoints_begun = 0
        self._saving: checkpoint.AsyncSave | None = None

    @property
    @abstractmethod
    def placement(self) -> dict[str, Any]:
        """How the ranks share the work, for JSON."""

    @property
    def notes(self) -> dict[str, Any]:
        """What a prediction with a checkpoint needs to know, besides the settings: the task, how values are scaled."""
        return {}

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self._steps_of(asdict(self.settings))

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to."""
        return self.step_count // self.loader.steps

    def save(self, directory: str) -> None:
        """Write a checkpoint of everything that the following steps depend on. Collective.

        Raises
        ------
        DistconvError
            On all ranks, if a parameter is not finite, or it cannot be written: older checkpoints stay the newest then.
        """
        self.start_saving(directory)
        self.finish_saving()

    def start_saving(self, directory: str) -> None:
        """As :meth:`save`, but the steps may go on when everything is copied; ``finish_saving`` commits. Collective.

        The one before is finished first.

        Raises
        ------
        DistconvError
            On all ranks, if a parameter is not finite, or the one before could not be written.
        """
        self.finish_saving()
        try_on_all_ranks(self.comm, self._check_finite, DistconvError)
        tensors, values = checkpoint.capture_state(self.model, self.optimizer, self.comm)
        if self.average is not None:
            tensors |= checkpoint.capture_average(self.average)
        position = {"epoch": self.epoch, "batch": self.step_count % self.loader.steps, "samples": self.loader.samples}
        values |= {
            "settings": asdict(self.settings),
            "position": position,
            "placement": self.placement,
            "notes": self.notes,
        }
        self._saving = checkpoint.AsyncSave(directory, self.step_count, tensors, values, self.comm)
        self.checkpoints_begun += 1

    @property
    def checkpoints_written(self) -> int:
        """How many of the checkpoints that were begun this rank has written."""
        return self.checkpoints_begun - (self._saving is not None and not self._saving.is_written)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that was begun, if any, and commit it. Collective.

        Raises
        ------
        CheckpointError
            On all ranks, if it could not be written: older checkpoints stay the newest then, and steps may go on.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def _check_finite(self) -> None:
        for name, parameter in self.model.named_parameters():
            block = parameter.local if isinstance(parameter, DistTensor) else parameter
            if not torch.isfinite(block.detach()).all():
                raise DistconvError(
                    f"step {self.step_count}: {name!r} is not finite any more, and no checkpoint is written; "
                    "lower --lr or look at the data"
                )

    def resume(self, directory: str, *, fallback: bool = False) -> bool:
        """Go on from the newest finished checkpoint below ``directory``; False if there is none. Collective.

        With ``fallback`` those that are damaged are passed over.

        Raises
        ------
        CheckpointError
            On all ranks, if it is damaged, or of other settings or data.
        """

        def check(contents: checkpoint.CheckpointMetadata) -> None:
            self._check_settings(contents)
            checkpoint.check_fits(contents, self.model, self.optimizer)

        layouts = checkpoint.layout_resolver(self.model)
        newest = checkpoint.load_newest(directory, self.comm, layouts, check, fallback=fallback)
        if newest is None:
            return False
        for text in newest.skipped if self.comm.rank == 0 else ():
            print(f"passed over: {text}")
        checkpoint.restore_state(newest, self.model, self.optimizer, self.comm)
        if self.average is not None:
            checkpoint.restore_average(newest, self.average)
        self.step_count = newest.step
        then = self._steps_of(newest.values["settings"])
        if then != self.steps and self.comm.rank == 0:
            print(
                f"the run was one of {then} steps and is now one of {self.steps}: the learning rate from step "
                f"{self.step_count} on is that of {self.steps} steps, so the numbers are not those of a run that had "
                f"{self.steps} from its start"
            )
        return True

    def begin_with(self, path: Path) -> None:
        """Let the model have the weights of a file. Collective.

        Raises
        ------
        CheckpointError
            On all ranks, if it cannot be read, or its weights do not fit.
        """
        load_weights(self.model, path, self.comm)

    def _check_settings(self, saved: checkpoint.CheckpointMetadata) -> None:
        try:
            settings, position = saved.values["settings"], saved.values["position"]
            # What a checkpoint does not know yet was as it is by default.
            then = asdict(type(self.settings)()) | settings | {"training samples": position["samples"]}
            self._steps_of(then)
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint of step {saved.step} is none of distconv train: it has no settings and position; one of "
                "dc.save_checkpoint is read by dc.load_checkpoint"
            ) from error
        now = asdict(self.settings) | {"training samples": self.loader.samples}
        wrong = [
            f"{key} was {then.get(key)!r} and is {value!r}"
            for key, value in now.items()
            if then.get(key) != value and key not in FREE
        ]
        if wrong:
            raise CheckpointError(f"checkpoint of step {saved.step} was made with other settings: {'; '.join(wrong)}")
        noted = saved.values.get("notes") or {}
        other = [
            f"{key} was {was!r} and is {self.notes.get(key)!r}"
            for key, was in noted.items()
            if was != self.notes.get(key)
        ]
        if other:
            raise CheckpointError(f"checkpoint of step {saved.step} was made with other data: {'; '.join(other)}")
        if saved.step > self.steps:
            raise CheckpointError(f"checkpoint of step {saved.step} lies beyond the {self.steps} steps of this run")

    def _steps_of(self, settings: Mapping[str, Any]) -> int:
        steps: int = settings["steps"] or settings["epochs"] * self.loader.steps
        return steps
