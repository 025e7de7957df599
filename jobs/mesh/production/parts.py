"""Runs on their way into a data set: which are needed, who does which, and the file that each leaves behind.

Runs come in streams, one for each split and family, numbered from 0. A stream is complete when its first runs hold as
many samples as its quota asks for; which runs those are depends on the seed alone, so that any number of ranks,
interrupted however often, arrives at the same data set.

Ranks share nothing but the folder of parts. A rank claims a run by creating a file that must not exist yet, and looks
again after each run what the others have finished. No rank waits for another while there is a run that is needed for
certain.
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

# The arrays of a sample; everything else about it is a number.
ARRAYS = ("channels", "label", "extrapolated")


@dataclass(frozen=True)
class FlowRun:
    """One run: the split and family of its stream, and its number there."""

    split: int
    family: int
    index: int

    @property
    def number(self) -> int:
        """Its number among the runs of all streams."""
        return (self.index * len(FAMILIES) + self.family) * len(SPLITS) + self.split

    def seed(self, base: int) -> np.random.SeedSequence:
        """The seed of its random numbers, from the seed ``base`` of the data set."""
        return run_seed(base, self.split, self.family, self.index)

    @property
    def name(self) -> str:
        """Split, family and number: the name of its file."""
        return f"{SPLITS[self.split]}-{list(FAMILIES)[self.family]}-{self.index:05d}"


@dataclass(frozen=True)
class RunStream:
    """The runs of one split and family, of which ``quota`` samples are wanted."""

    split: int
    family: int
    quota: int

    def run(self, index: int) -> FlowRun:
        """Its run of number ``index``."""
        return FlowRun(self.split, self.family, index)


def streams(samples: int, heldout: int) -> list[RunStream]:
    """The streams of a data set: the samples of each split shared evenly between the families.

    >>> [stream.quota for stream in streams(7, 0)]
    [2, 2, 1, 1, 1]
    """
    count = len(FAMILIES)
    shares = [
        RunStream(split, family, wanted // count + (family < wanted % count))
        for split, wanted in enumerate((samples, heldout))
        for family in range(count)
    ]
    return [stream for stream in shares if stream.quota > 0]


@dataclass(frozen=True)
class Outline:
    """A finished run without its arrays: the counters of its RunResult, and the facts of each sample."""

    counters: dict[str, Any]
    samples: list[dict[str, Any]]


@dataclass
class RunFolder:
    """The folder of finished runs of one recipe; ``session`` marks the claims of one call of the generator."""

    folder: Path
    session: str
    per_run: int
    most_runs: int = 40

    def __post_init__(self) -> None:
        self._outlines: dict[FlowRun, Outline] = {}

    @property
    def alarm_file(self) -> Path:
        """Its existence tells the other ranks not to wait for one that has given up."""
        return self.folder / f"alarm-{self.session}"

    def file(self, run: FlowRun) -> Path:
        """Where the results of ``run`` are kept."""
        return self.folder / f"{run.name}.npz"

    def outline(self, run: FlowRun) -> Outline:
        """What the file of a finished run says besides its arrays."""
        if run not in self._outlines:
            with self._opened(run) as stored:
                self._outlines[run] = Outline(**json.loads(str(stored["outline"])))
        return self._outlines[run]

    def accepted(self, run: FlowRun) -> int | None:
        """Number of samples of a finished run; None if it is not finished."""
        if run in self._outlines or self.file(run).exists():
            return len(self.outline(run).samples)
        return None

    def used(self, stream: RunStream) -> Iterator[tuple[FlowRun, range]]:
        """Finished runs of a stream, without a gap, until its quota is met, with the numbers of samples to take.

        The last run may give more than is missing; then its later samples are taken, whose labels are fuller.
        """
        missing = stream.quota
        for index in range(self.most_runs):
            accepted = self.accepted(stream.run(index))
            if accepted is None or missing == 0:
                return
            taken = range(max(0, accepted - missing), accepted)
            yield stream.run(index), taken
            missing -= len(taken)

    def done(self, stream: RunStream) -> int:
        """How many of the stream's samples are there."""
        return sum(len(taken) for _, taken in self.used(stream))

    def claim(self, wanted: list[RunStream]) -> FlowRun | None:
        """A run, claimed now, that is needed even if all that are under way succeed; None if there is none."""
        for index in range(self.most_runs):
            for stream in wanted:
                if self._hoped(stream, index) < stream.quota and self._take(stream.run(index)):
                    return stream.run(index)
        return None

    def check(self, wanted: list[RunStream]) -> None:
        """Raise DataError if a stream has used up its runs without meeting its quota.

        Raises
        ------
        DataError
            If one has.
        """
        for stream in wanted:
            last = stream.run(self.most_runs - 1)
            if self.accepted(last) is not None and self.done(stream) < stream.quota:
                raise DataError(
                    f"{self.folder}: {self.most_runs} runs of {list(FAMILIES)[stream.family]!r} gave "
                    f"{self.done(stream)} samples where {stream.quota} are wanted; the mesh may be too small "
                    f"(use 64 or more) or tau too short"
                )

    def _hoped(self, stream: RunStream, index: int) -> int:
        """Samples of the runs before ``index`` if each that is under way gives as many as it may."""
        counts = (self.accepted(stream.run(k)) for k in range(index))
        return sum(self.per_run if count is None else count for count in counts)

    def _take(self, run: FlowRun) -> bool:
        if self.accepted(run) is not None:
            return False
        try:
            os.close(os.open(self.folder / f"{run.name}.claim-{self.session}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def store(self, run: FlowRun, result: RunResult) -> None:
        """Write the file of a finished run: there whole, or not at all."""
        counters = {f.name: getattr(result, f.name) for f in fields(result) if f.name != "samples"}
        facts = [{f.name: getattr(s, f.name) for f in fields(s) if f.name not in ARRAYS} for s in result.samples]
        arrays = {"outline": np.array(json.dumps({"counters": counters, "samples": facts}))}
        for n, sample in enumerate(result.samples):
            arrays |= {f"{name}{n}": getattr(sample, name) for name in ARRAYS}
        image = io.BytesIO()
        np.savez(image, allow_pickle=False, **arrays)
        write_atomically(self.file(run), image.getbuffer())

    def sample(self, run: FlowRun, number: int) -> LabelledSnapshot:
        """One sample of a finished run."""
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
                f"{path}: damaged ({damage}); delete it and start again, the other runs are kept"
            ) from damage


def write_atomically(path: Path, image: memoryview | bytes) -> None:
    """Write a file that is there whole or not at all: under another name, to the disk, then renamed.

    Raises
    ------
    DataError
        If the file system refuses; nothing is left behind.
    """
    try:
        write_file(path, image)
    except OSError as refusal:
        raise DataError(f"{path}: cannot write {len(image):,} bytes: {refusal}") from refusal
