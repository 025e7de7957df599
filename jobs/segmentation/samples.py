"""Images and label maps opened for training: number of classes, channel moments, loaders.

Used by :class:`distconv.jobs.segmentation.trainer.SegmentationTrainer` and, as a base class, by the samples of
:mod:`distconv.jobs.mesh`. The module is independent of the network and its loss.
"""

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
"""Names of the file group that becomes the group ``test``. The first one that exists is used."""
MOST_LABELS = 1 << 16
"""Limit of the difference between the largest and the smallest label of a block that is read."""


@dataclass(frozen=True, eq=False)
class SegmentationGroup:
    """Images (N, C, ...) and label maps (N, ...): two datasets of one source."""

    source: StoredSource
    image: str
    label: str


class SegmentationSamples:
    """Groups of samples with label maps, among them ``train``, and the channel moments of the training images.

    Collective: construct on every rank.

    Parameters
    ----------
    groups : mapping of str to SegmentationGroup
        The groups; ``train`` is required.
    comm : MPI.Intracomm
        The ranks that read the samples.
    classes : int, optional
        Number of classes; valid labels are 0 to ``classes`` - 1. By default it follows from the largest label. With one
        class, the network has one output channel and labels are 0 or 1.
    ignore : int, optional
        Label value excluded from loss and metrics.

    Raises
    ------
    DataError
        On all ranks, if images and labels do not fit each other, or labels are not valid classes.
    """

    sign_flipped: Mapping[str, Sequence[float]] = {}
    """By axis, the factor of each channel of an image that is flipped along it (``distconv.data.loader.Field``)."""
    transposed: Sequence[tuple[int, float]] = ()
    """Source channel and factor of each channel of a transposed image (``distconv.data.loader.Field``)."""

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
            raise DataError(f"{train.source.path}: dataset {train.image!r} has no samples")
        self.moments = moments(train.source, train.image)
        counts = {name: label_counts(group.source, group.label) for name, group in groups.items()}
        # At least 1: a data set whose labels are all 0 still has two classes.
        largest = max(label for counted in counts.values() for label in [1, *counted] if label != ignore)
        if classes is None:
            _check_largest(train, set().union(*counts.values()) - {ignore}, largest)
        self.classes = classes or largest + 1
        for name, group in groups.items():
            _check_labels(group, counts[name], max(2, self.classes), ignore)
        self.places = np.array([counts["train"].get(label, 0) for label in range(max(2, self.classes))])
        """Number of pixels of each class in the training samples."""

    def _check_extents(self, group: SegmentationGroup) -> None:
        image, label = group.source.shape(group.image), group.source.shape(group.label)
        if not 3 <= len(image) <= 5:
            raise DataError(
                f"{group.source.path}: the shape of dataset {group.image!r} is {image}, but images are (samples, "
                "channels, ...) with one to three spatial dimensions"
            )
        if label != (image[0], *image[2:]):
            raise DataError(
                f"{group.source.path}: the shape of dataset {group.label!r} is {label}, but labels of images "
                f"{image} are {(image[0], *image[2:])}"
            )
        if image[1:] != self.extents:
            raise DataError(
                f"{group.source.path}: the samples of dataset {group.image!r} have the shape {image[1:]}, but the "
                f"training samples have {self.extents}. Use samples of the same shape."
            )

    @property
    def extents(self) -> tuple[int, ...]:
        """Shape (C, ...) of the images."""
        train = self.groups["train"]
        return train.source.shape(train.image)[1:]

    @property
    def axes(self) -> str:
        """Grid axes of the spatial dimensions, such as ``"hw"``."""
        return "dhw"[-len(self.extents[1:]) :]

    def count(self, group: str) -> int:
        """Return the number of samples in a group; 0 if there is no such group."""
        stored = self.groups.get(group)
        return 0 if stored is None else stored.source.shape(stored.image)[0]

    def close(self) -> None:
        """Close the files on this rank."""
        for group in self.groups.values():
            group.source.close()

    def loader(
        self,
        group: str,
        grid: ProcessGrid,
        batch: int,
        *,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
        **options: Any,
    ) -> Loader:
        """Return a loader of normalized images (N, C, ...) and labels (N, ...).

        Parameters
        ----------
        group : str
            Name of the group.
        grid : ProcessGrid
            The grid over which batches are distributed.
        batch : int
            Samples in a global mini-batch.
        dtype : torch.dtype
            Data type of the images. Labels are int64, or ``dtype`` if there is one class.
        memory_format : torch.memory_format
            Memory format of the images.
        **options
            Options of :class:`distconv.data.loader.Loader`. Samples are not shuffled by default.

        Returns
        -------
        Loader
            Batches of two distributed tensors.
        """
        stored = self.groups[group]
        fields = (
            Field(
                stored.image,
                f"nc{self.axes}",
                dtype,
                self.moments.mean,
                self.moments.std,
                self.sign_flipped,
                self.transposed,
                memory_format,
            ),
            Field(stored.label, f"n{self.axes}", dtype if self.classes == 1 else torch.int64),
        )
        return Loader(stored.source, fields, grid, batch, **{"shuffle": False, **options})


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
    """Open images and label maps that :func:`distconv.data.open_source` can read. Collective: call on every rank.

    The datasets ``names`` lie in the group ``train`` and, if samples are held out, in ``test``, ``heldout`` or ``val``.
    They may also lie at the top level of ``path`` and of ``test_path``.

    Parameters
    ----------
    path : Path
        File or folder of the training samples.
    comm : MPI.Intracomm
        The ranks that read the samples.
    test_path : Path, optional
        File or folder of the test samples. By default a held-out group of ``path``, if there is one.
    names : (str, str)
        Names of the datasets of images and label maps.
    classes, ignore
        As in :class:`SegmentationSamples`.
    readers : int
        Number of processes that read for each rank.

    Returns
    -------
    SegmentationSamples
        With the group ``train`` and, if samples are held out, ``test``.

    Raises
    ------
    DataError
        On all ranks, if a dataset is missing or invalid.
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
"""Largest label from which on ``classes`` is required if more than half of the labels below it are missing."""


def label_counts(file: SampleSource, name: str) -> Counter[int]:
    """Count how often each label occurs in a dataset. Collective: call on every rank.

    Parameters
    ----------
    file : SampleSource
        The source.
    name : str
        The dataset of label maps (N, ...).

    Returns
    -------
    Counter
        Number of pixels by label, identical on all ranks.

    Raises
    ------
    DataError
        On all ranks, if labels cannot be read, are not integers, or span ``MOST_LABELS`` values or more.
    """

    def count() -> Counter[int]:
        counter: Counter[int] = Counter()
        for sample in range(file.comm.rank, file.shape(name)[0], file.comm.size):
            for box in chunk_aligned_boxes(file, name, sample, channels=False):
                counter.update(_count_labels(file.read(name, box), f"{file.path}: {name!r}: sample {sample}"))
        return counter

    return sum(file.comm.allgather(try_on_all_ranks(file.comm, count, DataError)), Counter())


def _count_labels(labels: NDArray[Any], where: str) -> dict[int, int]:
    low, high = labels.min(), labels.max()
    if not np.isfinite([low, high]).all() or high - float(low) >= MOST_LABELS or (labels % 1).any():
        raise DataError(f"{where} has values from {low:g} to {high:g}, but labels are classes: 0, 1, 2, ...")
    # Counted from the smallest label, which may be negative (an ignored one).
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
            f"{group.source.path}: dataset {group.label!r} has the label {wrong[0]} in {counts[wrong[0]]} "
            f"pixels, but labels are 0 to {classes - 1}. Correct the data, or give --classes or "
            "--ignore-label."
        )
