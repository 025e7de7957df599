"""Training of any model over ranks: learning rate, one step, evaluation.

The trainers of the jobs derive from :class:`Trainer` (grid or plan) or from the trainer of pipelines. Initial weights,
sample order, augmentation and schedule depend on the settings alone, so that all grids take the same steps.
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
from distconv.memory_format import convert_weights, named_format
from distconv.parallel import parallelize
from distconv.parameters.optimizer_state import shard_optimizer
from distconv.parameters.replicas import check_replicas
from distconv.plan import Plan
from distconv.tensor import DistTensor

from .recovery import Recoverable
from .settings import (
    TrainingSettings,
    dtype_of,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)

T = TypeVar("T")


def match_grid(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Redistribute ``tensor`` to the grid of ``other``, if both are distributed. Collective.

    A plan may place a model's output on another grid than its input, where the labels are.

    Parameters
    ----------
    tensor, other : torch.Tensor

    Returns
    -------
    torch.Tensor
        ``tensor`` itself if no redistribution is needed.
    """
    if isinstance(tensor, DistTensor) and isinstance(other, DistTensor) and tensor.grid != other.grid:
        return tensor.redistribute(other.grid)
    return tensor


class Training(Recoverable):
    """A model in training over the ranks of ``comm``; subclasses define how ranks divide the work."""

    steps_in_flight = 0
    """Number of steps that a rank may be ahead of another (0 on a grid, the number of stages in a pipeline)."""

    def __init__(
        self, settings: TrainingSettings, model: torch.nn.Module, grid: ProcessGrid, comm: MPI.Intracomm, device: str
    ) -> None:
        """Create the optimizer and the average of the weights.

        Parameters
        ----------
        settings : TrainingSettings
        model : torch.nn.Module
            The model, on its device.
        grid : ProcessGrid
            Grid of the input batches.
        comm : mpi4py.MPI.Intracomm
            All ranks of the training.
        device : str
            Device of this rank.

        Raises
        ------
        DistconvError
            If the settings combine ``precision="bf16"`` with another dtype than float32.
        """
        super().__init__()
        if settings.precision != "full" and settings.dtype != "float32":
            raise DistconvError(f"--precision {settings.precision}: needs --dtype float32, not {settings.dtype}")
        self.settings, self.model, self.grid, self.comm, self.device = settings, model, grid, comm, device
        self.dtype = dtype_of(settings)
        # The model is already parallelized: sharded weights have replaced the parameters of full size.
        self.optimizer = make_optimizer(settings, model.parameters())
        self.average: AveragedModel | None = None
        if settings.ema is not None:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.ema))
        self._schedule: RateSchedule | None = None
        self.losses: list[tuple[int, float]] = []
        """Step number, counted from 1, and loss of the steps of this process whose losses are known."""

    @abstractmethod
    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch. ``outputs`` and ``labels`` are on the same grid. Collective.

        Parameters
        ----------
        outputs : torch.Tensor
            Outputs of the network.
        labels : torch.Tensor
            Their labels.

        Returns
        -------
        torch.Tensor
            Scalar.
        """

    @abstractmethod
    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float | None:
        """Take a step on a batch. Collective: call on every rank.

        Parameters
        ----------
        inputs, labels : torch.Tensor
            Tensors of the batch as the loader returns them.

        Returns
        -------
        float or None
            The newest known loss, the same on all ranks. None if no loss is known yet.

        Raises
        ------
        DistconvError
            On all ranks, if a loss is not finite.
        """

    def capture(self, choice: str) -> None:
        """Select whether later steps are captured: ``choice`` is one of ``distconv.jobs.captured_steps.CHOICES``.

        Here, ``auto`` has no effect. :class:`Trainer` overrides the method.

        Raises
        ------
        DistconvError
            If ``choice`` is ``on``.
        """
        if choice == "on":
            raise DistconvError(
                "--capture on: steps of a pipeline exchange messages between stages and cannot be captured. Remove it."
            )

    @abstractmethod
    def finish_steps(self) -> None:
        """Finish the steps in flight. All losses are known afterwards. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Free the MPI resources that belong to this training. Collective."""

    @abstractmethod
    def outputs(self, batches: Iterator[Batch], compute: Callable[[Any], T]) -> Iterator[tuple[Batch, T]]:
        """Yield each batch with a result computed by the trained model. Collective: advance it on every rank.

        Parameters
        ----------
        batches : iterator of Batch
            Batches, the same on all ranks.
        compute : callable
            Called with the inputs of a batch, without gradients and in evaluation mode.

        Yields
        ------
        (Batch, T)
            The batch and the return value of ``compute``.
        """

    @property
    @abstractmethod
    def distribution(self) -> str:
        """Distribution of the work over ranks, in words."""

    @property
    def image_dims(self) -> int:
        """Number of dimensions of a batch of images (4) or volumes (5); 0 for other samples."""
        return 0

    @property
    def image_format(self) -> dict[str, torch.memory_format]:
        """Memory format of the images, as an option of their loader."""
        return {"memory_format": named_format(self.settings.memory_format, self.image_dims)}

    @property
    def rate(self) -> float:
        """Learning rate of the next step, without ``--scheduler``."""
        return learning_rate(self.step_count, self.steps, self.settings.lr, self.settings.warm_up)

    def schedule(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the learning rate, and the other scheduled values, of the next step in ``optimizer``."""
        settings = self.settings
        if not settings.scheduler:
            set_learning_rate(optimizer, self.rate)
            return
        if self._schedule is None:
            schedule = RateSchedule(lambda parameters: make_optimizer(settings, parameters))
            self._schedule = schedule.begin(
                settings.scheduler, settings.scheduler_args, steps=self.steps, peak=settings.lr
            )
        # Values, not a scheduler object of torch: a resumed run computes those of its step without the steps before
        # it.
        for group in optimizer.param_groups:
            group.update(self._schedule.values_at(self.step_count))

    def autocast(self) -> torch.autocast:
        """Return the autocast context for the training forward pass, as the settings' precision requires."""
        half = self.settings.precision == "bf16"
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=half)

    @property
    def evaluation_model(self) -> torch.nn.Module:
        """Model used for evaluation, which is the moving average of the weights if there is one."""
        return self.model if self.average is None else self.average.module

    @property
    def parameter_count(self) -> int:
        """Number of elements of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of all remaining steps, epoch after epoch. Collective."""
        while self.step_count < self.steps:
            # A resumed run begins within an epoch; the order of its samples is that of the uninterrupted run.
            for batch in self.loader.epoch(self.epoch, self.step_count % self.loader.steps):
                yield batch
                if self.step_count >= self.steps:
                    return

    def record_loss(self, step: int, loss: float) -> None:
        """Record the loss of a step.

        Parameters
        ----------
        step : int
            Step, counted from 1.
        loss : float

        Raises
        ------
        DistconvError
            If the loss is not finite.
        """
        if not math.isfinite(loss):
            raise DistconvError(f"step {step}: the loss is {loss}. Use a smaller --lr, or check the data.")
        self.losses.append((step, loss))

    def check_replicas(self) -> None:
        """Check that all replicas of each parameter and buffer are identical. Collective.

        Raises
        ------
        MismatchError
            On all ranks, if replicas differ.
        """
        check_replicas(self.model, self.comm)


