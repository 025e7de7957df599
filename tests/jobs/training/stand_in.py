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
        self.steps_in_flight = delay
        self.checkpoints_begun = 0
        self._saving: int | None = None

    @property
    def epoch(self) -> int:
        return self.step_count // self._per_epoch

    def batches(self) -> Any:
        while self.step_count < self.steps:
            yield SimpleNamespace(tensors=(1, 2), samples=(7, 8))

    def step(self, *_: object) -> None:
        self.step_count += 1
        self._know(self.step_count - self._delay)

    def finish_steps(self) -> None:
        self._know(self.step_count)

    def _know(self, last: int) -> None:
        first = self.losses[-1][0] if self.losses else self.checkpoint
        self.losses += [(step, 1.0 / step) for step in range(first + 1, last + 1)]

    def start_saving(self, directory: str) -> None:
        self.finish_saving()
        self.asked.append(f"save {self.step_count}")
        self.checkpoints_begun += 1
        self._saving = self.step_count

    @property
    def checkpoints_written(self) -> int:
        """As if writing took two steps, and one more on each further rank."""
        writes = self._saving is not None and self.step_count < self._saving + 2 + self.comm.rank
        return self.checkpoints_begun - writes

    def finish_saving(self) -> None:
        if self._saving is not None:
            self.asked.append(f"saved {self._saving} at {self.step_count}")
            self._saving = None

    def check_replicas(self) -> None:
        self.asked.append(f"check {self.step_count}")

    def close(self) -> None:
        self.asked.append("close")

    def resume(self, directory: str, *, fallback: bool) -> bool:
        self.asked.append(f"resume {directory}")
        self.step_count = self.checkpoint
        return self.checkpoint > 0
