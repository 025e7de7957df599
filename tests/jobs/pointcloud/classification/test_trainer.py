"""Training on point clouds: the same steps on every grid and in pipelines; scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

import distconv as dc
from distconv.jobs.pointcloud.batches import VoxelRecipe, voxel_batch
from distconv.jobs.pointcloud.classification import trainer as trainer_module
from distconv.jobs.pointcloud.classification.samples import CloudSamples
from distconv.jobs.pointcloud.classification.trainer import NETWORKS, CloudPipelineTrainer, CloudSettings, CloudTrainer
from distconv.jobs.training.settings import learning_rate, make_optimizer, set_learning_rate
from distconv.layers.models.sparse import sparse_resnet
from distconv.layers.sparse import SparseTensor
from tests.jobs.approved import assert_approved_defaults
from tests.jobs.images.image_files import written
from tests.jobs.pointcloud.cloud_files import write_ours
from tests.jobs.training.pipelines.pipelined import pipelining

GRIDS = {2: ["n=2", "d=2"], 4: ["n=2,h=2"]}
SMALL = {"width": 2, "batch": 2, "resolution": 16, "points": 30, "dtype": "float64", "lr": 0.01}


def clouds(comm: Any, folder: Path) -> CloudSamples:
    return CloudSamples(written(comm, folder, lambda place: write_ours(place / "clouds.h5")) / "clouds.h5", comm)


@pytest.mark.long
@pytest.mark.ranks(*GRIDS)
def test_losses_on_any_grid_equal_those_of_one_process(comm: Any, shared_tmp_path: Path) -> None:
    samples = clouds(comm, shared_tmp_path)
    settings = CloudSettings(**SMALL | {"epochs": 2, "keep": 0.8, "optimizer": "sgd"})
    for text in GRIDS[comm.size]:
        trainer = CloudTrainer(settings, samples, dc.ProcessGrid(comm, **dc.parse_grid(text)))
        order, losses = [], []
        for batch in trainer.batches():
            order.append(batch.samples)
            losses.append(trainer.step(*batch.tensors))
        assert len(losses) == 6
        assert losses == pytest.approx(losses_of_one_process(settings, samples, order), rel=1e-10), text
    samples.close()


@pytest.mark.ranks(2)
def test_scores_count_every_cloud_once_without_point_dropout(comm: Any, shared_tmp_path: Path) -> None:
    samples = clouds(comm, shared_tmp_path)
    settings = CloudSettings(**SMALL | {"keep": 0.2})
    trainer = CloudTrainer(settings, samples, dc.ProcessGrid(comm, n=comm.size))
    torch.manual_seed(settings.seed)
    model = NETWORKS["resnet"](width=2, classes=3).double().eval()
    made = voxel_batch(samples.groups["train"], range(5), VoxelRecipe(16, points=30), 0)
    with torch.no_grad():
        logits = model(SparseTensor(made.coords, made.features.double(), batch_size=5))
    found = trainer.evaluate("train")
    assert (found.samples, found.correct) == (5, int((logits.argmax(1) == made.labels).sum()))
    assert found.loss == pytest.approx(float(F.cross_entropy(logits, made.labels)), rel=1e-10)
    samples.close()


# -- pipelines --------------------------------------------------------------------------------------------------------

PIPELINED = SMALL | {"batch": 4, "steps": 3, "optimizer": "sgd"}


def losses_of_one_process(settings: CloudSettings, samples: CloudSamples, order: list[tuple[int, ...]]) -> list[float]:
    """Losses of plain sparse tensors in a plain loop over the mini-batches of epochs of three steps."""
    torch.manual_seed(settings.seed)
    model = NETWORKS[settings.model](width=settings.width, classes=3).double()
    optimizer, losses = make_optimizer(settings, model.parameters()), []
    recipe = VoxelRecipe(settings.resolution, settings.points, settings.keep, seed=settings.seed)
    for step, batch in enumerate(order):
        set_learning_rate(optimizer, learning_rate(step, len(order), settings.lr))
        optimizer.zero_grad()
        made = voxel_batch(samples.groups["train"], batch, recipe, step // 3)
        x = SparseTensor(made.coords, made.features.double(), batch_size=len(batch))
        loss = F.cross_entropy(model(x), made.labels)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses


def trained(trainer: CloudPipelineTrainer) -> tuple[list[tuple[int, ...]], dict[str, torch.Tensor]]:
    """Without dropout, whose masks are drawn stage by stage."""
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    order = []
    for batch in trainer.batches():
        order.append(batch.samples)
        trainer.step(*batch.tensors)
    trainer.synchronize()
    return order, trainer.model.state_dict()


@pytest.mark.long
@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("more", "schedule", "cut"),
    [
        ({}, "1f1b-so", "8,11"),  # inside of blocks: two sparse tensors cross
        ({"model": "vgg16_bn", "width": 1, "resolution": 32}, "zero-bubble", "4,15"),  # a plain tensor crosses
    ],
    ids=["resnet", "vgg16_bn"],
)
def test_synchronous_pipelines_have_the_bits_of_one_process(
    comm: Any, shared_tmp_path: Path, more: dict[str, Any], schedule: str, cut: str
) -> None:
    samples = clouds(comm, shared_tmp_path)
    settings = CloudSettings(**PIPELINED | {"drop_last": True} | more)
    found = CloudPipelineTrainer(settings, samples, pipelining(3, schedule, "--microbatches", "2", "--ppv", cut))
    alone = CloudSamples(shared_tmp_path / "clouds.h5", MPI.COMM_SELF)
    one = CloudPipelineTrainer(settings, alone, pipelining(1, schedule, "--microbatches", "2"))
    (order, state), (same, expected) = trained(found), trained(one)
    assert order == same
    assert len(found.losses) == 3
    assert found.losses == one.losses
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    assert found.evaluate("test") == one.evaluate("test")
    for each in (found, one):
        each.close()
    samples.close()
    alone.close()


def test_settings_are_as_approved_and_reach_the_network_and_the_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_approved_defaults("pointcloud", CloudSettings(), VoxelRecipe(8))
    seen: list[Any] = []

    class Loader:
        samples, steps = 5, 1

        def __init__(self, samples: Any, group: str, batch: int, **options: Any) -> None:
            seen.append((group, batch, options.pop("placed"), options))

    monkeypatch.setattr(trainer_module, "VoxelLoader", Loader)
    monkeypatch.setattr(trainer_module, "accumulate_batches", lambda parts, count: count)
    samples: Any = SimpleNamespace(comm=MPI.COMM_SELF, class_names=("a", "b", "c"))
    more: dict[str, Any] = {"batch": 6, "accumulate": 2, "seed": 4, "epochs": 1, "resolution": 9, "points": 50}
    settings = CloudSettings("resnet", 2, **more, keep=0.5, varied=True)
    trainer = CloudTrainer(settings, samples, dc.ProcessGrid(MPI.COMM_SELF))
    trainer.batches_of("test")
    dropped, kept = VoxelRecipe(9, 50, 0.5, True, seed=4), VoxelRecipe(9, 50, seed=4)
    prepare = trainer._prepare_input
    assert seen == [
        ("train", 3, prepare, {"recipe": dropped, **settings.loader_options("cpu")}),
        ("test", 6, prepare, {"recipe": kept, **settings.evaluation_options("cpu")}),
    ]
    assert trainer.loader == 2 and trainer.notes == {"task": "pointcloud"}
    torch.manual_seed(4)
    for width in (2, None):
        expected = sparse_resnet(classes=3) if width is None else sparse_resnet(classes=3, width=width)
        found = trainer_module.build_network(replace(settings, width=width), samples)
        assert [p.shape for p in found.parameters()] == [p.shape for p in expected.parameters()]
    torch.manual_seed(4)
    first = next(sparse_resnet(classes=3, width=2).parameters())
    assert torch.equal(next(trainer.model.parameters()), first)
