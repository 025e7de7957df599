"""Training of a segmentation model on mesh-tangling samples: one step, the schedule, the state, the scores.

Everything that decides a number (initial weights, order, mirroring, normalisation, schedule) follows from the settings
alone, so that any grid takes the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from distconv import checkpoint, training_state
from distconv.errors import CheckpointError, DistconvError
from distconv.grid import ProcessGrid
from distconv.layers.models import MODELS
from distconv.loader import Batch
from distconv.parallel import parallelize
from distconv.tensor import DistTensor

from .mesh_samples import MeshSamples
from .scores import Histogram

WARM_UP = 0.1
"""Share of the steps over which the learning rate rises."""


@dataclass(frozen=True)
class Settings:
    """What the numbers of a training run depend on, besides the data."""

    model: str = "unet"
    width: int | None = None
    batch: int = 4
    epochs: int = 30
    steps: int | None = None
    """Number of steps, in place of ``epochs``."""
    optimizer: str = "adam"
    lr: float = 5e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    dtype: str = "float32"
    seed: int = 0
    augment: bool = True
    drop_last: bool = False
    """Leave out the last batch of an epoch when it would be smaller."""


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear rise to ``peak`` over the first tenth, then half a cosine down to zero."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return peak * (step + 1) / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def pixel_classifier(width: int = 64, in_channels: int = 18, classes: int = 1) -> torch.nn.Module:
    """A perceptron with two hidden layers that sees one cell at a time."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(in_channels, width, 1),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(width, width, 1),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(width, classes, 1),
    )


def build(settings: Settings) -> torch.nn.Module:
    """The model with weights that follow from the seed alone."""
    torch.manual_seed(settings.seed)
    factory = MODELS.get(settings.model, pixel_classifier)
    model = factory() if settings.width is None else factory(width=settings.width)
    return model.to(getattr(torch, settings.dtype))


def segmentation_loss(logits: torch.Tensor, label: torch.Tensor, positive_fraction: float) -> torch.Tensor:
    """Binary cross entropy in which a positive weighs more the rarer they are.

    The weight is the square root of the ratio of negatives to positives: by the ratio itself the network calls too many
    cells positive.
    """
    ratio = (1 - positive_fraction) / positive_fraction
    weight = torch.tensor(math.sqrt(ratio), dtype=logits.dtype, device=logits.device)
    return F.binary_cross_entropy_with_logits(logits.squeeze(1), label, pos_weight=weight)


def make_optimizer(settings: Settings, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the settings ask for."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
    return torch.optim.Adam(model.parameters(), settings.lr, weight_decay=settings.weight_decay)


class Trainer:
    """A model in training over ``grid``. ``step_count`` steps have been taken."""

    def __init__(self, settings: Settings, samples: MeshSamples, grid: ProcessGrid, device: str = "cpu") -> None:
        self.settings, self.samples, self.grid, self.device = settings, samples, grid, device
        self.model = parallelize(build(settings).to(device), grid)
        self.optimizer = make_optimizer(settings, self.model)
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.loader = samples.loader(
            "train",
            grid,
            settings.batch,
            seed=settings.seed,
            shuffle=True,
            augment=settings.augment,
            drop_last=settings.drop_last,
            dtype=self.dtype,
            device=device,
        )
        self.steps = settings.steps or settings.epochs * self.loader.steps
        self.step_count = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to."""
        return self.step_count // self.loader.steps

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
        loss = segmentation_loss(self.model(inputs), labels, self.samples.positive_fraction)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise DistconvError(f"step {self.step_count + 1}: the loss is {value}; lower --lr or look at the data")
        loss.backward()
        self.optimizer.step()
        self.step_count += 1
        return value

    @torch.no_grad()
    def predictions(self, group: str) -> Iterator[tuple[Batch, DistTensor]]:
        """Batches of ``train`` or ``heldout`` in the file's order, with probabilities (N, H, W). Collective."""
        self.model.eval()
        loader = self.samples.loader(group, self.grid, self.settings.batch, dtype=self.dtype, device=self.device)
        for batch in loader.epoch(0):
            probability = torch.sigmoid(self.model(batch.tensors[0]).squeeze(1))
            assert isinstance(probability, DistTensor)
            yield batch, probability

    def scores(self, group: str) -> Histogram:
        """Probabilities that the model gives to the samples of ``train`` or ``heldout``, as counts. Collective."""
        families = self.samples.families[group]
        histogram = Histogram(0.0, 1.0, sorted(set(families)))
        for batch, probability in self.predictions(group):
            mine = probability.box()[0]
            labels = batch.tensors[1].local.cpu().numpy()
            values = probability.local.cpu().numpy()
            for row, sample in enumerate(batch.samples[mine.start : mine.stop]):
                histogram.add(values[row], labels[row], families[sample])
        return histogram.sum_over(self.grid.world)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, directory: str, extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint of everything that the following steps depend on. Collective."""
        tensors, values = training_state.capture(self.model, self.optimizer, self.grid.world)
        position = {"epoch": self.epoch, "batch": self.step_count % self.loader.steps, "samples": self.loader.samples}
        values |= {
            "settings": asdict(self.settings),
            "position": position,
            "grid": self.grid.describe(),
            **(extra or {}),
        }
        checkpoint.save(directory, self.step_count, tensors, values, self.grid.world)

    def resume(self, directory: str) -> bool:
        """Go on from the newest finished checkpoint below ``directory``; False if there is none. Collective.

        Raises
        ------
        CheckpointError
            On all ranks, if it is damaged, or of other settings or data.
        """
        folder = checkpoint.newest(directory, self.grid.world)
        if folder is None:
            return False
        found = checkpoint.load(folder, self.grid.world)
        self._check_settings(found)
        training_state.restore(found, self.model, self.optimizer, self.grid.world)
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
