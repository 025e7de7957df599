"""Labelled images opened for training: number of classes, channel moments, loaders.

The trainers of :mod:`.classification` use it. The module is independent of the file formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import try_on_all_ranks
from distconv.data.channel_statistics import moments
from distconv.data.loader import Batch, Field, Loader
from distconv.distribution import Distribution, Interval
from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.tensor import DistTensor

from .groups import ImageGroup, open_groups
from .sources import ShiftedImages

CROP_PADDING = 4
"""Largest shift of the augmentation ``crop``, in pixels."""


class ImageSamples:
    """Training and test images of a data set. Collective: construct on every rank.

    Parameters
    ----------
    path : Path
        A folder with the files of MNIST, of CIFAR-10, or ``train.h5`` (and ``test.h5``); a CIFAR-10 batch file; or
        a path that :func:`distconv.data.open_source` can open. ``digits`` selects the embedded images if there is no
        such file.
    comm : MPI.Intracomm
        The ranks that read the images.
    test_path : Path, optional
        File of the test images, if ``path`` has none.
    names : (str, str)
        Names of the datasets of images and labels, in the groups ``train`` and ``test`` or at the top level.
    classes : int, optional
        Number of classes; by default that of the format, or the largest training label plus one.
    limit : int, optional
        Number of training images to use; by default all.
    readers : int
        Number of processes that read for each rank.

    Raises
    ------
    DataError
        On all ranks, if files are missing or invalid. The message contains file, reason and values.
    MismatchError
        If ranks read different data.
    """

    def __init__(
        self,
        path: Path,
        comm: MPI.Intracomm,
        *,
        test_path: Path | None = None,
        names: tuple[str, str] = ("image", "label"),
        classes: int | None = None,
        limit: int | None = None,
        readers: int = 1,
    ) -> None:
        self.comm = comm
        self.groups = open_groups(path, test_path, names, comm, readers)
        train = self.groups["train"]
        self.classes = classes or train.classes
        for group in self.groups.values():
            _check_labels(group, self.classes)
            if group.shape[1:] != train.shape[1:]:
                raise DataError(
                    f"{group.source.path}: the shape of the images is {group.shape[1:]}, but that of the training "
                    f"images in {train.source.path} is {train.shape[1:]}. Use images of the same shape."
                )
        # Only now: labels beyond --limit are checked, too, and count for the number of classes.
        self.groups["train"] = replace(train, labels=train.labels[:limit])
        self.moments = moments(self._part("train"), train.dataset)

    @property
    def extents(self) -> tuple[int, ...]:
        """Shape (C, H, W) of the images."""
        return self.groups["train"].shape[1:]

    def image(self, group: str, sample: int) -> NDArray[np.generic]:
        """Return one image (C, H, W) as stored in the file. Collective: call on every rank.

        Parameters
        ----------
        group : str
            ``train`` or ``test``.
        sample : int
            Index of the sample.

        Returns
        -------
        numpy.ndarray
        """
        stored = self.groups[group]
        box = (Interval(sample, sample + 1), *(Interval(0, extent) for extent in self.extents))
        return try_on_all_ranks(self.comm, lambda: stored.source.read(stored.dataset, box)[0], DataError)

    def source_path(self, group: str) -> object:
        """Return the path of the file of a group."""
        return self.groups[group].source.path

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
        seed: int = 0,
        augment: str = "",
        **options: Any,
    ) -> ImageLoader:
        """Return a loader of normalized images (N, C, H, W) and labels (N).

        Parameters
        ----------
        group : str
            ``train`` or ``test``.
        grid : ProcessGrid
            The grid over which batches are distributed.
        batch : int
            Samples in a global mini-batch.
        dtype : torch.dtype
            Data type of the images. Labels are int64.
        memory_format : torch.memory_format
            Memory format of the images.
        seed : int
            Seed of order and augmentation.
        augment : str
            May contain ``crop`` (shift images by up to 4 pixels) and ``flip`` (flip images along W at random).
        **options
            Options of :class:`distconv.data.loader.Loader`. Samples are not shuffled by default.

        Returns
        -------
        ImageLoader
            Batches of two distributed tensors.
        """
        stored = self.groups[group]
        part = self._part(group, shift=CROP_PADDING if "crop" in augment else 0, seed=seed)
        return ImageLoader(
            part,
            stored.labels,
            # Channels are not split: there are few, and a layer that splits its channels takes its block of them.
            Field(stored.dataset, "n-hw", dtype, self.moments.mean, self.moments.std, memory_format=memory_format),
            grid,
            batch,
            seed=seed,
            mirror="w" if "flip" in augment else "",
            **{"shuffle": False, **options},
        )

    def _part(self, group: str, shift: int = 0, seed: int = 0) -> ShiftedImages:
        stored = self.groups[group]
        return ShiftedImages(stored.source, len(stored.labels), shift=shift, seed=seed)


class ImageLoader(Loader):
    """Loader of images and their labels. ``options`` are those of :class:`distconv.data.loader.Loader`."""

    def __init__(
        self,
        part: ShiftedImages,
        labels: NDArray[np.int64],
        field: Field,
        grid: ProcessGrid,
        batch: int,
        **options: Any,
    ) -> None:
        super().__init__(part, (field,), grid, batch, **options)
        self.part, self._labels = part, labels

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step ``start`` on. Collective: iterate on every rank.

        Parameters
        ----------
        number : int
            Epoch.
        start : int
            First step of the epoch to yield.

        Yields
        ------
        Batch
        """
        self.part.epoch = number  # before the loader's threads read the first image
        with closing(super().epoch(number, start)) as batches:  # type: ignore[type-var]  # a generator
            for batch in batches:
                yield Batch(batch.samples, (*batch.tensors, self._labels_of(batch.samples)))

    def _labels_of(self, samples: tuple[int, ...]) -> DistTensor:
        # Over samples alone, as the logits of a classifier: the ranks of one spatial group have the same labels.
        dist, shape = Distribution(self.grid, ("n",)), (len(samples),)
        mine = dist.box(None, shape)[0]
        local = torch.from_numpy(self._labels[list(samples[mine.start : mine.stop])])
        return DistTensor(local.to(self.device), dist, shape)


def _check_labels(group: ImageGroup, classes: int) -> None:
    wrong = np.flatnonzero((group.labels < 0) | (group.labels >= classes))
    if len(wrong):
        raise DataError(
            f"{group.labels_in}: {len(wrong)} of {len(group.labels)} labels are not in 0 to {classes - 1}; "
            f"the first is {group.labels[wrong[0]]}, of sample {wrong[0]}. Correct the data, or give "
            "--classes."
        )
