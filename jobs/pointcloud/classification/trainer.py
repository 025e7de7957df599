"""Training of a sparse network to tell the classes of clouds: the networks, their settings, their accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from distconv.data.loader import Batch
from distconv.grid import ProcessGrid
from distconv.jobs.pointcloud.batches import Recipe
from distconv.jobs.training import training
from distconv.jobs.training.score import Score, score
from distconv.layers.models.sparse import sparse_resnet, sparse_vgg16_bn
from distconv.tensor import gather

from .samples import CloudSamples, VoxelLoader

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


class Trainer(training.Trainer):
    """A sparse classifier in training over a grid that splits samples (n) and space (d, h, w)."""

    loader: VoxelLoader

    def __init__(self, settings: Settings, samples: CloudSamples, grid: ProcessGrid, device: str = "cpu") -> None:
        super().__init__(settings, network(settings, len(samples.class_names)), grid, samples.comm, device)
        self.samples, self._recipe = samples, partial(Recipe, settings.resolution, settings.points, seed=settings.seed)
        self.loader = self._loader("train", keep=settings.keep, shuffle=True, drop_last=settings.drop_last)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of logits (N, classes)."""
        return F.cross_entropy(outputs, labels)

    @torch.no_grad()
    def predictions(self, group: str) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Batches of ``train`` or ``test`` in order, with all their logits (N, classes) on every rank. Collective."""
        self.model.eval()
        for batch in self._loader(group).epoch(0):
            yield batch, gather(self.model(batch.tensors[0])).cpu()

    def evaluate(self, group: str) -> Score:
        """Loss and accuracy on the clouds of ``train`` or ``test``, without point dropout. Collective."""
        return score(
            self.samples.name,
            group,
            ((batch.samples, batch.tensors[1].cpu(), logits) for batch, logits in self.predictions(group)),
        )

    def _loader(self, group: str, *, keep: float = 1.0, shuffle: bool = False, drop_last: bool = False) -> VoxelLoader:
        return VoxelLoader(
            self.samples,
            group,
            self.grid,
            self.settings.batch,
            recipe=self._recipe(keep),
            dtype=self.dtype,
            device=self.device,
            shuffle=shuffle,
            drop_last=drop_last,
        )


def network(settings: Settings, classes: int) -> torch.nn.Module:
    """The network with weights that follow from the seed alone."""
    torch.manual_seed(settings.seed)
    factory = NETWORKS[settings.model]
    return factory(classes=classes) if settings.width is None else factory(classes=classes, width=settings.width)
