"""A training job without a model, for tests of what is around the steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class StandIn:
    """Takes steps of which each loss is known ``delay`` steps later, and notes what it is asked to do."""

    def __init__(self, comm: Any, *, epochs: int = 2, steps_per_epoch: int = 3, delay: int = 0) -> None:
        self.comm, self.steps, self._per_epoch, self._delay = comm, epochs * steps_per_epoch, steps_per_epoch, delay
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
        self.step_count = 0
        self.losses: list[tuple[int, float]] = []
        self.asked: list[str] = []
        self.checkpoint = 0
        """The step that ``resume`` finds."""
        self.ahead = delay

    @property
    def epoch(self) -> int:
        return self.step_count // self._per_epoch

    def batches(self) -> Any:
        while self.step_count < self.steps:
            yield SimpleNamespace(tensors=(1, 2), samples=(7, 8))

    def step(self, *_: object) -> None:
        self.step_count += 1
        self._know(self.step_count - self._delay)

    def settle(self) -> None:
        self._know(self.step_count)

    def _know(self, last: int) -> None:
        first = self.losses[-1][0] if self.losses else self.checkpoint
        self.losses += [(step, 1.0 / step) for step in range(first + 1, last + 1)]

    def save(self, directory: str) -> None:
        self.asked.append(f"save {self.step_count}")

    def check_replicas(self) -> None:
        self.asked.append(f"check {self.step_count}")

    def close(self) -> None:
        self.asked.append("close")

    def resume(self, directory: str) -> bool:
        self.asked.append(f"resume {directory}")
        self.step_count = self.checkpoint
        return self.checkpoint > 0
