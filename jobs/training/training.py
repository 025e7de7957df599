"""Training of any model over ranks: settings, learning rate, one step, and checkpoints that it goes on from.

Everything that decides a number (initial weights, order, augmentation, schedule) follows from the settings alone, so
that any grid takes the same steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from mpi4py import MPI

from distconv import checkpoint
from distconv.capture.chosen import Steps
from distconv.communication.agreement import together
from distconv.data.loader import Batch, Epochs
from distconv.errors import CheckpointError, DistconvError
from distconv.grid import ProcessGrid
from distconv.jobs.configuration.optimisation import Schedule
from distconv.parallel import parallelize
from distconv.parameters.optimizer_state import shard_optimizer
from distconv.parameters.replicas import check_replicas
from distconv.parameters.weight_files import load_weights
from distconv.plan import Plan
from distconv.tensor import DistTensor

from .settings import Settings, dtype_of, learning_rate, make_optimizer, set_rate

T = TypeVar("T")

FREE = ("epochs", "steps", "shard_optimizer")
"""The settings in which a run may differ from the one that it goes on with."""


def beside(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``tensor`` over the grid of ``other``: a plan may leave a model's output on another grid than its input."""
    if isinstance(tensor, DistTensor) and isinstance(other, DistTensor) and tensor.grid != other.grid:
        return tensor.redistribute(other.grid)
    return tensor


class Training(ABC):
    """A model in training over the ranks of ``comm``, however they share the work."""

    loader: Epochs
    """Of the training samples; a job sets it up."""

    ahead = 0
    """Steps that a rank may be ahead of another."""

    def __init__(
        self, settings: Settings, model: torch.nn.Module, grid: ProcessGrid, comm: MPI.Intracomm, device: str
    ) -> None:
        """``grid``: where batches go.

        Raises
        ------
        DistconvError
            If the settings ask for half precision beside double.
        """
        if settings.precision != "full" and settings.dtype != "float32":
            raise DistconvError(f"--precision {settings.precision} needs --dtype float32, not {settings.dtype}")
        self.settings, self.model, self.grid, self.comm, self.device = settings, model, grid, comm, device
        self.dtype = dtype_of(settings)
        self.optimizer = make_optimizer(settings, model.parameters())
        self.step_count = 0
        """Steps that have been taken."""
        self.checkpoints_begun = 0
        self._saving: checkpoint.Saving | None = None
        self._schedule: Schedule | None = None
        self.losses: list[tuple[int, float]] = []
        """Steps since this run began, counted from 1, and their losses as far as they are known."""

    @abstractmethod
    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a batch; both lie over the same grid."""

    @abstractmethod
    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float | None:
        """One step on a batch; the newest loss that is known, the same on all ranks. Collective.

        Raises
        ------
        DistconvError
            On all ranks, if a loss is not finite.
        """

    def capture(self, choice: str) -> None:
        """Let steps be captured from now on, as ``choice`` says (distconv.capture.chosen).

        Raises
        ------
        DistconvError
            If they must be, and cannot.
        """
        if choice == "on":
            raise DistconvError("--capture on: steps of a pipeline are messages between stages, and not captured")

    @abstractmethod
    def settle(self) -> None:
        """Finish the steps that are under way; all losses are known then. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Free what MPI holds for the training alone. Collective."""

    @abstractmethod
    def outputs(self, batches: Iterator[Batch], compute: Callable[[Any], T]) -> Iterator[tuple[Batch, T]]:
        """The batches with what ``compute`` makes of the inputs of each with the trained model. Collective."""

    @property
    @abstractmethod
    def where(self) -> str:
        """How the ranks share the work, as a user reads it."""

    @property
    @abstractmethod
    def placement(self) -> dict[str, Any]:
        """The same for JSON."""

    @property
    def notes(self) -> dict[str, Any]:
        """What a prediction with a checkpoint needs to know, besides the settings: the task, how values are scaled."""
        return {}

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.step_count, self.steps, self.settings.lr, self.settings.warm_up)

    def schedule(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``optimizer`` have the numbers of the next step."""
        of = self.settings
        if not of.scheduler:
            set_rate(optimizer, self.rate)
            return
        if self._schedule is None:
            schedule = Schedule(lambda parameters: make_optimizer(of, parameters))
            self._schedule = schedule.begin(of.scheduler, of.scheduler_args, steps=self.steps, peak=of.lr)
        for group in optimizer.param_groups:
            group.update(self._schedule.at(self.step_count))

    def autocast(self) -> torch.autocast:
        """Where the model is called for training: computes with the settings' precision."""
        half = self.settings.precision == "bf16"
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=half)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self._steps_of(asdict(self.settings))

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to."""
        return self.step_count // self.loader.steps

    @property
    def parameter_count(self) -> int:
        """Trained numbers of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def batches(self) -> Iterator[Batch]:
        """The batches of all steps that are still to be taken, epoch after epoch. Collective."""
        while self.step_count < self.steps:
            for batch in self.loader.epoch(self.epoch, self.step_count % self.loader.steps):
                yield batch
                if self.step_count >= self.steps:
                    return

    def note_loss(self, step: int, loss: float) -> None:
        """Add to ``losses``.

        Raises
        ------
        DistconvError
            If it is not finite.
        """
        if not math.isfinite(loss):
            raise DistconvError(f"step {step}: the loss is {loss}; lower --lr or look at the data")
        self.losses.append((step, loss))

    def check_replicas(self) -> None:
        """Raise MismatchError on all ranks if copies of a parameter or buffer are no longer the same. Collective."""
        check_replicas(self.model, self.comm)

    # -- checkpoints --------------------------------------------------------------------------------------------------

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
        together(self.comm, self._check_finite, DistconvError)
        tensors, values = checkpoint.capture(self.model, self.optimizer, self.comm)
        position = {"epoch": self.epoch, "batch": self.step_count % self.loader.steps, "samples": self.loader.samples}
        values |= {
            "settings": asdict(self.settings),
            "position": position,
            "placement": self.placement,
            "notes": self.notes,
        }
        self._saving = checkpoint.Saving(directory, self.step_count, tensors, values, self.comm)
        self.checkpoints_begun += 1

    @property
    def checkpoints_written(self) -> int:
        """How many of the checkpoints that were begun this rank has written."""
        return self.checkpoints_begun - (self._saving is not None and not self._saving.written)

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

        def check(contents: checkpoint.Contents) -> None:
            self._check_settings(contents)
            checkpoint.check_fits(contents, self.model, self.optimizer)

        layouts = checkpoint.layouts_of(self.model)
        found = checkpoint.load_newest(directory, self.comm, layouts, check, fallback=fallback)
        if found is None:
            return False
        for text in found.skipped if self.comm.rank == 0 else ():
            print(f"passed over: {text}")
        checkpoint.restore(found, self.model, self.optimizer, self.comm)
        self.step_count = found.step
        then = self._steps_of(found.values["settings"])
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

    def _check_settings(self, found: checkpoint.Contents) -> None:
        try:
            settings, position = found.values["settings"], found.values["position"]
            # What a checkpoint does not know yet was as it is by default.
            then = asdict(type(self.settings)()) | settings | {"training samples": position["samples"]}
            self._steps_of(then)
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint of step {found.step} is none of distconv train: it has no settings and position; one of "
                "dc.save_checkpoint is read by dc.load_checkpoint"
            ) from error
        now = asdict(self.settings) | {"training samples": self.loader.samples}
        wrong = [
            f"{key} was {then.get(key)!r} and is {value!r}"
            for key, value in now.items()
            if then.get(key) != value and key not in FREE
        ]
        if wrong:
            raise CheckpointError(f"checkpoint of step {found.step} was made with other settings: {'; '.join(wrong)}")
        if found.step > self.steps:
            raise CheckpointError(f"checkpoint of step {found.step} lies beyond the {self.steps} steps of this run")

    def _steps_of(self, settings: Mapping[str, Any]) -> int:
        steps: int = settings["steps"] or settings["epochs"] * self.loader.steps
        return steps