class Trainer(Training):
    """A model in training over a grid, or over the grids of a plan."""

    def __init__(
        self,
        settings: TrainingSettings,
        model: torch.nn.Module,
        grid_or_plan: ProcessGrid | Plan,
        comm: MPI.Intracomm,
        device: str,
    ) -> None:
        """Distribute the model. Collective: construct it on every rank.

        Parameters
        ----------
        settings : TrainingSettings
        model : torch.nn.Module
            The model, the same on all ranks.
        grid_or_plan : ProcessGrid or Plan
            Grid of all layers, or a plan with the grid of each layer.
        comm : mpi4py.MPI.Intracomm
        device : str
            Device of this rank.
        """
        self.grid_or_plan = grid_or_plan
        self.captured_step = AutoCapturedStep(self._differentiate, "off", comm)
        """Forward and backward pass of a step, captured or eager."""
        grid = grid_or_plan.input_grid(model, comm) if isinstance(grid_or_plan, Plan) else grid_or_plan
        model = model.to(device, dtype_of(settings))
        # A user's model may have a format of its own, which the default leaves as it is.
        if settings.memory_format != "contiguous":
            convert_weights(model, settings.memory_format)
        model = parallelize(
            model,
            grid_or_plan,
            comm=comm,
            batch_norm=settings.batch_norm,
            shard_weights=settings.shard_weights,
        )
        super().__init__(settings, model, grid, comm, device)
        if settings.shard_optimizer:
            shard_optimizer(self.optimizer, comm)

    @property
    def distribution(self) -> str:
        """Grid or plan, in words."""
        plan = (
            f"a plan of {len(self.grid_or_plan.layers)} patterns, samples on "
            if isinstance(self.grid_or_plan, Plan)
            else ""
        )
        return f"{plan}grid {self.grid.describe()}"

    @property
    def placement(self) -> dict[str, Any]:
        """Grid and plan, as JSON values."""
        return {
            "grid": self.grid.describe(),
            "plan": self.grid_or_plan.layers if isinstance(self.grid_or_plan, Plan) else None,
        }

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        """Take a step of the optimizer on a batch. Collective: call on every rank.

        Parameters
        ----------
        inputs, labels : torch.Tensor
            Tensors of the batch. With ``accumulate > 1`` sequences with one tensor per part.

        Returns
        -------
        float
            Loss of the batch, the same on all ranks.

        Raises
        ------
        DistconvError
            On all ranks, if the loss is not finite. The weights are unchanged then, but the gradients and the running
            statistics of batch norm are not.
        """
        self.model.train()
        self.schedule(self.optimizer)
        self.optimizer.zero_grad()
        # With accumulation or capture, backward is inside, so gradients are complete and summed over ranks from here
        # on.
        value = (
            self._accumulate(inputs, labels)
            if self.settings.accumulate > 1
            else float(self.captured_step(inputs, labels))
        )
        # All ranks must decide the same: if replicas have diverged, a loss may be finite on some ranks only.
        try_on_all_ranks(self.comm, lambda: self.record_loss(self.step_count + 1, value), DistconvError)
        if self.settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.step_count += 1
        return value

    def _accumulate(self, inputs: Iterable[torch.Tensor], labels: Iterable[torch.Tensor]) -> float:
        """Accumulate the gradients of all parts, and return the loss of the batch. Collective.

        Each part counts by its number of samples. Only the last part's backward pass all-reduces the gradients.
        """
        samples = [len(each) for each in labels]
        losses = []
        for number, part in enumerate(zip(inputs, labels, strict=True), 1):
            with no_sync() if number < len(samples) else nullcontext():
                # Weighted by samples, since the last part may be smaller: the sum is the mean over the mini-batch.
                losses.append(self._differentiate(*part, share=samples[number - 1] / sum(samples)))
        return sum(map(float, losses))

    def capture(self, choice: str) -> None:
        """Select whether later steps are captured: ``choice`` is one of ``distconv.jobs.captured_steps.CHOICES``.

        Raises
        ------
        DistconvError
            If ``choice`` is ``on`` and ``accumulate > 1``.
        """
        if choice == "on" and self.settings.accumulate > 1:
            raise DistconvError(
                "--capture on: steps with --accumulate cannot be captured. Remove one of the two options."
            )
        self.captured_step = AutoCapturedStep(
            self._differentiate, choice, self.comm, lambda: self.steps - self.step_count
        )

    def _differentiate(self, inputs: torch.Tensor, labels: torch.Tensor, share: float = 1.0) -> torch.Tensor:
        """Add the gradients of ``share`` times the loss to those of the parameters, and return that product."""
        with self.autocast():
            outputs = self.model(inputs)
        # In half precision the loss of many pixels would lose its digits.
        if self.settings.precision != "full":
            outputs = outputs.to(self.dtype)
        loss = self.loss(outputs, match_grid(labels, outputs))
        if share != 1.0:
            loss = loss * share
        loss.backward()
        return loss.detach()

    def finish_steps(self) -> None:
        """Do nothing: no step is in flight between calls."""

    @torch.no_grad()
    def outputs(self, batches: Iterator[Batch], compute: Callable[[Any], T]) -> Iterator[tuple[Batch, T]]:
        """Yield each batch with the result of ``compute`` for its inputs, in evaluation mode. Collective.

        Parameters
        ----------
        batches, compute
            As in :meth:`Training.outputs`.

        Yields
        ------
        (Batch, T)
        """
        self.evaluation_model.eval()
        for batch in batches:
            yield batch, compute(batch.tensors[0])

    def close(self) -> None:
        """Do nothing: the grid may be used elsewhere."""
