"""Mini-batches in parts: their samples, and that their steps are those of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import distconv as dc
from distconv.data.loader import Batch, EpochLoader
from distconv.errors import DataError, DistconvError
from distconv.jobs.images.classification import ImageSettings, ImageTrainer
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.training.accumulation import AccumulatedLoader, accumulate_batches
from tests.jobs.images.grids import grid_of
from tests.jobs.images.image_files import written


class Numbers(EpochLoader):
    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        for samples in self.batches(number, start):
            yield Batch(samples, (list(samples), len(samples)))


def test_batches_are_those_of_the_whole_in_parts() -> None:
    for drop in (False, True):
        order: dict[str, Any] = {"seed": 3, "shuffle": True, "drop_last": drop}
        whole, parts = Numbers(11, 4, ("a", "b"), **order), AccumulatedLoader(Numbers(11, 2, ("a", "b"), **order), 2)
        assert (parts.steps, parts.samples, parts.batch) == (whole.steps, 11, 4)
        for start in (0, 1):
            found = list(parts.epoch(5, start))
            assert [batch.samples for batch in found] == [batch.samples for batch in whole.epoch(5, start)]
            assert all(list(chain(*batch.tensors[0])) == list(batch.samples) for batch in found)
    assert next(parts.epoch(0)).tensors[1] == (2, 2)
    assert accumulate_batches(whole, 1) is whole
    with pytest.raises(DataError, match="--accumulate: no batch of 12 can be made of the 11 samples"):
        AccumulatedLoader(Numbers(11, 6, ("a", "b"), drop_last=True), 2)


@pytest.mark.ranks(1, 2)
def test_steps_of_parts_are_those_of_the_whole_batch(comm: Any, shared_tmp_path: Path) -> None:
    folder, found = written(comm, shared_tmp_path), []
    settings = ImageSettings(
        "lenet5", batch=12, steps=5, lr=0.01, dtype="float64", clip_norm=1.0
    )  # 40 images: 12, 12, 12, 4
    for count in (1, 3):
        samples = ImageSamples(folder, comm)
        trainer = ImageTrainer(replace(settings, accumulate=count), samples, dc.ProcessGrid(comm, n=comm.size))
        losses = [trainer.step(*batch.tensors) for batch in trainer.batches()]
        found.append((losses, [parameter.detach().clone() for parameter in trainer.model.parameters()]))
    (losses, weights), (of_parts, weights_of_parts) = found
    assert of_parts == pytest.approx(losses, rel=1e-12)
    assert all((a - b).abs().max() < 1e-13 for a, b in zip(weights, weights_of_parts, strict=True))


@pytest.mark.ranks(2)
def test_what_cannot_be_accumulated_is_refused(comm: Any, shared_tmp_path: Path) -> None:
    samples = ImageSamples(written(comm, shared_tmp_path), comm)
    with pytest.raises(DistconvError, match=r"--batch 12: cannot be split into 5 equal parts"):
        ImageTrainer(ImageSettings("lenet5", batch=12, accumulate=5), samples, grid_of(comm))
    trainer = ImageTrainer(ImageSettings("lenet5", batch=12, accumulate=2), samples, grid_of(comm))
    with pytest.raises(DistconvError, match="--capture on: steps with --accumulate"):
        trainer.capture("on")
