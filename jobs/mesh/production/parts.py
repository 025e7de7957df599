"""Runs of a data set: which are needed, claims by ranks, files of finished runs.

Runs are organized in streams, one for each split and family, numbered from 0. A stream is complete when its first runs
have as many samples as its quota. These runs depend on the seed alone. Any number of ranks, with any number of
interruptions, therefore produces the same data set.

Ranks communicate only through the folder of runs. A rank claims a run by creating a file that must not exist yet. After
each run it reads which runs the other ranks have finished. No rank waits while an unclaimed run is certainly needed.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from distconv.errors import DataError
from distconv.jobs.mesh.hydro.initial_conditions import FAMILIES
from distconv.whole_files import write_file

from .run import LabelledSnapshot, RunResult, run_seed

__all__ = ["SPLITS", "FlowRun", "RunFolder", "RunStream", "streams", "write_atomically"]

SPLITS = ("train", "heldout")

# The fields of a sample that are arrays. The others are numbers.
ARRAYS = ("channels", "label", "extrapolated")


@dataclass(frozen=True)
class FlowRun:
    """One run: the split and family of its stream, and its index there."""

    split: int
    family: int
    index: int

    @property
    def number(self) -> int:
        """Number of the run among those of all streams."""
        return (self.index * len(FAMILIES) + self.family) * len(SPLITS) + self.split

    def seed(self, base: int) -> np.random.SeedSequence:
        """Return the seed of the run's random numbers, given the seed ``base`` of the data set."""
        return run_seed(base, self.split, self.family, self.index)

    @property
    def name(self) -> str:
        """Split, family and index, which are the stem of the run's file name."""
        return f"{SPLITS[self.split]}-{list(FAMILIES)[self.family]}-{self.index:05d}"


@dataclass(frozen=True)
class RunStream:
    """The runs of one split and family, which must yield ``quota`` samples."""

    split: int
    family: int
    quota: int

    def run(self, index: int) -> FlowRun:
        """Return the run with an index."""
        return FlowRun(self.split, self.family, index)


