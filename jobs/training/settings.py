"""Hyperparameters that determine the results of a training run, and the optimizer that they define.

Trainers, checkpoints (which store them) and predictions read them. They do not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from distconv.errors import DistconvError
from distconv.jobs.configuration.optimisation import ABBREVIATIONS, make_torch_optimizer


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters of a training run. Each job derives a class with its own defaults."""

    model: str = ""
    width: int | None = None
    batch: int = 1
    epochs: int = 1
    steps: int | None = None
    """Number of steps; replaces ``epochs``."""
    optimizer: str = "sgd"
    lr: float = 0.1
    warm_up: float = 0.1
    """Fraction of the steps over which the learning rate rises."""
    momentum: float = 0.9
    """Momentum of ``sgd``. Other optimizers receive theirs in ``optimizer_args``."""
    weight_decay: float = 0.0
    """Weight decay of ``sgd``, ``adam`` and ``adamw``. Other optimizers receive theirs in ``optimizer_args``."""
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, which override ``lr``, ``momentum`` and ``weight_decay``."""
    scheduler: str = ""
    """Class of torch.optim.lr_scheduler. If empty, the rate rises linearly and then follows half a cosine."""
    scheduler_args: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    """Maximum norm of the gradients of all parameters, or None if gradients are not clipped."""
    accumulate: int = 1
    """Parts of a mini-batch whose gradients are accumulated."""
    ema: float | None = None
    """Decay of the moving average of the weights per step, or None if there is no average."""
    dtype: str = "float32"
    precision: str = "full"
    """``full`` or ``bf16``. With ``bf16``, torch.autocast computes in bfloat16.

    Weights, gradients and the loss stay in float32.
    """
    memory_format: str = "contiguous"
    """Order of images and of weights of convolutions in memory: ``contiguous`` or ``channels_last``."""
    batch_norm: str = "global"
    """Scope of batch-norm statistics (distconv.batch_norm_scope)."""
    shard_optimizer: bool = False
    """True splits the optimizer's state over the ranks that hold the same weights. Results do not change."""
    shard_weights: str | bool | None = None
    """Axes over which weights are split, as ``parallelize`` takes them. Results do not change."""
    seed: int = 0
    drop_last: bool = False
    """True drops the last batch of an epoch if it is smaller. Otherwise it is kept."""

    @property
    def part_size(self) -> int:
        """Samples per part of a mini-batch, whose gradients are computed at a time.

        Raises
        ------
        DistconvError
            If the parts of a mini-batch would not be equal.
        """
        if self.batch % self.accumulate:
            raise DistconvError(
                f"--batch {self.batch}: cannot be split into {self.accumulate} equal parts (--accumulate). Use a "
                "multiple."
            )
        return self.batch // self.accumulate

    def evaluation_options(self, device: str) -> dict[str, Any]:
        """Return the keyword arguments of a loader for evaluation: dtype and device."""
        return {"dtype": dtype_of(self), "device": device}

    def loader_options(self, device: str) -> dict[str, Any]:
        """Return the keyword arguments of the loader of training samples, except the seed."""
        return {**self.evaluation_options(device), "shuffle": True, "drop_last": self.drop_last}


def learning_rate(step: int, steps: int, peak: float, warm_up: float = 0.1) -> float:
    """Return the learning rate of a step: a linear rise to ``peak``, then half a cosine down to zero.

    Parameters
    ----------
    step : int
        Step, counted from 0.
    steps : int
        Steps of the run.
    peak : float
        Largest learning rate.
    warm_up : float
        Fraction of the steps over which the rate rises; at least one step.

    Returns
    -------
    float
        The learning rate.
    """
    rise = max(1, round(warm_up * steps))
    if step < rise:
        return peak * (step + 1) / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def make_optimizer(settings: TrainingSettings, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of the settings.

    Parameters
    ----------
    settings : TrainingSettings
    parameters : iterable of torch.nn.Parameter

    Returns
    -------
    torch.optim.Optimizer
        ``optimizer_args`` override the other settings. Only ``sgd`` receives ``momentum``, and only ``sgd``, ``adam``
        and ``adamw`` receive ``weight_decay``. The class name ``SGD`` receives neither.

    Raises
    ------
    DistconvError
        If the optimizer does not accept its arguments.
    """
    arguments: dict[str, Any] = {"lr": settings.lr}
    if settings.optimizer in ABBREVIATIONS:
        arguments["weight_decay"] = settings.weight_decay
    if settings.optimizer == "sgd":
        arguments["momentum"] = settings.momentum
    return make_torch_optimizer(settings.optimizer, parameters, **arguments | dict(settings.optimizer_args))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    rate : float
    """
    for group in optimizer.param_groups:
        group["lr"] = rate


def dtype_of(settings: TrainingSettings) -> torch.dtype:
    """Return the dtype of the model's parameters and inputs."""
    return getattr(torch, settings.dtype)  # type: ignore[no-any-return]
