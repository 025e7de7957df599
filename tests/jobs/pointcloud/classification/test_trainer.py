"""Training on point clouds: the same steps on every grid, resumed bit for bit; scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

import distconv as dc
from distconv.jobs.pointcloud.batches import Recipe, voxel_batch
from distconv.jobs.pointcloud.classification.samples import CloudSamples
from distconv.jobs.pointcloud.classification.trainer import NETWORKS, Settings, Trainer
from distconv.jobs.training.training import learning_rate, make_optimizer, set_rate
from distconv.layers.sparse import SparseTensor
from tests.jobs.images.image_files import written
from tests.jobs.pointcloud.cloud_files import write_ours

GRIDS = {1: ["n=1"], 2: ["n=2", "d=2"], 3: ["w=3"], 4: ["n=2,h=2"]}
SMALL = {"width": 2, "batch": 2, "resolution": 16, "points": 30, "dtype": "float64", "lr": 0.01}


def clouds(comm: Any, folder: Path) -> CloudSamples:
    return CloudSamples(written(comm, folder, lambda place: write_ours(place / "clouds.h5")) / "clouds.h5", comm)


def losses_of_one_process(settings: Settings, samples: CloudSamples, order: list[tuple[int, ...]]) -> list[float]:
    """Losses of plain sparse tensors in a plain loop; dropout draws from where the trainer's does."""
    torch.manual_seed(settings.seed)
    model = NETWORKS[settings.model](width=settings.width, classes=3).double()
    optimizer, losses = make_optimizer(settings, model.parameters()), []
    recipe = Recipe(settings.resolution, settings.points, settings.keep, seed=settings.seed)
    for step, batch in enumerate(order):
        made = voxel_batch(samples.groups["train"], batch, recipe, step // 3)
        set_rate(optimizer, learning_rate(step, len(order), settings.lr))
        optimizer.zero_grad()
        x = SparseTensor(made.coords, made.features.double(), batch_size=len(batch))
        loss = F.cross_entropy(model(x), made.labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.ranks(*GRIDS)
def test_losses_on_any_grid_equal_those_of_one_process(comm: Any, shared_tmp_path: Path) -> None:
    samples = clouds(comm, shared_tmp_path)
    settings = Settings(**SMALL | {"epochs": 2, "keep": 0.8, "optimizer": "sgd"})
    for text in GRIDS[comm.size]:
        trainer = Trainer(settings, samples, dc.ProcessGrid(comm, **dc.parse_grid(text)))
        order, losses = [], []
        for batch in trainer.batches():
            order.append(batch.samples)
            losses.append(trainer.step(*batch.tensors))
        assert len(losses) == 6
        assert losses == pytest.approx(losses_of_one_process(settings, samples, order), rel=1e-10), text
    samples.close()


@pytest.mark.ranks(1, 2)
def test_a_resumed_run_takes_the_same_steps_bit_for_bit(comm: Any, shared_tmp_path: Path) -> None:
    samples = clouds(comm, shared_tmp_path)
    settings = Settings(**SMALL | {"model": "vgg16_bn", "width": 1, "epochs": 2, "resolution": 32})
    grid = dc.ProcessGrid(comm, d=comm.size)
    first = Trainer(settings, samples, grid)
    losses = []
    for batch in first.batches():
        losses.append((batch.samples, first.step(*batch.tensors)))
        if first.step_count == 4:  # in the middle of the second epoch
            first.save(str(shared_tmp_path / "saved"))
            first.evaluate("test")
    second = Trainer(settings, samples, grid)
    torch.rand(3)  # dropout must go on with the random numbers of the checkpoint
    assert second.resume(str(shared_tmp_path / "saved"))
    assert [(batch.samples, second.step(*batch.tensors)) for batch in second.batches()] == losses[4:]
    for (name, expected), found in zip(
        first.model.state_dict().items(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected), name
    samples.close()


@pytest.mark.ranks(1, 2)
def test_scores_count_every_cloud_once_without_point_dropout(comm: Any, shared_tmp_path: Path) -> None:
    samples = clouds(comm, shared_tmp_path)
    settings = Settings(**SMALL | {"keep": 0.2})
    trainer = Trainer(settings, samples, dc.ProcessGrid(comm, n=comm.size))
    torch.manual_seed(settings.seed)
    model = NETWORKS["resnet"](width=2, classes=3).double().eval()
    made = voxel_batch(samples.groups["train"], range(5), Recipe(16, points=30), 0)
    with torch.no_grad():
        logits = model(SparseTensor(made.coords, made.features.double(), batch_size=5))
    found = trainer.evaluate("train")
    assert (found.samples, found.correct) == (5, int((logits.argmax(1) == made.labels).sum()))
    assert found.loss == pytest.approx(float(F.cross_entropy(logits, made.labels)), rel=1e-10)
    samples.close()


def test_a_width_that_is_not_given_is_the_networks_own(tmp_path: Path) -> None:
    samples = clouds(MPI.COMM_SELF, tmp_path)
    trainer = Trainer(Settings(width=None), samples, dc.ProcessGrid(MPI.COMM_SELF))
    expected = sum(parameter.numel() for parameter in NETWORKS["resnet"](classes=3).parameters())
    assert trainer.parameter_count == expected
    samples.close()
