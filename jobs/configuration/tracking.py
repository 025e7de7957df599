"""Scalars of a run for TensorBoard: those of metrics.jsonl, each once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distconv.errors import DataError

TRACKERS = ("tensorboard",)
FOLDER = "tensorboard"


class TensorBoard:
    """Event files in ``out/tensorboard``. Those of an interrupted run are written anew, as far as it is resumed."""

    def __init__(self, folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        """``lines`` are those of metrics.jsonl that stay.

        Raises
        ------
        DataError
            If tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise DataError("--track tensorboard: it is not installed: pip install tensorboard") from error
        place = folder / FOLDER
        if place.is_dir() and not place.is_symlink():
            for events in place.glob("events.out.tfevents.*"):
                events.unlink()
        self._writer = SummaryWriter(str(place))
        for line in lines:
            self.write(line)

    def write(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of a line: ``loss`` of a step, ``test/loss`` of an evaluation."""
        group = f"{line['evaluation']}/" if "evaluation" in line else ""
        for name, value in line.items():
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(f"{group}{name}", value, line["step"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
