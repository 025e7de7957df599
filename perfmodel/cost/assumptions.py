"""Assumptions of a prediction about training, beyond the network and the machine.

The cost model reads them; :func:`evaluate` and :func:`select` take them as keyword arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distconv.batch_norm_scope import BATCH_NORM_SCOPES
from distconv.errors import DistconvError

MEMORY_MODELS = ("autograd", "keep-all")


class SettingsError(DistconvError, ValueError):
    """An assumption of a prediction has an invalid value."""


@dataclass(frozen=True)
class Settings:
    """Assumptions of a prediction.

    Attributes
    ----------
    memory_model : {"autograd", "keep-all"}
        Tensors that are kept: those that torch's autograd saves, or all outputs and activation gradients for the full
        step, as in the implementation of Dryden et al. 2019.
    workspace : float
        Bytes that each rank reserves for its convolution algorithms.
    optimizer_slots : int
        Tensors of optimizer state per parameter: SGD 0, SGD with momentum 1, Adam 2.
    shard_optimizer : bool
        True if replicated parameters have their optimizer state sharded over the ranks (``distconv.shard_optimizer``).
        Otherwise each rank holds the full state.
    batch_norm : {"global", "spatial", "local"}
        Batch statistics: exact over all ranks, over the ranks of one sample, or of each rank alone.
    overlap : bool or None
        True if communication overlaps with computation. None uses ``Machine.overlap``.

    Raises
    ------
    SettingsError
        If a value is invalid.
    """

    memory_model: str = "autograd"
    workspace: float = 0.0
    optimizer_slots: int = 1
    shard_optimizer: bool = False
    batch_norm: str = "global"
    overlap: bool | None = None

    def __post_init__(self) -> None:
        if self.memory_model not in MEMORY_MODELS:
            raise SettingsError(
                f"Settings: memory_model={self.memory_model!r} is not valid. Use one of {', '.join(MEMORY_MODELS)}"
            )
        if self.batch_norm not in BATCH_NORM_SCOPES:
            raise SettingsError(
                f"Settings: batch_norm={self.batch_norm!r} is not valid. Use one of {', '.join(BATCH_NORM_SCOPES)}"
            )
        if not (math.isfinite(self.workspace) and self.workspace >= 0):
            raise SettingsError(f"Settings: workspace={self.workspace!r} must be a finite number of bytes, 0 or more")
        if self.optimizer_slots < 0:
            raise SettingsError(f"Settings: optimizer_slots={self.optimizer_slots!r} must be 0 or more")