class Trainer(Training):
    """A model in training over a grid, or as a plan says."""

    def __init__(
        self, settings: Settings, model: torch.nn.Module, place: ProcessGrid | Plan, comm: MPI.Intracomm, device: str
    ) -> None:
        """``place`` is the grid of all layers, or the plan that says which layer is on which."""
        self.place = place
        self.taken = Steps(self._differentiate, "off", comm)
        """By what steps are taken, without the optimizer."""
        grid = place.input_grid(model, comm) if isinstance(place, Plan) else place
        model = parallelize(model.to(device, dtype_of(settings)), place, comm=comm, batch_norm=settings.batch_norm)
        super().__init__(settings, model, grid, comm, device)
        if settings.shard_optimizer:
            shard_optimizer(self.optimizer, comm)

    @property
    def where(self) -> str:
        """The grid or the plan, as a user reads it."""
        plan = f"a plan of {len(self.place.layers)} patterns, samples on " if isinstance(self.place, Plan) else ""
        return f"{plan}grid {self.grid.describe()}"

    @property
    def placement(self) -> dict[str, Any]:
        """The grid and the plan."""
        return {"grid": self.grid.describe(), "plan": self.place.layers if isinstance(self.place, Plan) else None}

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        """One step of the optimizer on a batch; returns its loss, the same on all ranks. Collective.

        Raises
        ------
        DistconvError
            On all ranks, if the loss is not finite; the weights are those from before the step.
        """
        self.model.train()
        self.schedule(self.optimizer)
        self.optimizer.zero_grad()
        value = float(self.taken(inputs, labels))
        # One decision: ranks that have come apart may not have the same loss.
        together(self.comm, lambda: self.note_loss(self.step_count + 1, value), DistconvError)
        if self.settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.step_count += 1
        return value

    def capture(self, choice: str) -> None:
        """Let steps be captured from now on, as ``choice`` says (distconv.capture.chosen)."""
        self.taken = Steps(self._differentiate, choice, self.comm, lambda: self.steps - self.step_count)

    def _differentiate(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a batch, whose gradients the parameters have then."""
        with self.autocast():
            outputs = self.model(inputs)
        if self.settings.precision != "full":
            outputs = outputs.to(self.dtype)
        loss = self.loss(outputs, beside(labels, outputs))
        loss.backward()
        return loss.detach()

    def settle(self) -> None:
        """Nothing is under way between steps."""

    @torch.no_grad()
    def outputs(self, batches: Iterator[Batch], compute: Callable[[Any], T]) -> Iterator[tuple[Batch, T]]:
        """The batches with what ``compute`` makes of the inputs of each with the trained model. Collective."""
        self.model.eval()
        for batch in batches:
            yield batch, compute(batch.tensors[0])

    def close(self) -> None:
        """Nothing to free: the grid may serve others."""
