"""Training of a sparse network to tell the classes of clouds: the networks, their settings, their accuracy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.data.loader import Batch
from distconv.errors import PlanError
from distconv.grid import ProcessGrid
from distconv.jobs import progress
from distconv.jobs.pointcloud.batches import Recipe
from distconv.jobs.training import training
from distconv.jobs.training.pipeline_options import Pipelining
from distconv.jobs.training.pipeline_training import PipelineTrainer as AnyPipelineTrainer
from distconv.jobs.training.score import Score, score
from distconv.layers.models.sparse import sparse_resnet, sparse_vgg16_bn
from distconv.layers.sparse import SparseTensor, scatter
from distconv.layers.sparse.stages import as_stages, packed
from distconv.placement import gather

from .samples import CloudSamples, VoxelLoader
from .stage_cuts import balanced_cuts

NETWORKS: dict[str, Callable[..., torch.nn.Module]] = {"resnet": sparse_resnet, "vgg16_bn": sparse_vgg16_bn}
"""Sparse classifiers by name."""


@dataclass(frozen=True)
class Settings(training.Settings):
    """What the numbers of a run on point clouds depend on."""

    model: str = "resnet"
    width: int | None = 8
    batch: int = 16
    epochs: int = 4
    optimizer: str = "adam"
    lr: float = 5e-3
    resolution: int = 32
    """Voxels along each side."""
    points: int = 1024
    """Points that each epoch draws of a cloud."""
    keep: float = 1.0
    """The share of them that is kept in training: point dropout."""


class Classifier(training.Training):
    """A sparse classifier in training on clouds, however the ranks share the work."""

    settings: Settings
    samples: CloudSamples
    loader: VoxelLoader

    @abstractmethod
    def predictions(self, group: str) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Batches of ``train`` or ``test`` in order, with all their logits (N, classes) on every rank. Collective."""

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of logits (N, classes)."""
        return F.cross_entropy(outputs, labels)

    def evaluate(self, group: str) -> Score:
        """Loss and accuracy on the clouds of ``train`` or ``test``, without point dropout. Collective."""
        clouds = len(self.samples.groups[group].labels)
        with progress.bar(rank=self.comm.rank, total=clouds, unit="cloud", desc=f"evaluating {group}") as bar:

            def predicted() -> Iterator[tuple[Sequence[int], torch.Tensor, torch.Tensor]]:
                for batch, logits in self.predictions(group):
                    yield batch.samples, batch.tensors[1].cpu(), logits
                    bar.update(len(batch.samples))

            return score(self.samples.name, group, predicted())


class Trainer(Classifier, training.Trainer):
    """A sparse classifier in training over a grid that splits samples (n) and space (d, h, w)."""

    def __init__(self, settings: Settings, samples: CloudSamples, grid: ProcessGrid, device: str = "cpu") -> None:
        super().__init__(settings, network(settings, samples), grid, samples.comm, device)
        self.samples, self._scattered = samples, partial(scatter, grid=grid)
        self.loader = _training_loader(settings, samples, device, self._scattered)

    @torch.no_grad()
    def predictions(self, group: str) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Batches of ``train`` or ``test`` in order, with all their logits (N, classes) on every rank. Collective."""
        self.model.eval()
        for batch in _loader(self.settings, self.samples, group, self.device, placed=self._scattered).epoch(0):
            yield batch, gather(self.model(batch.tensors[0])).cpu()


class PipelineTrainer(Classifier, AnyPipelineTrainer):
    """A sparse classifier in training as a pipeline.

    Raises
    ------
    PlanError
        If the stages are to have plans.
    """

    def __init__(self, settings: Settings, samples: CloudSamples, pipelining: Pipelining, device: str = "cpu") -> None:
        if pipelining.plans is not None:
            raise PlanError("--pipeline-plan: its stages have plans, and those of a sparse network take none")
        model = network(settings, samples).to(device, training.dtype_of(settings))
        loader = _training_loader(settings, samples, device, packed)
        super().__init__(
            settings,
            model,
            lambda micro_batch, replicas: balanced_cuts(model, loader.first(micro_batch), replicas),
            pipelining,
            samples.comm,
            device=device,
            staged=as_stages,
        )
        self.samples, self.loader = samples, loader

    def predictions(self, group: str) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Batches of ``train`` or ``test`` in order, with all their logits (N, classes) on every rank. Collective."""
        loader = _loader(self.settings, self.samples, group, self.device, placed=lambda x: x)
        return self.outputs(loader.epoch(0), lambda batch: self.model(batch.tensors[0]))


def _training_loader(
    settings: Settings, samples: CloudSamples, device: str, placed: Callable[[SparseTensor], Any]
) -> VoxelLoader:
    more = {"keep": settings.keep, "shuffle": True, "drop_last": settings.drop_last}
    return _loader(settings, samples, "train", device, placed=placed, **more)


def _loader(
    settings: Settings, samples: CloudSamples, group: str, device: str, *, keep: float = 1.0, **more: Any
) -> VoxelLoader:
    recipe = Recipe(settings.resolution, settings.points, keep, seed=settings.seed)
    dtype = training.dtype_of(settings)
    return VoxelLoader(samples, group, settings.batch, recipe=recipe, dtype=dtype, device=device, **more)


def network(settings: Settings, samples: CloudSamples) -> torch.nn.Module:
    """The network with weights that follow from the seed alone."""
    torch.manual_seed(settings.seed)
    factory, classes = NETWORKS[settings.model], len(samples.class_names)
    return factory(classes=classes) if settings.width is None else factory(classes=classes, width=settings.width)
