"""Training of a segmentation network: as in one process, resumed bit for bit, evaluated by counts, refused if unfit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.errors import CheckpointError, DataError, DistconvError
from distconv.jobs.segmentation.samples import open_samples
from distconv.jobs.segmentation.trainer import SegmentationSettings, SegmentationTrainer, class_weights
from distconv.jobs.training.model_factory import ModelError
from tests.distconv.data.sample_files import common
from tests.jobs.segmentation.label_maps import GRIDS, arrays, net, written
from tests.jobs.training.resumed_runs import assert_resumes_bit_for_bit

NETS = {2: "tests.jobs.segmentation.label_maps:net", 3: "tests.jobs.segmentation.label_maps:volume_net"}
CROPS = {2: "h=6,w=7", 3: "d=4,h=5,w=5"}
VOLUME_GRIDS = {1: {"n": 1}, 2: {"d": 2}, 3: {"h": 3}, 4: {"d": 2, "h": 2}}


def settings(dimensions: int = 2, **more: Any) -> SegmentationSettings:
    given = {
        "model": NETS[dimensions],
        "crop": CROPS[dimensions],
        "mirror": "dhw"[-dimensions:],
        "loss": "cross-entropy+dice",
    }
    given |= {"class_weights": "balanced", "ignore_label": 255, "dtype": "float64", "epochs": 2}
    return SegmentationSettings(**{**given, **more})


@pytest.mark.long
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_grid_trains_and_scores_as_one_process(comm: Any, shared_tmp_path: Path, dimensions: int) -> None:
    path = written(shared_tmp_path / "a.h5", comm, dimensions)
    grids = GRIDS if dimensions == 2 else VOLUME_GRIDS
    found = []
    for where, axes in ((MPI.COMM_SELF, {}), (comm, grids[comm.size])):
        samples = open_samples(path, where, ignore=255)
        trainer = SegmentationTrainer(settings(dimensions), samples, dc.ProcessGrid(where, **axes))
        losses = [trainer.step(*batch.tensors) for batch in trainer.batches()]
        found.append((losses, *trainer.evaluate("test")))
        samples.close()
    (losses, scores, loss), (found_losses, found_scores, found_loss) = found
    assert len(losses) == 6 and found_losses == pytest.approx(losses, rel=1e-10)
    assert found_scores == scores and found_loss == pytest.approx(loss, rel=1e-10)
    assert scores.count == (arrays(dimensions, samples=3, seed=1)[1] != 255).sum()


@pytest.mark.long
@pytest.mark.ranks(1, 2)
def test_a_resumed_run_takes_the_same_steps_bit_for_bit(comm: Any, shared_tmp_path: Path) -> None:
    samples = open_samples(written(shared_tmp_path / "a.h5", comm), comm, ignore=255)
    grid, saved = dc.ProcessGrid(comm, **GRIDS[comm.size]), str(shared_tmp_path / "saved")
    # In the middle of the second epoch.
    assert_resumes_bit_for_bit(lambda: SegmentationTrainer(settings(), samples, grid), shared_tmp_path, 4)
    image, label = arrays()
    other = open_samples(written(shared_tmp_path / "b.h5", comm, train=(image + 1, label)), comm, ignore=255)
    with pytest.raises(CheckpointError) as caught:
        SegmentationTrainer(settings(), other, grid).resume(saved)
    assert "written with different data: mean was" in common(comm, caught.value)


@pytest.mark.ranks(1, 2)
def test_class_weights_are_those_that_were_written_or_weigh_all_alike(comm: Any, shared_tmp_path: Path) -> None:
    samples = open_samples(written(shared_tmp_path / "a.h5", comm), comm, ignore=255)
    assert class_weights("", samples) is None
    assert class_weights("1,2.5,0", samples) == [1, 2.5, 0]
    balanced = class_weights("balanced", samples)
    assert balanced is not None and np.ptp(np.array(balanced) * samples.places) < 1e-9
    assert (np.array(balanced) * samples.places).sum() == pytest.approx(samples.places.sum())
    with pytest.raises(DataError, match="2 weights for 3 classes"):
        class_weights("1,2", samples)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("changed", "kind", "reason"),
    [
        ({"mirror": "dh"}, DataError, "--mirror: samples of (2, 9, 11) have the axes hw, not d"),
        ({"crop": "d=2"}, DataError, "--crop: samples of (2, 9, 11) have the axes hw, not d"),
        ({"crop": "h=10"}, DataError, "crop h=10: samples have 9 there"),
        ({"model": "unet3d"}, ModelError, "--model unet3d: for samples with 3 dimensions, but these are (2, 9, 11)"),
        ({"model": "lenet5"}, ModelError, "no such segmentation network. Use mesh1k"),
    ],
)
def test_what_does_not_fit_the_samples_is_refused(
    comm: Any, shared_tmp_path: Path, changed: dict[str, str], kind: type[DistconvError], reason: str
) -> None:
    samples = open_samples(written(shared_tmp_path / "a.h5", comm), comm, ignore=255)
    with pytest.raises(kind) as caught:
        SegmentationTrainer(settings(**changed), samples, dc.ProcessGrid(comm, **GRIDS[comm.size]))
    assert reason in common(comm, caught.value)
    samples.close()


def narrow(in_channels: int, classes: int) -> torch.nn.Module:
    return net(in_channels, classes - 1)


@pytest.mark.ranks(1, 2)
def test_a_network_that_gives_something_else_is_refused(comm: Any, shared_tmp_path: Path) -> None:
    samples = open_samples(written(shared_tmp_path / "a.h5", comm), comm, ignore=255)
    of = settings(model="tests.jobs.segmentation.test_trainer:narrow")
    trainer = SegmentationTrainer(of, samples, dc.ProcessGrid(comm, **GRIDS[comm.size]))
    with pytest.raises(ModelError) as caught:
        trainer.step(*next(trainer.batches()).tensors)
    assert "the outputs for labels (2, 6, 7) are (2, 2, 6, 7), but a segmentation network returns" in common(
        comm, caught.value
    )


@pytest.mark.ranks(1, 2)
def test_one_channel_and_the_default_network(comm: Any, shared_tmp_path: Path) -> None:
    image, label = arrays(classes=2)
    path = written(shared_tmp_path / "a.h5", comm, train=(image, label))
    samples = open_samples(path, comm, classes=1, ignore=255)
    of = SegmentationSettings(width=2, batch=5, steps=1, ignore_label=255, dtype="float64")
    trainer = SegmentationTrainer(of, samples, dc.ProcessGrid(comm, **GRIDS[comm.size]))
    assert (trainer.settings.model, trainer.notes["classes"]) == ("unet", 1)
    trainer.step(*next(trainer.batches()).tensors)
    scores, loss = trainer.evaluate("train")
    assert len(scores.dice) == 1 and scores.count == (label != 255).sum() and np.isfinite(loss)
