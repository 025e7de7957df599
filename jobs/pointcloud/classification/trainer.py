"""Training of sparse networks that classify point clouds: the networks, their settings, the trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from distconv.errors import PlanError
from distconv.grid import ProcessGrid
from distconv.jobs.pointcloud.batches import VoxelRecipe
from distconv.jobs.training import settings as common
from distconv.jobs.training import training
from distconv.jobs.training.accumulation import accumulate_batches
from distconv.jobs.training.classifier import Classifier
from distconv.jobs.training.pipelines.options import Pipelining
from distconv.jobs.training.pipelines.training import PipelineTrainer as AnyPipelineTrainer
from distconv.layers.models.sparse import sparse_resnet, sparse_vgg16_bn
from distconv.layers.sparse import SparseTensor, scatter
from distconv.layers.sparse.stages import as_stages, packed

from .samples import CloudSamples, VoxelLoader
from .stage_cuts import balanced_cuts

NETWORKS: dict[str, Callable[..., torch.nn.Module]] = {"resnet": sparse_resnet, "vgg16_bn": sparse_vgg16_bn}
"""Sparse classifiers by name."""


@dataclass(frozen=True)
class CloudSettings(common.TrainingSettings):
    """Settings of a training on point clouds."""

    model: str = "resnet"
    width: int | None = 8
    batch: int = 16
    epochs: int = 4
    optimizer: str = "adam"
    lr: float = 5e-3
    resolution: int = 32
    """Number of voxels along each side."""
    points: int = 1024
    """Number of points of each cloud that an epoch draws."""
    keep: float = 1.0
    """Fraction of the drawn points that is kept in training (point dropout)."""
    varied: bool = False
    """If True, the fraction of each cloud is drawn from 0 to ``keep`` in each epoch. Otherwise it is ``keep``."""


class _Clouds(Classifier):
    """Parts that :class:`CloudTrainer` and :class:`CloudPipelineTrainer` share."""

    settings: CloudSettings
    samples: CloudSamples

    @property
    def notes(self) -> dict[str, Any]:
        """Task."""
        return {"task": "pointcloud"}

    def batches_of(self, group: str) -> VoxelLoader:
        """Return a loader of ``train`` or ``test`` in order, without point dropout."""
        return _loader(
            self.settings, self.samples, group, self._prepare_input, **self.settings.evaluation_options(self.device)
        )

    def _prepare_input(self, x: SparseTensor) -> Any:
        """Return the input as the evaluated network requires it: in a pipeline the full tensor, else its blocks."""
        return x


class CloudTrainer(_Clouds, training.Trainer):
    """Training of a sparse classifier over a grid that splits samples (n) and space (d, h, w).

    Collective: construct on every rank.
    """

    def __init__(self, settings: CloudSettings, samples: CloudSamples, grid: ProcessGrid, device: str = "cpu") -> None:
        super().__init__(settings, build_network(settings, samples), grid, samples.comm, device)
        self.samples = samples
        parts = _training_loader(settings, samples, device, self._prepare_input)
        self.loader = accumulate_batches(parts, settings.accumulate)

    def _prepare_input(self, x: SparseTensor) -> Any:
        return scatter(x, grid=self.grid)


class CloudPipelineTrainer(_Clouds, AnyPipelineTrainer):
    """Training of a sparse classifier as a pipeline. Collective: construct on every rank.

    Raises
    ------
    PlanError
        If ``pipelining`` has plans for its stages: sparse networks do not support plans.
    """

    def __init__(
        self, settings: CloudSettings, samples: CloudSamples, pipelining: Pipelining, device: str = "cpu"
    ) -> None:
        if pipelining.plans is not None:
            raise PlanError(
                "--pipeline-plan: its stages distribute layers, which a sparse network does not support. Use a "
                "plan without distributions."
            )
        model = build_network(settings, samples).to(device, common.dtype_of(settings))
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


def _training_loader(
    settings: CloudSettings, samples: CloudSamples, device: str, placed: Callable[[SparseTensor], Any]
) -> VoxelLoader:
    dropout = {"keep": settings.keep, "varied": settings.varied}
    return _loader(settings, samples, "train", placed, dropout=dropout, **settings.loader_options(device))


def _loader(
    settings: CloudSettings,
    samples: CloudSamples,
    group: str,
    placed: Callable[[SparseTensor], Any],
    *,
    dropout: Mapping[str, Any] | None = None,
    **options: Any,
) -> VoxelLoader:
    recipe = VoxelRecipe(settings.resolution, settings.points, seed=settings.seed, **dropout or {})
    batch = settings.part_size if group == "train" else settings.batch
    return VoxelLoader(samples, group, batch, placed=placed, recipe=recipe, **options)


def build_network(settings: CloudSettings, samples: CloudSamples) -> torch.nn.Module:
    """Return the network with weights that depend on the seed alone.

    Parameters
    ----------
    settings : CloudSettings
        Model, width and seed.
    samples : CloudSamples
        The samples, which determine the number of classes.

    Returns
    -------
    Module
        The network.
    """
    torch.manual_seed(settings.seed)
    factory, classes = NETWORKS[settings.model], len(samples.class_names)
    return factory(classes=classes) if settings.width is None else factory(classes=classes, width=settings.width)
