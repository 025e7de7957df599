"""Options that name a model and its samples, and a training step of it on random numbers."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from mpi4py import MPI

from distconv.distribution import Distribution, default_axes
from distconv.jobs.mesh.recipe import CHANNELS
from distconv.jobs.planning.measured_steps import random_tensor
from distconv.jobs.planning.options import sample_shape
from distconv.jobs.planning.package_memory import build_and_measure
from distconv.jobs.training.model_factory import build_model
from distconv.jobs.training.options import grid_shape, positive_int
from distconv.layers.models import MESH_MODELS, MODELS
from distconv.tensor import DistTensor

CLASSIFIED = ("vgg16", "vgg16_bn")
"""Models of images with 3 channels and one label each."""

CPU = torch.device("cpu")


def add_arguments(
    parser: argparse.ArgumentParser, model: str, size: int, batch: int, *, user_models: bool = False
) -> None:
    """Add ``--model``, ``--width``, ``--size``, ``--batch`` and ``--grid``.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    model : str
        Default of ``--model``.
    size : int
        Default of ``--size``.
    batch : int
        Default of ``--batch``.
    user_models : bool
        True also accepts a user's model, as package.module:factory, with ``--input`` and ``--classes``.
    """
    if user_models:
        parser.add_argument(
            "--model",
            default=model,
            help=f"network: {', '.join(MODELS)}, or your own as package.module:factory (default: %(default)s)",
        )
        parser.add_argument(
            "--input", type=sample_shape, metavar="C,H,W", help="shape of one sample, channels first, instead of --size"
        )
        parser.add_argument(
            "--classes", type=positive_int, help="classes or output channels of the model (default: the model's own)"
        )
    else:
        parser.add_argument(
            "--model", choices=(*MESH_MODELS, *CLASSIFIED), default=model, help="network (default: %(default)s)"
        )
    parser.add_argument("--width", type=positive_int, help="channels of the model (default: the model's own)")
    parser.add_argument(
        "--size", type=positive_int, default=size, help="height and width of the samples (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive_int, default=batch, help="samples per step (default: %(default)s)")
    parser.add_argument("--grid", type=grid_shape, metavar="h=4", help="process grid (default: h over all ranks)")


def make_model(options: argparse.Namespace) -> torch.nn.Module:
    """Return the model, with the same weights on all ranks."""
    shape, classes = batch_shape(options), getattr(options, "classes", None)
    channels, width = shape[1], options.width
    return build_and_measure(
        options.model,
        lambda: build_model(options.model, MPI.COMM_SELF, seed=0, in_channels=channels, classes=classes, width=width),
    )


def batch_shape(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the shape of a mini-batch."""
    if getattr(options, "input", None):
        return options.batch, *options.input
    return options.batch, 3 if options.model in CLASSIFIED else len(CHANNELS), options.size, options.size


def random_label_loss(options: argparse.Namespace, y: DistTensor) -> torch.Tensor:
    """Return the loss of the model's output with random labels.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command.
    y : DistTensor
        Output of the model.

    Returns
    -------
    torch.Tensor
    """
    if y.shape[1] > 1:  # a class for each sample, or for each of its positions
        shape = (y.shape[0], *y.shape[2:])
        axes = tuple(axis for dim, axis in enumerate(default_axes(None, y.dim())) if dim != 1)
        return F.cross_entropy(y, random_tensor(Distribution(y.grid, axes), shape, CPU).long().clamp(0, 1))
    if getattr(options, "input", None):
        return F.binary_cross_entropy_with_logits(y, torch.zeros_like(y))
    shape = (options.batch, options.size, options.size)
    label = random_tensor(Distribution(y.grid, default_axes("nhw", 3)), shape, CPU)
    return F.binary_cross_entropy_with_logits(y.squeeze(1), (label > 1.5).float())
