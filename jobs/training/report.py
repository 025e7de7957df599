"""What a training run leaves behind besides its checkpoints: metrics.jsonl, summary.json, peak memory."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from distconv.communication.agreement import together
from distconv.errors import DataError

from .training import Training

METRICS, SUMMARY = "metrics.jsonl", "summary.json"


class Metrics:
    """``metrics.jsonl``: one line per step with its loss, and one per evaluation. Only rank 0 writes. Collective.

    Lines of an interrupted run stay as far as it is resumed; an evaluation at the last step is made anew.
    """

    def __init__(self, folder: Path, trainer: Training) -> None:
        self.folder, self.path = folder, folder / METRICS
        self._stream: TextIO | None = None
        together(trainer.comm, lambda: self._open(trainer) if trainer.comm.rank == 0 else None, DataError)

    def _open(self, trainer: Training) -> None:
        done = trainer.step_count
        kept = [line for line in self.lines() if line["step"] <= done] if done else []
        self._stream = self.path.open("w", buffering=1)
        for line in kept:
            if "evaluation" not in line or line["step"] < trainer.steps:
                self.write(**line)

    def write(self, **values: Any) -> None:
        """Add a line."""
        if self._stream is not None:
            self._stream.write(json.dumps(values) + "\n")

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines of the file, but for one that a killed run left unfinished."""
        for text in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and "step" in line:
                yield line

    def losses(self) -> list[tuple[int, float]]:
        """Step and loss of all steps."""
        return [(line["step"], line["loss"]) for line in self.lines() if "evaluation" not in line]

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()


def announcement(trainer: Training, extents: str, resumed: bool) -> str:
    """What is about to be trained, on samples of these ``extents``."""
    where = f"from step {trainer.step_count} on, " if resumed else ""
    return (
        f"{trainer.settings.model} ({trainer.parameter_count} parameters, {trainer.settings.dtype}) "
        f"on {trainer.loader.samples} samples of {extents}, "
        f"batch {trainer.settings.batch}, {where}{trainer.steps} steps, "
        f"{trainer.where} over {trainer.comm.size} ranks"
    )


def conclude(trainer: Training, metrics: Metrics, results: dict[str, Any], show: Callable[[], None]) -> None:
    """Write summary.json with the job's own ``results``, then ``show`` them, all on rank 0. Collective."""
    peaks = trainer.comm.gather(peak_memory_bytes(), root=0)

    def on_rank_0() -> None:
        if peaks is None:
            return
        losses = metrics.losses()
        summary = {
            "settings": asdict(trainer.settings),
            **trainer.placement,
            "ranks": trainer.comm.size,
            "steps": trainer.step_count,
            "final_loss": losses[-1][1] if losses else None,
            **results,
            "peak_memory_bytes": peaks,
        }
        (metrics.folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
        show()
        print(f"peak memory per rank: {', '.join(f'{peak / 2**20:.0f}' for peak in peaks)} MiB")

    together(trainer.comm, on_rank_0, DataError)


def times(training_s: float, total_s: float) -> str:
    """How long it took, as a line."""
    return f"training took {training_s:.1f} s, all of it {total_s:.1f} s"


def picture(path: Path, draw: Callable[[], None]) -> str:
    """Draw it; a line that says where it is, or why there is none."""
    try:
        draw()
    except ImportError:
        return "no picture: matplotlib is not installed; pip install matplotlib"
    return f"picture: {path}"


def peak_memory_bytes() -> int:
    """Most memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
