"""Options that name a model and its samples, and a training step of it on random numbers."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from distconv.distribution import Distribution, default_axes
from distconv.jobs.bench.comparison import random
from distconv.jobs.mesh.recipe import CHANNELS
from distconv.jobs.training.options import grid_extents, positive
from distconv.layers.models import MESH_MODELS, MODELS
from distconv.tensor import DistTensor

CLASSIFIED = ("vgg16", "vgg16_bn")
"""Models of images with 3 channels and one label each."""

CPU = torch.device("cpu")


def add_arguments(parser: argparse.ArgumentParser, model: str, size: int, batch: int) -> None:
    """``--model``, ``--width``, ``--size``, ``--batch`` and ``--grid``, with these defaults."""
    parser.add_argument("--model", choices=(*MESH_MODELS, *CLASSIFIED), default=model, help="default: %(default)s")
    parser.add_argument("--width", type=positive, help="channels of the model (default: the model's own)")
    parser.add_argument(
        "--size", type=positive, default=size, help="height and width of the samples (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive, default=batch, help="samples (default: %(default)s)")
    parser.add_argument("--grid", type=grid_extents, metavar="h=4", help="default: all ranks along h")


def model_of(options: argparse.Namespace) -> torch.nn.Module:
    """The model, with the same weights on all ranks."""
    torch.manual_seed(0)
    model: torch.nn.Module = MODELS[options.model](**({} if options.width is None else {"width": options.width}))
    return model


def shape_of(options: argparse.Namespace) -> tuple[int, int, int, int]:
    """Of a mini-batch."""
    return options.batch, 3 if options.model in CLASSIFIED else len(CHANNELS), options.size, options.size


def loss_of(options: argparse.Namespace, y: DistTensor) -> torch.Tensor:
    """That of the model's output with random labels."""
    if options.model in CLASSIFIED:
        return F.cross_entropy(y, random(Distribution(y.grid, ("n",)), y.shape[:1], CPU).abs().long())
    shape = (options.batch, options.size, options.size)
    label = random(Distribution(y.grid, default_axes("nhw", 3)), shape, CPU)
    return F.binary_cross_entropy_with_logits(y.squeeze(1), (label > 1.5).float())
