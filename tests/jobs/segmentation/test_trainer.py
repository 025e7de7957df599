"""Training of a segmentation network: as in one process, evaluated by counts, refused if unfit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.errors import CheckpointError, DataError, DistconvError
from distconv.jobs.segmentation import trainer as trainer_module
from distconv.jobs.segmentation.samples import open_samples
from distconv.jobs.segmentation.trainer import SegmentationSettings, SegmentationTrainer, class_weights
from distconv.jobs.training.model_factory import ModelError
from tests.distconv.data.sample_files import common
from tests.jobs.approved import assert_approved_defaults
from tests.jobs.segmentation.label_maps import GRIDS, arrays, net, written

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
@pytest.mark.ranks(3, 4)
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


@pytest.mark.ranks(1, 2)
def test_a_checkpoint_of_other_data_is_refused(comm: Any, shared_tmp_path: Path) -> None:
    samples = open_samples(written(shared_tmp_path / "a.h5", comm), comm, ignore=255)
    grid, saved = dc.ProcessGrid(comm, **GRIDS[comm.size]), str(shared_tmp_path / "saved")
    SegmentationTrainer(settings(), samples, grid).save(saved)
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


def test_settings_are_as_approved_and_reach_the_network_the_loss_and_the_loaders(monkeypatch: Any) -> None:
    assert_approved_defaults("segmentation", SegmentationSettings())
    seen: list[Any] = []

    def build(model: str, comm: Any, **options: Any) -> torch.nn.Module:
        seen.append((model, options))
        return torch.nn.Conv3d(2, 3, 1)

    def loader(group: str, grid: Any, batch: int, **options: Any) -> Any:
        seen.append((group, batch, options))
        return SimpleNamespace(samples=5, steps=1, epoch=lambda number: iter(()))

    moments = SimpleNamespace(mean=np.array([1.5, 2.0]), std=np.array([2.5, 3.0]))
    train = SimpleNamespace(image="train/x", label="train/y")
    samples: Any = SimpleNamespace(
        comm=MPI.COMM_SELF, extents=(2, 4, 5, 6), axes="dhw", classes=3, loader=loader, moments=moments, ignore=9,
        groups={"train": train}, places=np.array([6, 0, 2]),
    )  # fmt: skip
    monkeypatch.setattr(trainer_module, "build_segmenter", build)
    monkeypatch.setattr(trainer_module, "accumulate_batches", lambda parts, count: (parts, count))
    more: dict[str, Any] = {
        "width": 7,
        "batch": 6,
        "accumulate": 2,
        "seed": 4,
        "epochs": 1,
        "memory_format": "channels_last",
    }
    settings = SegmentationSettings(**more, mirror="dw", crop="h=2,w=3", class_weights="balanced", ignore_label=9)
    trainer = SegmentationTrainer(settings, samples, dc.ProcessGrid(MPI.COMM_SELF))
    list(trainer.predictions("test"))
    assert seen[0] == ("unet3d", {"seed": 4, "in_channels": 2, "classes": 3, "width": 7})
    form = {"memory_format": torch.channels_last_3d}
    training = {"seed": 4, "mirror": "dw", "crop": {"h": 2, "w": 3}, **settings.loader_options("cpu"), **form}
    assert seen[1:] == [("train", 3, training), ("test", 1, settings.evaluation_options("cpu") | form)]
    loss = trainer.criterion
    assert (loss.classes, loss.ignore, loss.dice, trainer.loader[1]) == (3, 9, False, 2)
    assert loss.weights is not None and loss.weights.dtype == torch.float32
    assert loss.weights.tolist() == pytest.approx([8 / 12, 0, 8 / 4])
    assert trainer.notes == {
        "task": "segmentation", "classes": 3, "ignore": 9, "names": ["x", "y"], "mean": [1.5, 2.0], "std": [2.5, 3.0]
    }  # fmt: skip
    plain = SegmentationTrainer(SegmentationSettings(loss="cross-entropy+dice", epochs=1), samples, trainer.grid)
    assert plain.criterion.dice and plain.criterion.weights is None and plain.evaluated_at_once == 0
    assert seen[-1][2]["crop"] is None
    samples.classes = 1
    with pytest.raises(DataError, match="a single class cannot be weighted"):
        class_weights("1", samples)
    samples.axes, samples.extents = "w", (2, 5)
    with pytest.raises(ModelError, match=r"samples of \(2, 5\): no reference model. Name your own"):
        SegmentationTrainer(SegmentationSettings(), samples, trainer.grid)


def test_a_logit_of_zero_predicts_the_class() -> None:
    grid = dc.ProcessGrid(MPI.COMM_SELF)
    one = dc.scatter(torch.tensor([[[-1.0, 0.0, 2.0]]]), grid, dims="nc-")
    two = dc.scatter(torch.tensor([[[1.0, 0.0], [1.0, 3.0]]]), grid, dims="nc-")
    assert trainer_module.predicted_classes(one).local.tolist() == [[0, 1, 1]]
    assert trainer_module.predicted_classes(two).local.tolist() == [[0, 1]]
