"""Checkpoints of a training: saving, resuming, and checking that a checkpoint belongs to the run.

Base class of all trainers. Checkpoints are independent of the grid or pipeline: any can resume from any other's.
"""

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

FREE = ("epochs", "steps", "shard_optimizer", "shard_weights")
"""Settings in which a resumed run may differ from its checkpoint."""


class Recoverable(ABC):
    """Training that writes checkpoints and resumes from them."""

    settings: TrainingSettings
    model: torch.nn.Module
    average: torch.optim.swa_utils.AveragedModel | None
    """Moving average of the weights (``--ema``), or None."""
    optimizer: torch.optim.Optimizer
    comm: MPI.Intracomm
    loader: EpochLoader
    """Loader of the training samples. The subclass of a job creates it."""

    def __init__(self) -> None:
        self.step_count = 0
        """Number of completed steps, those before a resumption included."""
        self.checkpoints_begun = 0
        """Number of checkpoints that this process has started to write."""
        self._saving: checkpoint.AsyncSave | None = None

    @property
    @abstractmethod
    def placement(self) -> dict[str, Any]:
        """Distribution of the work over ranks, as JSON values."""

    @property
    def notes(self) -> dict[str, Any]:
        """Metadata that a prediction needs in addition to the settings, such as the task and the scaling of values."""
        return {}

    @property
    def steps(self) -> int:
        """Number of steps of the run, completed ones included."""
        return self._steps_of(asdict(self.settings))

    @property
    def epoch(self) -> int:
        """Epoch of the next step."""
        return self.step_count // self.loader.steps

    def save(self, directory: str) -> None:
        """Write a checkpoint of everything that later steps depend on. Collective: call on every rank.

        Parameters
        ----------
        directory : str
            Folder of the run's checkpoints.

        Raises
        ------
        DistconvError
            On all ranks, if a parameter is not finite, or the checkpoint cannot be written. Older checkpoints remain.
        """
        self.start_saving(directory)
        self.finish_saving()

    def start_saving(self, directory: str) -> None:
        """Start writing a checkpoint in the background; :meth:`finish_saving` commits it. Collective.

        The state is copied before the call returns, so that steps can follow. A previous checkpoint is finished first.

        Parameters
        ----------
        directory : str
            Folder of the run's checkpoints.

        Raises
        ------
        DistconvError
            On all ranks, if a parameter is not finite, or the previous checkpoint could not be written.
        """
        self.finish_saving()
        # A checkpoint with NaN would replace an older good one, since only the newest ones are kept.
        try_on_all_ranks(self.comm, self._check_finite, DistconvError)
        tensors, values = checkpoint.capture_state(self.model, self.optimizer, self.comm)
        if self.average is not None:
            tensors |= checkpoint.capture_average(self.average)
        # Of the full mini-batch and the file, never of this grid: any number of ranks resumes from it.
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
        """Number of started checkpoints that this rank has written completely."""
        return self.checkpoints_begun - (self._saving is not None and not self._saving.is_written)

    def finish_saving(self) -> None:
        """Wait for the started checkpoint, if any, and commit it. Collective.

        Raises
        ------
        CheckpointError
            On all ranks, if the checkpoint could not be written. Older checkpoints remain, and training can resume.
        """
        # Forgotten first: if finish() raises, a later call must not wait for the same files again.
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def _check_finite(self) -> None:
        for name, parameter in self.model.named_parameters():
            block = parameter.local if isinstance(parameter, DistTensor) else parameter
            if not torch.isfinite(block.detach()).all():
                raise DistconvError(
                    f"step {self.step_count}: {name!r} is no longer finite, so no checkpoint is written. Use a "
                    "smaller --lr, or check the data."
                )

    def resume(self, directory: str, *, fallback: bool = False) -> bool:
        """Resume from the newest finished checkpoint. Collective: call on every rank.

        Parameters
        ----------
        directory : str
            Folder of the run's checkpoints.
        fallback : bool
            Skip damaged checkpoints.

        Returns
        -------
        bool
            False if there is no checkpoint.

        Raises
        ------
        CheckpointError
            On all ranks, if the checkpoint is damaged, or was made with other settings or data.
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
        # A schedule depends on the number of steps, so results differ from those of an uninterrupted run.
        then = self._steps_of(newest.values["settings"])
        if then != self.steps and self.comm.rank == 0:
            print(
                f"the run had {then} steps and now has {self.steps}: from step {self.step_count} on, the learning rate "
                f"is that of {self.steps} steps. The results differ from those of a run with {self.steps} steps from "
                "its start."
            )
        return True

    def load_initial_weights(self, path: Path) -> None:
        """Load the weights of a file into the model. Collective: call on every rank.

        Parameters
        ----------
        path : pathlib.Path
            A ``.pt`` or ``.safetensors`` file.

        Raises
        ------
        CheckpointError
            On all ranks, if the file cannot be read, or its weights do not fit the model.
        """
        load_weights(self.model, path, self.comm)

    def _check_settings(self, saved: checkpoint.CheckpointMetadata) -> None:
        try:
            settings, position = saved.values["settings"], saved.values["position"]
            # Checkpoints from before a setting was introduced lack it: they used its default.
            then = asdict(type(self.settings)()) | settings | {"training samples": position["samples"]}
            self._steps_of(then)  # Raises KeyError or TypeError if the settings are not those of a training.
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint of step {saved.step}: not written by distconv train, since it has no settings and "
                "position. Read checkpoints of dc.save_checkpoint with dc.load_checkpoint."
            ) from error
        now = asdict(self.settings) | {"training samples": self.loader.samples}
        wrong = [
            f"{key} was {then.get(key)!r} and is {value!r}"
            for key, value in now.items()
            if then.get(key) != value and key not in FREE
        ]
        if wrong:
            raise CheckpointError(
                f"checkpoint of step {saved.step}: written with different settings: {'; '.join(wrong)}"
            )
        noted = saved.values.get("notes") or {}
        other = [
            f"{key} was {was!r} and is {self.notes.get(key)!r}"
            for key, was in noted.items()
            if was != self.notes.get(key)
        ]
        if other:
            raise CheckpointError(f"checkpoint of step {saved.step}: written with different data: {'; '.join(other)}")
        if saved.step > self.steps:
            raise CheckpointError(
                f"checkpoint of step {saved.step}: later than the {self.steps} steps of this run. Use more "
                "--epochs or --steps."
            )

    def _steps_of(self, settings: Mapping[str, Any]) -> int:
        steps: int = settings["steps"] or settings["epochs"] * self.loader.steps
        return steps
