"""Output of a training run: metrics.jsonl, summary.json, peak memory."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import DataError
from distconv.jobs.configuration.tracking import Tracker, open_tracker
from distconv.whole_files import Folder, Stream, open_regular, write_file

from .training import Training

METRICS, SUMMARY = "metrics.jsonl", "summary.json"


class Metrics:
    """Writer of ``metrics.jsonl``: one line per step with its loss, and one per evaluation.

    Collective: construct it on every rank; only rank 0 writes. A resumed run keeps the lines up to its checkpoint.
    An evaluation at the last step is dropped, as the run repeats it.

    Parameters
    ----------
    folder : pathlib.Path
        Folder of the run.
    trainer : Training
        The training; its ``step_count`` selects the lines to keep.
    track : str, optional
        Tracker that receives the same lines (``--track``).

    Raises
    ------
    DataError
        On all ranks, if the file or the tracker cannot be opened.
    """

    def __init__(self, folder: Path, trainer: Training, track: str | None = None) -> None:
        self.folder, self.path, self._track = folder, folder / METRICS, track
        self._tracker: Tracker | None = None
        self._stream: Stream | None = None
        try_on_all_ranks(trainer.comm, lambda: self._open(trainer) if trainer.comm.rank == 0 else None, DataError)

    def _open(self, trainer: Training) -> None:
        done = trainer.step_count
        # A resumed run takes the steps after its checkpoint again, and then writes their lines again.
        kept = [line for line in self.lines() if line["step"] <= done] if done else []
        # The final evaluation is repeated, too.
        kept = [line for line in kept if "evaluation" not in line or line["step"] < trainer.steps]
        with Folder(self.folder) as folder:
            self._stream = folder.create_stream(METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        if self._track is not None:
            self._tracker = open_tracker(self._track, self.folder, kept)

    def write(self, **values: Any) -> None:
        """Write a line with these values. Does nothing on ranks other than 0."""
        if self._stream is not None:
            self._stream.write(json.dumps(values) + "\n")
        if self._tracker is not None:
            self._tracker.write(values)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the file, without incomplete lines of a killed run."""
        try:
            with open_regular(self.path, follow_links=False) as file:
                texts = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            texts = []
        for text in texts:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield line

    def losses(self) -> list[tuple[int, float]]:
        """Return step and loss of all steps in the file."""
        return [(line["step"], line["loss"]) for line in self.lines() if "evaluation" not in line]

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._tracker is not None:
            self._tracker.close()


def announcement(trainer: Training, extents: str, resumed: bool) -> str:
    """Return the line printed before the first step.

    Parameters
    ----------
    trainer : Training
    extents : str
        Description of a sample's size.
    resumed : bool
        True if the run resumes from a checkpoint. Otherwise it starts from step 0.

    Returns
    -------
    str
        Model, data, number of steps, and distribution over ranks.
    """
    where = f"from step {trainer.step_count} on, " if resumed else ""
    return (
        f"{trainer.settings.model} ({trainer.parameter_count} parameters, {trainer.settings.dtype}) "
        f"on {trainer.loader.samples} samples of {extents}, "
        f"batch {trainer.settings.batch}, {where}{trainer.steps} steps, "
        f"{trainer.distribution} over {trainer.comm.size} ranks"
    )


def conclude(trainer: Training, metrics: Metrics, results: dict[str, Any], show: Callable[[], None]) -> None:
    """Write summary.json and print the report on rank 0. Collective: call on every rank.

    Parameters
    ----------
    trainer : Training
    metrics : Metrics
        Metrics of the run.
    results : dict
        Results of the job for summary.json.
    show : callable
        Prints the results. Called on rank 0 alone.

    Raises
    ------
    DataError
        On all ranks, if the file cannot be written.
    """
    # Outside of try_on_all_ranks, whose function must not communicate.
    peaks = trainer.comm.gather(peak_memory_bytes(), root=0)

    def run_on_rank_0() -> None:
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
        write_file(metrics.folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
        show()
        print(f"peak memory per rank: {', '.join(f'{peak / 2**20:.0f}' for peak in peaks)} MiB")

    try_on_all_ranks(trainer.comm, run_on_rank_0, DataError)


def format_times(training_s: float, total_s: float) -> str:
    """Return a line with the seconds of the training and of the job.

    Parameters
    ----------
    training_s : float
        Seconds from opening the samples to the last step, with the evaluations between epochs.
    total_s : float
        Seconds of the job: ``training_s`` and the final evaluation.

    Returns
    -------
    str
    """
    return f"training took {training_s:.1f} s, the job {total_s:.1f} s"


def draw_figure(path: Path, draw: Callable[[], None]) -> str:
    """Draw a figure and return a line for the report.

    Parameters
    ----------
    path : pathlib.Path
        File that ``draw`` writes.
    draw : callable
        Writes the figure.

    Returns
    -------
    str
        The path, or the reason if matplotlib is not installed.
    """
    try:
        draw()
    except ImportError:
        return "no figure: matplotlib is not installed. Run pip install matplotlib."
    return f"figure: {path}"


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
