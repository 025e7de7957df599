"""What a prediction assumes about training, beyond the network and the machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distconv.batch_norm_scope import BATCH_NORM
from distconv.errors import DistconvError

MEMORY_MODELS = ("autograd", "keep-all")


class SettingsError(DistconvError, ValueError):
    """An assumption that cannot be."""


@dataclass(frozen=True)
class Settings:
    """Assumptions of a prediction.

    ``memory_model``: "autograd" keeps what torch's autograd saves, "keep-all" every output and error signal (the
    paper's). ``workspace``: bytes each rank sets aside for its convolution algorithms. ``optimizer_slots``: tensors of
    optimizer state per parameter (SGD 0, with momentum 1, Adam 2); ``shard_optimizer``: each rank has a share of
    those of weights that all hold (``distconv.shard_optimizer``). ``batch_norm``: whether statistics are "global"
    (exact), "spatial" (of a sample's ranks) or "local". ``overlap``: whether communication is hidden behind
    computation; None means as the machine's transport does.

    Raises
    ------
    SettingsError
        If one of them is none of that.
    """

    memory_model: str = "autograd"
    workspace: float = 0.0
    optimizer_slots: int = 1
    shard_optimizer: bool = False
    batch_norm: str = "global"
    overlap: bool | None = None

    def __post_init__(self) -> None:
        if self.memory_model not in MEMORY_MODELS:
            raise SettingsError(f"memory_model={self.memory_model!r}: it is one of {', '.join(MEMORY_MODELS)}")
        if self.batch_norm not in BATCH_NORM:
            raise SettingsError(f"batch_norm={self.batch_norm!r}: it is one of {', '.join(BATCH_NORM)}")
        if not (math.isfinite(self.workspace) and self.workspace >= 0):
            raise SettingsError(f"workspace={self.workspace!r}: it is a number of bytes, 0 or more")
        if self.optimizer_slots < 0:
            raise SettingsError(f"optimizer_slots={self.optimizer_slots!r}: it is 0 or more")