def streams(samples: int, heldout: int) -> list[RunStream]:
    """Return the streams of a data set; the samples of each split are distributed evenly over the families.

    Parameters
    ----------
    samples, heldout : int
        Numbers of training and held-out samples.

    Returns
    -------
    list of RunStream
        Streams with a quota above 0.

    Examples
    --------
    >>> [stream.quota for stream in streams(7, 0)]
    [2, 2, 1, 1, 1]
    """
    count = len(FAMILIES)
    shares = [
        RunStream(split, family, streams_needed // count + (family < streams_needed % count))
        for split, streams_needed in enumerate((samples, heldout))
        for family in range(count)
    ]
    return [stream for stream in shares if stream.quota > 0]


@dataclass(frozen=True)
class Outline:
    """A finished run without its arrays: the counters of its RunResult, and the scalar fields of each sample."""

    counters: dict[str, Any]
    samples: list[dict[str, Any]]


@dataclass
class RunFolder:
    """Folder of finished runs of one recipe.

    Parameters
    ----------
    folder : Path
        The folder, common to all ranks.
    session : str
        Identifier of one call of the generator, which marks its claims. Identical on all ranks.
    per_run : int
        Largest number of samples of a run.
    most_runs : int
        Largest number of runs of a stream.
    """

    folder: Path
    session: str
    per_run: int
    most_runs: int = 40

    def __post_init__(self) -> None:
        self._outlines: dict[FlowRun, Outline] = {}

    @property
    def stop_file(self) -> Path:
        """File by which a rank that has failed stops the other ranks after their current runs."""
        return self.folder / f"alarm-{self.session}"

    def file(self, run: FlowRun) -> Path:
        """Return the path of the file of a finished run."""
        return self.folder / f"{run.name}.npz"

    def outline(self, run: FlowRun) -> Outline:
        """Return the contents of the file of a finished run without its arrays."""
        if run not in self._outlines:
            with self._opened(run) as stored:
                self._outlines[run] = Outline(**json.loads(str(stored["outline"])))
        return self._outlines[run]

    def accepted(self, run: FlowRun) -> int | None:
        """Return the number of samples of a run; None if it is not finished."""
        if run in self._outlines or self.file(run).exists():
            return len(self.outline(run).samples)
        return None

    def used_runs(self, stream: RunStream) -> Iterator[tuple[FlowRun, range]]:
        """Yield the finished runs that fill the quota of a stream, without gaps, with the indices of samples to use.

        If the last run has more samples than are missing, its later ones are used, which have more labelled cells.
        """
        missing = stream.quota
        for index in range(self.most_runs):
            accepted = self.accepted(stream.run(index))
            if accepted is None or missing == 0:
                return
            taken = range(max(0, accepted - missing), accepted)
            yield stream.run(index), taken
            missing -= len(taken)

    def available_samples(self, stream: RunStream) -> int:
        """Return the number of samples of a stream that are available."""
        return sum(len(taken) for _, taken in self.used_runs(stream))

    def claim(self, streams_needed: list[RunStream]) -> FlowRun | None:
        """Claim a run that is needed even if every run in progress yields as many samples as possible.

        Parameters
        ----------
        streams_needed : list of RunStream
            The streams of the data set.

        Returns
        -------
        FlowRun, optional
            The claimed run; None if no further run is certainly needed.
        """
        # By index first, so that all streams grow at about the same pace.
        for index in range(self.most_runs):
            for stream in streams_needed:
                if self._most_samples_before(stream, index) < stream.quota and self._take(stream.run(index)):
                    return stream.run(index)
        return None

    def check(self, streams_needed: list[RunStream]) -> None:
        """Check that no stream has used up its runs without reaching its quota.

        Parameters
        ----------
        streams_needed : list of RunStream
            The streams of the data set.

        Raises
        ------
        DataError
            If a stream has.
        """
        for stream in streams_needed:
            last = stream.run(self.most_runs - 1)
            if self.accepted(last) is not None and self.available_samples(stream) < stream.quota:
                raise DataError(
                    f"{self.folder}: {self.most_runs} simulations of {list(FAMILIES)[stream.family]!r} gave "
                    f"{self.available_samples(stream)} of {stream.quota} samples. Use a larger mesh (at least 64) or "
                    "a larger tau."
                )

    def _most_samples_before(self, stream: RunStream, index: int) -> int:
        """Return the largest possible number of samples of the runs before ``index``."""
        counts = (self.accepted(stream.run(k)) for k in range(index))
        return sum(self.per_run if count is None else count for count in counts)

    def _take(self, run: FlowRun) -> bool:
        if self.accepted(run) is not None:
            return False
        try:
            # O_EXCL: of the ranks that try at the same time, one creates the file and the others fail.
            os.close(os.open(self.folder / f"{run.name}.claim-{self.session}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def store(self, run: FlowRun, result: RunResult) -> None:
        """Write the file of a finished run. It appears under its name only when it is complete.

        Parameters
        ----------
        run : FlowRun
            The run.
        result : RunResult
            Its samples and counters.

        Raises
        ------
        DataError
            If the file cannot be written.
        """
        # Counters and numbers are stored apart from the arrays, because outline() reads them alone.
        counters = {f.name: getattr(result, f.name) for f in fields(result) if f.name != "samples"}
        facts = [{f.name: getattr(s, f.name) for f in fields(s) if f.name not in ARRAYS} for s in result.samples]
        arrays = {"outline": np.array(json.dumps({"counters": counters, "samples": facts}))}
        for n, sample in enumerate(result.samples):
            arrays |= {f"{name}{n}": getattr(sample, name) for name in ARRAYS}
        image = io.BytesIO()
        np.savez(image, allow_pickle=False, **arrays)
        write_atomically(self.file(run), image.getbuffer())

    def sample(self, run: FlowRun, number: int) -> LabelledSnapshot:
        """Return one sample of a finished run.

        Parameters
        ----------
        run : FlowRun
            The run.
        number : int
            Index of the sample in the run.

        Returns
        -------
        LabelledSnapshot
            The sample.

        Raises
        ------
        DataError
            If the file is damaged.
        """
        facts = self.outline(run).samples[number]
        with self._opened(run) as stored:
            arrays: dict[str, Any] = {name: stored[f"{name}{number}"] for name in ARRAYS}
        return LabelledSnapshot(**arrays, **facts)

    @contextmanager
    def _opened(self, run: FlowRun) -> Iterator[Mapping[str, npt.NDArray[Any]]]:
        path = self.file(run)
        try:
            with np.load(path, allow_pickle=False) as stored:
                yield stored
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as damage:
            raise DataError(
                f"{path}: damaged ({damage}). Delete it and start again; the other simulations are kept."
            ) from damage


def write_atomically(path: Path, image: memoryview | bytes) -> None:
    """Write a file under a temporary name, flush it to disk, and rename it.

    Parameters
    ----------
    path : Path
        The file.
    image : memoryview or bytes
        Its content.

    Raises
    ------
    DataError
        If writing fails; no incomplete file remains.
    """
    try:
        write_file(path, image)
    except OSError as error:
        raise DataError(f"{path}: cannot write {len(image):,} bytes: {error}") from error
