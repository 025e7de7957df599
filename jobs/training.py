"""Training of any model over ranks: settings, learning rate, one step, and checkpoints that it goes on from.

Everything that decides a number (initial weights, order, augmentation, schedule) follows from the settings alone, so
that any grid takes the same steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from mpi4py import MPI

from distconv import checkpoint, training_state
from distconv.errors import CheckpointError, DistconvError
from distconv.grid import ProcessGrid
from distconv.loader import Batch, Loader
from distconv.parallel import parallelize
from distconv.plan import Plan
from distconv.tensor import DistTensor

WARM_UP = 0.1
"""Share of the steps over which the learning rate rises."""


@dataclass(frozen=True)
class Settings:
    """What the numbers of a training run depend on, besides the data. Each job has its own defaults."""

    model: str = ""
    width: int | None = None
    batch: int = 1
    epochs: int = 1
    steps: int | None = None
    """Number of steps, in place of ``epochs``."""
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    dtype: str = "float32"
    seed: int = 0
    drop_last: bool = False
    """Leave out the last batch of an epoch when it would be smaller."""


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear rise to ``peak`` over the first tenth, then half a cosine down to zero."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return peak * (step + 1) / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def make_optimizer(settings: Settings, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the settings ask for."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
    return torch.optim.Adam(model.parameters(), settings.lr, weight_decay=settings.weight_decay)


def beside(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``tensor`` over the grid of ``other``: a plan may leave a model's output on another grid than its input."""
    if isinstance(tensor, DistTensor) and isinstance(other, DistTensor) and not tensor.grid.same_as(other.grid):
        return tensor.redistribute(other.grid)
    return tensor


class Trainer(ABC):
    """A model in training over the ranks of ``comm``. ``step_count`` steps have been taken."""

    loader: Loader
    """Of the training samples; a job sets it up."""

    def __init__(
        self, settings: Settings, model: torch.nn.Module, place: ProcessGrid | Plan, comm: MPI.Intracomm, device: str
    ) -> None:
        """``place`` is the grid of all layers, or the plan that says which layer is on which."""
        self.settings, self.place, self.comm, self.device = settings, place, comm, device
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.grid = place.input_grid(model, comm) if isinstance(place, Plan) else place
        """Where batches go."""
        self.model = parallelize(model.to(device, self.dtype), place, comm=comm)
        self.optimizer = make_optimizer(settings, self.model)
        self.step_count = 0

    @abstractmethod
    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a batch; both lie over the same grid."""

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.settings.steps or self.settings.epochs * self.loader.steps

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to."""
        return self.step_count // self.loader.steps

    @property
    def where(self) -> str:
        """The grid or the plan, as a user reads it."""
        plan = f"a plan of {len(self.place.layers)} patterns, samples on " if isinstance(self.place, Plan) else ""
        return f"{plan}grid {self.grid.describe()}"

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

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        """One step of the optimizer on a batch; returns the loss, the same on all ranks. Collective.

        Raises
        ------
        DistconvError
            On all ranks, if the loss is not finite; the weights are those from before the step.
        """
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step_count, self.steps, self.settings.lr)
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        loss = self.loss(outputs, beside(labels, outputs))
        value = float(loss.detach())
        if not math.isfinite(value):
            raise DistconvError(f"step {self.step_count + 1}: the loss is {value}; lower --lr or look at the data")
        loss.backward()
        self.optimizer.step()
        self.step_count += 1
        return value

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, directory: str) -> None:
        """Write a checkpoint of everything that the following steps depend on. Collective."""
        tensors, values = training_state.capture(self.model, self.optimizer, self.comm)
        position = {"epoch": self.epoch, "batch": self.step_count % self.loader.steps, "samples": self.loader.samples}
        values |= {"settings": asdict(self.settings), "position": position, "grid": self.grid.describe()}
        checkpoint.save(directory, self.step_count, tensors, values, self.comm)

    def resume(self, directory: str) -> bool:
        """Go on from the newest finished checkpoint below ``directory``; False if there is none. Collective.

        Raises
        ------
        CheckpointError
            On all ranks, if it is damaged, or of other settings or data.
        """
        folder = checkpoint.newest(directory, self.comm)
        if folder is None:
            return False
        found = checkpoint.load(folder, self.comm)
        self._check_settings(found)
        training_state.restore(found, self.model, self.optimizer, self.comm)
        self.step_count = found.step
        return True

    def _check_settings(self, found: checkpoint.Checkpoint) -> None:
        now = asdict(self.settings) | {"training samples": self.loader.samples}
        then = found.values["settings"] | {"training samples": found.values["position"]["samples"]}
        wrong = [
            f"{key} was {then.get(key)!r} and is {value!r}" for key, value in now.items() if then.get(key) != value
        ]
        if wrong:
            raise CheckpointError(f"checkpoint of step {found.step} was made with other settings: {'; '.join(wrong)}")
