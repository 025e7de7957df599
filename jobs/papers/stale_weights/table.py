"""The results of a staleness experiment: a file of finished runs, and the table that sums them up."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distconv.whole_files import Folder

from .training import TrainingRun

BASELINE = "nonpipelined"
"""Variant that drops in accuracy are relative to."""


class FinishedRuns:
    """Finished runs in a file of JSON lines. A line that a killed process left unfinished is ignored."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._found = path, []
        for text in path.read_text().splitlines() if path.exists() else []:
            try:
                self._found.append(json.loads(text))
            except ValueError:
                continue

    def of(self, run: TrainingRun) -> dict[str, Any] | None:
        """Return the result of this run, or None if it has not finished."""
        wanted = asdict(run)
        return next((line["result"] for line in self._found if line["run"] == wanted), None)

    def add(self, run: TrainingRun, result: dict[str, Any]) -> None:
        """Add a line and flush it to the disk.

        Parameters
        ----------
        run : TrainingRun
        result : dict
            Result of :func:`.training.train`.
        """
        self._found.append({"run": asdict(run), "result": result})
        with Folder(self.path.parent) as folder, folder.open_append(self.path.name) as lines:
            # A line that a killed process left unfinished must not swallow the new one.
            start = "" if lines.last_byte() in (b"", b"\n") else "\n"
            lines.write(start + json.dumps(self._found[-1]) + "\n")
            lines.sync()


@dataclass(frozen=True)
class VariantRow:
    """A variant with the results of its finished runs, by seed, and those of the baseline."""

    variant: str
    results: dict[int, dict[str, Any]]
    baseline: dict[int, dict[str, Any]]

    @property
    def mean(self) -> float:
        """Mean test accuracy over seeds."""
        accuracies: list[float] = [result["accuracy"] for result in self.results.values()]
        return statistics.mean(accuracies)

    @property
    def error(self) -> float | None:
        """Standard error of the mean, or None with one seed."""
        return standard_error([result["accuracy"] for result in self.results.values()])

    @property
    def stale_share(self) -> float:
        """Fraction of the weights that are stale."""
        share: float = next(iter(self.results.values()))["stale_share"]
        return share

    @property
    def drops(self) -> list[float]:
        """The baseline's accuracy minus this variant's, for each seed (the same initial weights and data) of both."""
        return [
            self.baseline[seed]["accuracy"] - result["accuracy"]
            for seed, result in self.results.items()
            if seed in self.baseline
        ]

    def curve(self) -> list[tuple[int, float]]:
        """Return iterations and mean accuracies over the seeds that reached them."""
        points: dict[int, list[float]] = {}
        for result in self.results.values():
            for iteration, accuracy, _ in result["curve"]:
                points.setdefault(iteration, []).append(accuracy)
        return [(iteration, statistics.mean(values)) for iteration, values in sorted(points.items())]


def rows_of(results: FinishedRuns, runs: Iterable[TrainingRun]) -> list[VariantRow]:
    """Return a row for each variant that has finished runs among ``runs``, in their order.

    Parameters
    ----------
    results : FinishedRuns
    runs : iterable of TrainingRun

    Returns
    -------
    list of VariantRow
    """
    by_variant: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        result = results.of(run)
        if result is not None:
            by_variant.setdefault(run.variant, {})[run.seed] = result
    return [VariantRow(variant, by_seed, by_variant.get(BASELINE, {})) for variant, by_seed in by_variant.items()]


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean, or None for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def table(rows: Iterable[VariantRow]) -> str:
    """Return a Markdown table, all in per cent. The drop is paired: seed by seed."""
    lines = ["| variant | stale weights | test accuracy | drop | diverged |", "|---|---|---|---|---|"]
    for row in rows:
        accuracy = f"{_with_error(row.mean, row.error)} (n={len(row.results)})"
        drop = _with_error(statistics.mean(row.drops), standard_error(row.drops)) if row.drops else ""
        diverged = sum(result["diverged_at"] is not None for result in row.results.values())
        lines.append(f"| {row.variant} | {100 * row.stale_share:.2f} | {accuracy} | {drop} | {diverged} |")
    return "\n".join(lines)


def _with_error(mean: float, error: float | None) -> str:
    return f"{100 * mean:.2f}" + (f" +- {100 * error:.2f}" if error is not None else "")
