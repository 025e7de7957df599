"""Output of benchmarks: the command, the machine, tables of times with or without predictions, and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distconv.errors import DataError
from distconv.jobs.planning.options import check_writable
from distconv.jobs.timing import standard_deviation
from distconv.whole_files import write_file


def machine() -> dict[str, Any]:
    """Return the machine and the versions that the results come from."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    described = {"cpu": _cpu_name(), "cores": cores, "torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def heading(what: str) -> str:
    """Return the first lines of a report: measurement, command and machine."""
    where = ", ".join(f"{k} {v}" for k, v in machine().items())
    return f"{what}\ncommand: {_command()}\nmachine: {where}"


def time_row(name: str, times_s: Sequence[float], reference: float | None = None) -> str:
    """Return a line of the table: median, minimum and maximum in ms, and the ratio to a reference median in seconds.

    Parameters
    ----------
    name : str
    times_s : sequence of float
        Times, in seconds.
    reference : float, optional
        Median of the reference, in seconds.

    Returns
    -------
    str
    """
    median, low, high = (1e3 * v for v in (statistics.median(times_s), min(times_s), max(times_s)))
    ratio = "" if reference is None else f"  {median / 1e3 / reference:6.3f}"
    return f"{name:<44} {median:9.2f} {low:9.2f} {high:9.2f}{ratio}"


def table_head(label: str = "ms per step", ratio: str = "ratio") -> str:
    """Return the column names of :func:`time_row`.

    Parameters
    ----------
    label : str
        Name of the first column.
    ratio : str
        Name of the last column.

    Returns
    -------
    str
    """
    return f"{label:<44} {'median':>9} {'min':>9} {'max':>9}  {ratio:>6}"


def time_table(
    times: Mapping[Any, Sequence[float]],
    reference: str | None = None,
    *,
    label: str = "ms per step",
    ratio: str | None = None,
    suffixes: Mapping[Any, str] | None = None,
) -> str:
    """Return a line for each of ``times``, with the ratio of medians to ``reference`` and an optional suffix.

    Parameters
    ----------
    times : mapping
        Times of each variant, in seconds.
    reference : str, optional
        Variant to which the others are compared.
    label : str
        Name of the first column.
    ratio : str, optional
        Name of the last column.
    suffixes : mapping, optional
        String to append to the line of a variant.

    Returns
    -------
    str
    """
    median = statistics.median(times[reference]) if reference in times else None
    lines = [f"{time_row(name, values, median)}{(suffixes or {}).get(name, '')}" for name, values in times.items()]
    return "\n".join([table_head(label, f"to {reference}" if ratio is None else ratio), *lines])


@dataclass(frozen=True)
class TimeComparison:
    """Measured times of a variant and its predicted time, in seconds."""

    name: str
    measured_s: Sequence[float]
    predicted_s: float

    @property
    def mean_s(self) -> float:
        """Mean of the measured times."""
        return statistics.fmean(self.measured_s)

    @property
    def deviation_s(self) -> float:
        """Standard deviation of the measured times."""
        return standard_deviation(self.measured_s)

    def as_json(self) -> dict[str, Any]:
        """Return mean, standard deviation and prediction as JSON values."""
        return {"mean_s": self.mean_s, "deviation_s": self.deviation_s, "predicted_s": self.predicted_s}


def comparison_head(label: str) -> str:
    """Return the column names of :func:`comparison_row`."""
    return f"{label:<44} {'mean':>10} {'deviation':>10} {'predicted':>10}  predicted/mean"


def comparison_row(comparison: TimeComparison) -> str:
    """Return a line of the table of comparisons."""
    return (
        f"{comparison.name:<44} {1e3 * comparison.mean_s:10.3f} {1e3 * comparison.deviation_s:10.3f} "
        f"{1e3 * comparison.predicted_s:10.3f}  {comparison.predicted_s / comparison.mean_s:14.3f}"
    )


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the results to this JSON file, too")


def _new_file(text: str) -> Path:
    try:
        check_writable("--json", Path(text))
    except DataError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None
    return Path(text)


def print_json(figures: Mapping[str, Any], path: Path | None) -> None:
    """Print the results as a line of JSON with the machine and the command, and write it to a file.

    Parameters
    ----------
    figures : mapping
        Results.
    path : pathlib.Path or None
        File to write. None: only print.
    """
    text = json.dumps({"command": _command(), "machine": machine(), **figures})
    print(text, flush=True)
    if path is not None:
        write_file(path, text + "\n")


def _command() -> str:
    return " ".join(["distconv", *sys.argv[1:]])
