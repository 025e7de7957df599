"""Images and label maps opened for training: their classes, their moments, their batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import try_on_all_ranks
from distconv.data.channel_statistics import chunk_aligned_boxes, moments
from distconv.data.loader import Field, Loader
from distconv.data.opening import has_group, open_source
from distconv.data.source import SampleSource, StoredSource
from distconv.errors import DataError
from distconv.grid import ProcessGrid

HELD_OUT = ("test", "heldout", "val")
"""Names in a file of the group ``test``; the first that is there counts."""
MOST_LABELS = 1 << 16


@dataclass(frozen=True, eq=False)
class SegmentationGroup:
    """Images (N, C, ...) and label maps (N, ...), two datasets of a source."""

    source: StoredSource
    image: str
    label: str


class SegmentationSamples:
    """Groups of samples with label maps, ``train`` among them, and the training images' moments. Collective.

    Labels are 0 to ``classes`` - 1, by default as far as they go, or ``ignore``. One class is that of the places whose
    label is 1 among 0.

    Raises
    ------
    DataError
        On all ranks, if images and labels do not fit each other, or labels are no classes.
    """

    odd: Mapping[str, Sequence[float]] = {}
    """Per axis the factor of each channel of an image that is mirrored along it (distconv.data.Field)."""
    exchanged: Sequence[tuple[int, float]] = ()
    """Where the channels of a transposed image come from (distconv.data.Field)."""

    def __init__(
        self,
        groups: Mapping[str, SegmentationGroup],
        comm: MPI.Intracomm,
        *,
        classes: int | None = None,
        ignore: int | None = None,
    ) -> None:
        self.groups, self.comm, self.ignore = groups, comm, ignore
        for group in groups.values():
            self._check_extents(group)
        train = groups["train"]
        if not self.count("train"):
            raise DataError(f"{train.source.path}: {train.image!r} has no samples")
        self.moments = moments(train.source, train.image)
        counts = {name: label_counts(group.source, group.label) for name, group in groups.items()}
        largest = max(label for counted in counts.values() for label in [1, *counted] if label != ignore)
        if classes is None:
            _check_largest(train, set().union(*counts.values()) - {ignore}, largest)
        self.classes = classes or largest + 1
        for name, group in groups.items():
            _check_labels(group, counts[name], max(2, self.classes), ignore)
        self.places = np.array([counts["train"].get(label, 0) for label in range(max(2, self.classes))])
        """How many places of the training samples are of each class."""

    def _check_extents(self, group: SegmentationGroup) -> None:
        image, label = group.source.shape(group.image), group.source.shape(group.label)
        if not 3 <= len(image) <= 5:
            raise DataError(
                f"{group.source.path}: {group.image!r} is {image}; images are (samples, channels, ...) with one to "
                "three extents"
            )
        if label != (image[0], *image[2:]):
            raise DataError(
                f"{group.source.path}: {group.label!r} is {label}; label maps for images {image} are "
                f"{(image[0], *image[2:])}"
            )
        if image[1:] != self.extents:
            raise DataError(
                f"{group.source.path}: dataset {group.image!r} has samples of {image[1:]}, those to train on are of "
                f"{self.extents}"
            )

    @property
    def extents(self) -> tuple[int, ...]:
        """(C, ...) of the images."""
        train = self.groups["train"]
        return train.source.shape(train.image)[1:]

    @property
    def axes(self) -> str:
        """Grid axes of the extents behind the channels."""
        return "dhw"[-len(self.extents[1:]) :]

    def count(self, group: str) -> int:
        """Number of samples in a group."""
        of = self.groups.get(group)
        return 0 if of is None else of.source.shape(of.image)[0]

    def close(self) -> None:
        """Close the files on this rank."""
        for group in self.groups.values():
            group.source.close()

    def loader(
        self, group: str, grid: ProcessGrid, batch: int, *, dtype: torch.dtype = torch.float32, **options: Any
    ) -> Loader:
        """Batches of normalised images (N, C, ...) of ``dtype`` and labels (N, ...); of one class as ``dtype``, too.

        Other ``options`` are those of a Loader, but they are not shuffled unless asked.
        """
        of = self.groups[group]
        fields = (
            Field(of.image, f"nc{self.axes}", dtype, self.moments.mean, self.moments.std, self.odd, self.exchanged),
            Field(of.label, f"n{self.axes}", dtype if self.classes == 1 else torch.int64),
        )
        return Loader(of.source, fields, grid, batch, **{"shuffle": False, **options})


def open_samples(
    path: Path,
    comm: MPI.Intracomm,
    *,
    test_path: Path | None = None,
    names: tuple[str, str] = ("image", "label"),
    classes: int | None = None,
    ignore: int | None = None,
    readers: int = 1,
) -> SegmentationSamples:
    """Those of what :func:`distconv.data.open_source` opens. Collective.

    The datasets ``names`` lie in groups ``train`` and, held out, ``test``, ``heldout`` or ``val``; or at the top, as
    those of ``test_path`` may. The groups are then ``train`` and, if samples are held out, ``test``.

    Raises
    ------
    DataError
        On all ranks, if something is missing, or not what it should be.
    """
    prefix = "train" if has_group(path, "train", comm) else ""
    groups = {"train": _group(path, prefix, names, comm, readers)}
    if test_path is not None or prefix:
        where = test_path or path
        held_out = next((name for name in HELD_OUT if has_group(where, name, comm)), "")
        if test_path is not None or held_out:
            groups["test"] = _group(where, held_out, names, comm, readers)
    return SegmentationSamples(groups, comm, classes=classes, ignore=ignore)


def _group(path: Path, prefix: str, names: tuple[str, str], comm: MPI.Intracomm, readers: int) -> SegmentationGroup:
    image, label = (f"{prefix}/{name}" if prefix else name for name in names)
    return SegmentationGroup(open_source(path, [image, label], comm, readers=readers), image, label)


MANY_LABELS = 32
"""A largest label from which on the number of classes must be given if most of the labels below it are missing."""


def label_counts(file: SampleSource, name: str) -> Counter[int]:
    """How often each label is in the dataset ``name`` (N, ...), the same on all ranks. Collective.

    Raises
    ------
    DataError
        On all ranks, if they cannot be read, or are not whole numbers of a small range.
    """

    def count() -> Counter[int]:
        counter: Counter[int] = Counter()
        for sample in range(file.comm.rank, file.shape(name)[0], file.comm.size):
            for box in chunk_aligned_boxes(file, name, sample, channels=False):
                counter.update(_counted(file.read(name, box), f"{file.path}: {name!r}: sample {sample}"))
        return counter

    return sum(file.comm.allgather(try_on_all_ranks(file.comm, count, DataError)), Counter())


def _counted(labels: NDArray[Any], where: str) -> dict[int, int]:
    low, high = labels.min(), labels.max()
    if not np.isfinite([low, high]).all() or high - float(low) >= MOST_LABELS or (labels % 1).any():
        raise DataError(f"{where} has values from {low:g} to {high:g}; labels are classes: 0, 1, 2, ...")
    counts = np.bincount((labels.ravel() - low).astype(np.int64))
    return {int(low) + int(index): int(counts[index]) for index in np.flatnonzero(counts)}


def _check_largest(train: SegmentationGroup, labels: set[int], largest: int) -> None:
    """Check that the number of classes follows from the largest label: most of the labels below it exist, too."""
    if largest >= MANY_LABELS and 2 * len(labels) < largest:
        shown = sorted(labels)
        listed = f"{', '.join(map(str, shown[:3]))}, ..., {shown[-1]}" if len(shown) > 4 else ", ".join(map(str, shown))
        raise DataError(
            f"{train.source.path}: {train.label!r} has {len(shown)} different labels ({listed}), which would make "
            f"{largest + 1} classes. If {largest} marks pixels without a label, pass --ignore-label {largest}; "
            "otherwise pass --classes"
        )


def _check_labels(group: SegmentationGroup, counts: Mapping[int, int], classes: int, ignore: int | None) -> None:
    wrong = sorted(label for label in counts if label != ignore and not 0 <= label < classes)
    if wrong:
        raise DataError(
            f"{group.source.path}: {group.label!r} has the label {wrong[0]} at {counts[wrong[0]]} places; labels are 0 "
            f"to {classes - 1}: correct the data, or say --classes or --ignore-label"
        )
