"""Training of any model over ranks: settings, learning rate, one step.

Everything that decides a number (initial weights, order, augmentation, schedule) follows from the settings alone, so
that any grid takes the same steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from mpi4py import MPI
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from distconv.communication.agreement import try_on_all_ranks
from distconv.communication.gradient_reduction import no_sync
from distconv.data.loader import Batch
from distconv.errors import DistconvError
from distconv.grid import ProcessGrid
from distconv.jobs.captured_steps import AutoCapturedStep
from distconv.jobs.configuration.optimisation import RateSchedule
from distconv.parallel import parallelize
from distconv.parameters.optimizer_state import shard_optimizer
from distconv.parameters.replicas import check_replicas
from distconv.plan import Plan
from distconv.tensor import DistTensor

from .recovery import Recoverable
from .settings import TrainingSettings, dtype_of, learning_rate, make_optimizer, set_rate

T = TypeVar("T")


def beside(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``tensor`` over the grid of ``other``: a plan may leave a model's output on another grid than its input."""
    if isinstance(tensor, DistTensor) and isinstance(other, DistTensor) and tensor.grid != other.grid:
        return tensor.redistribute(other.grid)
    return tensor


def _average_of(model: torch.nn.Module, decay: float | None) -> AveragedModel | None:
    return None if decay is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))


class Training(Recoverable):
    """A model in training over the ranks of ``comm``, however they share the work."""

    ahead = 0
    """Steps that a rank may be ahead of another."""

    def __init__(
        self, settings: TrainingSettings, model: torch.nn.Module, grid: ProcessGrid, comm: MPI.Intracomm, device: str
    ) -> None:
        """``grid``: where batches go.

        Raises
        ------
        DistconvError
            If the settings ask for half precision beside double.
        """
        super().__init__()
        if settings.precision != "full" and settings.dtype != "float32":
            raise DistconvError(f"--precision {settings.precision} needs --dtype float32, not {settings.dtype}")
        self.settings, self.model, self.grid, self.comm, self.device = settings, model, grid, comm, device
        self.dtype = dtype_of(settings)
        self.optimizer = make_optimizer(settings, model.parameters())
        self.average = _average_of(model, settings.ema)
        self._schedule: RateSchedule | None = None
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
        """Let steps be captured from now on, as ``choice`` says (distconv.jobs.captured_steps).

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
            schedule = RateSchedule(lambda parameters: make_optimizer(of, parameters))
            self._schedule = schedule.begin(of.scheduler, of.scheduler_args, steps=self.steps, peak=of.lr)
        for group in optimizer.param_groups:
            group.update(self._schedule.at(self.step_count))

    def autocast(self) -> torch.autocast:
        """Where the model is called for training: computes with the settings' precision."""
        half = self.settings.precision == "bf16"
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=half)

    @property
    def evaluated(self) -> torch.nn.Module:
        """What is evaluated: the model, or the moving average of its weights."""
        return self.model if self.average is None else self.average.module

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


class Trainer(Training):
    """A model in training over a grid, or as a plan says."""

    def __init__(
        self,
        settings: TrainingSettings,
        model: torch.nn.Module,
        place: ProcessGrid | Plan,
        comm: MPI.Intracomm,
        device: str,
    ) -> None:
        """``place`` is the grid of all layers, or the plan that says which layer is on which."""
        self.place = place
        self.taken = AutoCapturedStep(self._differentiate, "off", comm)
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

        Of a batch that comes in parts both are sequences.

        Raises
        ------
        DistconvError
            On all ranks, if the loss is not finite; the weights are those from before the step.
        """
        self.model.train()
        self.schedule(self.optimizer)
        self.optimizer.zero_grad()
        value = self._accumulate(inputs, labels) if self.settings.accumulate > 1 else float(self.taken(inputs, labels))
        # One decision: ranks that have come apart may not have the same loss.
        try_on_all_ranks(self.comm, lambda: self.note_loss(self.step_count + 1, value), DistconvError)
        if self.settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.step_count += 1
        return value

    def _accumulate(self, inputs: Iterable[torch.Tensor], labels: Iterable[torch.Tensor]) -> float:
        """The loss of a batch that comes in parts, whose gradients the parameters have then."""
        samples = [len(each) for each in labels]
        losses = []
        for number, part in enumerate(zip(inputs, labels, strict=True), 1):
            with no_sync() if number < len(samples) else nullcontext():
                losses.append(self._differentiate(*part, share=samples[number - 1] / sum(samples)))
        return sum(map(float, losses))

    def capture(self, choice: str) -> None:
        """Let steps be captured from now on, as ``choice`` says (distconv.jobs.captured_steps).

        Raises
        ------
        DistconvError
            If they must be, and batches come in parts.
        """
        if choice == "on" and self.settings.accumulate > 1:
            raise DistconvError("--capture on: steps of several parts (--accumulate) are not captured")
        self.taken = AutoCapturedStep(self._differentiate, choice, self.comm, lambda: self.steps - self.step_count)

    def _differentiate(self, inputs: torch.Tensor, labels: torch.Tensor, share: float = 1.0) -> torch.Tensor:
        """The ``share`` that the loss of a batch has, whose gradients are added to those of the parameters."""
        with self.autocast():
            outputs = self.model(inputs)
        if self.settings.precision != "full":
            outputs = outputs.to(self.dtype)
        loss = self.loss(outputs, beside(labels, outputs))
        if share != 1.0:
            loss = loss * share
        loss.backward()
        return loss.detach()

    def settle(self) -> None:
        """Nothing is under way between steps."""

    @torch.no_grad()
    def outputs(self, batches: Iterator[Batch], compute: Callable[[Any], T]) -> Iterator[tuple[Batch, T]]:
        """The batches with what ``compute`` makes of the inputs of each with the trained model. Collective."""
        self.evaluated.eval()
        for batch in batches:
            yield batch, compute(batch.tensors[0])

    def close(self) -> None:
        """Nothing to free: the grid may serve others."""
