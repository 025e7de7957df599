"""Training on point clouds: the same steps on every grid, resumed bit for bit; scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from tests.jobs.training.resumed_runs import assert_resumes_bit_for_bit

GRIDS = {1: ["n=1"], 2: ["n=2", "d=2"], 3: ["w=3"], 4: ["n=2,h=2"]}
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
        assert losses == pytest.approx(losses_of_one_process(settings, samples, order, 1, steps=3), rel=1e-10), text
    samples.close()


@pytest.mark.long
@pytest.mark.ranks(1, 2)
def test_a_resumed_run_takes_the_same_steps_bit_for_bit(comm: Any, shared_tmp_path: Path) -> None:
    """With dropout, in the middle of the second epoch."""
    samples = clouds(comm, shared_tmp_path)
    settings = CloudSettings(**SMALL | {"model": "vgg16_bn", "width": 1, "epochs": 2, "resolution": 32})
    grid = dc.ProcessGrid(comm, d=comm.size)
    make = lambda: CloudTrainer(settings, samples, grid)  # noqa: E731
    assert_resumes_bit_for_bit(make, shared_tmp_path, 4, lambda first: first.evaluate("test"))
    samples.close()


@pytest.mark.ranks(1, 2)
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


def test_a_width_that_is_not_given_is_the_networks_own(tmp_path: Path) -> None:
    samples = clouds(MPI.COMM_SELF, tmp_path)
    trainer = CloudTrainer(CloudSettings(width=None), samples, dc.ProcessGrid(MPI.COMM_SELF))
    expected = sum(parameter.numel() for parameter in NETWORKS["resnet"](classes=3).parameters())
    assert trainer.parameter_count == expected
    samples.close()


# -- pipelines --------------------------------------------------------------------------------------------------------

PIPELINED = SMALL | {"batch": 4, "steps": 3, "optimizer": "sgd"}


def losses_of_one_process(
    settings: CloudSettings, samples: CloudSamples, order: list[tuple[int, ...]], parts: int, *, steps: int
) -> list[float]:
    """Losses of plain sparse tensors in a plain loop over ``parts`` micro-batches of each mini-batch.

    Dropout draws from where the trainer's does. An epoch has ``steps``.
    """
    torch.manual_seed(settings.seed)
    model = NETWORKS[settings.model](width=settings.width, classes=3).double()
    optimizer, losses = make_optimizer(settings, model.parameters()), []
    recipe = VoxelRecipe(settings.resolution, settings.points, settings.keep, seed=settings.seed)
    for step, batch in enumerate(order):
        set_learning_rate(optimizer, learning_rate(step, len(order), settings.lr))
        optimizer.zero_grad()
        losses.append(0.0)
        for indices in np.array_split(batch, parts):
            made = voxel_batch(samples.groups["train"], indices.tolist(), recipe, step // steps)
            x = SparseTensor(made.coords, made.features.double(), batch_size=len(indices))
            loss = F.cross_entropy(model(x), made.labels) * len(indices) / len(batch)
            loss.backward()
            losses[-1] += float(loss.detach())
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
@pytest.mark.ranks(at_least=2, at_most=4)
@pytest.mark.parametrize(
    ("model", "schedule", "more"),
    [
        ("resnet", "gpipe", []),
        ("resnet", "1f1b-so", ["--ppv", "8,11,15"]),  # inside of blocks: two sparse tensors cross
        ("vgg16_bn", "zero-bubble", []),
        ("vgg16_bn", "1f1b-sno", ["--ppv", "4,13,15"]),  # a plain tensor crosses
    ],
)
def test_synchronous_pipelines_have_the_bits_of_one_process(
    comm: Any, shared_tmp_path: Path, model: str, schedule: str, more: list[str]
) -> None:
    samples = clouds(comm, shared_tmp_path)
    width, resolution = (2, 16) if model == "resnet" else (1, 32)
    settings = CloudSettings(
        **PIPELINED | {"model": model, "width": width, "resolution": resolution, "drop_last": True}
    )
    cut = [more[0], ",".join(more[1].split(",")[: comm.size - 1])] if more else []
    found = CloudPipelineTrainer(settings, samples, pipelining(comm.size, schedule, "--microbatches", "2", *cut))
    alone = CloudSamples(shared_tmp_path / "clouds.h5", MPI.COMM_SELF)
    one = CloudPipelineTrainer(settings, alone, pipelining(1, schedule, "--microbatches", "2"))
    (order, state), (same, expected) = trained(found), trained(one)
    assert order == same
    assert len(found.losses) == 3
    assert found.losses == one.losses
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    if model == "resnet":
        losses = losses_of_one_process(settings, samples, order, 2, steps=2)
        assert [loss for _, loss in found.losses] == pytest.approx(losses, rel=1e-12)
    assert found.evaluate("test") == one.evaluate("test")
    for each in (found, one):
        each.close()
    samples.close()
    alone.close()


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("schedule", "more"),
    [("pipedream", []), ("stale", ["--switch-after", "3"])],
)
def test_a_resumed_pipeline_takes_the_same_steps_bit_for_bit(
    comm: Any, shared_tmp_path: Path, schedule: str, more: list[str]
) -> None:
    samples = clouds(comm, shared_tmp_path)
    settings = CloudSettings(**SMALL | {"steps": 6, "optimizer": "sgd"})
    of = pipelining(comm.size, schedule, *more)
    first = CloudPipelineTrainer(settings, samples, of)
    for batch in first.batches():
        first.step(*batch.tensors)
        if first.step_count == 4:
            first.save(str(shared_tmp_path / "saved"))
    first.synchronize()
    second = CloudPipelineTrainer(settings, samples, of)
    assert second.resume(str(shared_tmp_path / "saved"))
    _, state = trained(second)
    assert second.losses == first.losses[4:]
    for name, expected in first.model.state_dict().items():
        assert torch.equal(state[name], expected), name
    first.close()
    second.close()
    samples.close()


@pytest.mark.ranks(2)
def test_a_grid_goes_on_from_the_checkpoint_of_a_pipeline(comm: Any, shared_tmp_path: Path) -> None:
    samples = clouds(comm, shared_tmp_path)
    settings = CloudSettings(**SMALL | {"steps": 5})
    first = CloudPipelineTrainer(settings, samples, pipelining(comm.size, "gpipe", "--microbatches", "1"))
    for batch in first.batches():
        first.step(*batch.tensors)
        if first.step_count == 3:
            first.save(str(shared_tmp_path / "saved"))
    grid = CloudTrainer(settings, samples, dc.ProcessGrid(comm, d=comm.size))
    assert grid.resume(str(shared_tmp_path / "saved"))
    losses = [grid.step(*batch.tensors) for batch in grid.batches()]
    assert losses == pytest.approx([loss for _, loss in first.losses[3:]], rel=1e-10)
    first.close()
    samples.close()


def test_points_are_dropped_in_training_and_not_in_an_evaluation(tmp_path: Path) -> None:
    write_ours(tmp_path / "clouds.h5")
    samples = CloudSamples(tmp_path / "clouds.h5", MPI.COMM_SELF)
    trainer = CloudTrainer(CloudSettings(**SMALL | {"keep": 0.5}), samples, dc.ProcessGrid(MPI.COMM_SELF))
    (batch, *_) = trainer.loader.epoch(0)
    # 15 of 30 points fill at most 15 voxels of each of two clouds, all of them nearly twice as many.
    assert len(batch.tensors[0].coords) <= 2 * 15
    seen: list[int] = []
    trainer.model.register_forward_pre_hook(lambda module, given: seen.append(len(given[0].coords)))
    trainer.evaluate("test")
    assert seen[0] > 2 * 20
    samples.close()


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
