"""What the numbers of a training run depend on besides the data, and the optimizer that follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from distconv.errors import DistconvError
from distconv.jobs.configuration.optimisation import SHORT, make


@dataclass(frozen=True)
class TrainingSettings:
    """What the numbers of a training run depend on, besides the data. Each job has its own defaults."""

    model: str = ""
    width: int | None = None
    batch: int = 1
    epochs: int = 1
    steps: int | None = None
    """Number of steps, in place of ``epochs``."""
    optimizer: str = "sgd"
    lr: float = 0.1
    warm_up: float = 0.1
    """Share of the steps over which the learning rate rises."""
    momentum: float = 0.9
    weight_decay: float = 0.0
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer."""
    scheduler: str = ""
    """A class of torch.optim.lr_scheduler; none: a linear rise, then half a cosine."""
    scheduler_args: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    """The largest norm of all gradients together."""
    accumulate: int = 1
    """Parts of a mini-batch, whose gradients are added up."""
    ema: float | None = None
    """How much of the moving average of the weights stays in a step; none is kept without."""
    dtype: str = "float32"
    precision: str = "full"
    """``bf16``: what torch.autocast takes for that computes in bfloat16; weights, gradients and the loss do not."""
    batch_norm: str = "global"
    """What statistics are taken over (distconv.batch_norm_scope)."""
    shard_optimizer: bool = False
    """Split the optimizer's state over the ranks that hold the same weights; no number depends on it."""
    seed: int = 0
    drop_last: bool = False
    """Leave out the last batch of an epoch when it would be smaller."""

    @property
    def part(self) -> int:
        """Samples whose gradients are computed at a time.

        Raises
        ------
        DistconvError
            If the parts of a mini-batch would not be equal.
        """
        if self.batch % self.accumulate:
            raise DistconvError(f"--batch {self.batch} cannot be taken in {self.accumulate} equal parts (--accumulate)")
        return self.batch // self.accumulate

    def evaluating(self, device: str) -> dict[str, Any]:
        """Options of any loader: what its batches are."""
        return {"dtype": dtype_of(self), "device": device}

    def loading(self, device: str) -> dict[str, Any]:
        """Those of the loader of training samples, besides the seed."""
        return {**self.evaluating(device), "shuffle": True, "drop_last": self.drop_last}


def learning_rate(step: int, steps: int, peak: float, warm_up: float = 0.1) -> float:
    """Linear rise to ``peak`` over the share ``warm_up`` of the steps, then half a cosine down to zero."""
    rise = max(1, round(warm_up * steps))
    if step < rise:
        return peak * (step + 1) / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def make_optimizer(settings: TrainingSettings, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the settings ask for."""
    arguments: dict[str, Any] = {"lr": settings.lr}
    if settings.optimizer in SHORT:
        arguments["weight_decay"] = settings.weight_decay
    if settings.optimizer == "sgd":
        arguments["momentum"] = settings.momentum
    return make(settings.optimizer, parameters, **arguments | dict(settings.optimizer_args))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def dtype_of(settings: TrainingSettings) -> torch.dtype:
    """What the model computes with."""
    return getattr(torch, settings.dtype)  # type: ignore[no-any-return]
