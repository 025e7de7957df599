"""Reference models, which are ordinary torch modules.

They do not depend on distribution: only ``sparse`` imports distconv.

::

    alexnet         AlexNet for CIFAR: the five convolutions of the single-column network, and one linear layer
    cosmoflow       A CosmoFlow-like regressor: cosmological parameters from a cube of dark matter densities
    initialisation  Initial weights for networks with many layers of ReLU
    lenet           LeNet-5 for MNIST
    mesh            Fully convolutional models for mesh tangling: six blocks of convolution, batch norm and ReLU
    resnet          ResNet-50, fully convolutional
    resnet_cifar    ResNet-20, 56 and 110 for CIFAR
    sparse          Networks for voxelised point clouds, sparse and as their dense equivalents on volumes
    unet            U-Nets for images and volumes of any size
    vgg             VGG-11 and VGG-16 for CIFAR, with and without batch norm

Examples
--------
>>> sorted(MODELS)  # doctest: +NORMALIZE_WHITESPACE
['alexnet', 'cosmoflow', 'lenet5', 'mesh1k', 'mesh2k', 'resnet110', 'resnet20', 'resnet50', 'resnet56', 'unet',
 'unet3d', 'vgg11', 'vgg11_bn', 'vgg16', 'vgg16_bn']
>>> MODELS["lenet5"].sample, MODELS["lenet5"].predicts
((1, 28, 28), 'class')
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from .alexnet import AlexNet, alexnet
from .cosmoflow import CosmoFlow, cosmoflow
from .lenet import LeNet5, lenet5
from .mesh import Mesh, mesh1k, mesh2k
from .resnet import ResNet50, resnet50
from .resnet_cifar import CifarResNet, resnet20, resnet56, resnet110
from .unet import UNet, unet, unet3d
from .vgg import VGG, vgg11, vgg11_bn, vgg16, vgg16_bn


@dataclass(frozen=True)
class Reference:
    """A reference model: its factory, and the task for which it was designed."""

    factory: Callable[..., nn.Module]
    """Creates the model."""
    sample: tuple[int, ...]
    """Shape (C, [D,] H, W) of a sample."""
    predicts: Literal["class", "values", "cells"]
    """The prediction.

    ``class`` stands for logits (N, classes), ``values`` for values (N, classes), and ``cells`` for logits
    (N, classes, [D,] H, W) of the sample's size.
    """

    def __call__(self, **options: int) -> nn.Module:
        """Return a new model.

        Parameters
        ----------
        **options : int
            ``in_channels``, ``classes`` and ``width``, which all models have. ``width`` is the number of channels of
            the first convolution, to which all others are proportional.
        """
        return self.factory(**options)


_MNIST, _CIFAR = (1, 28, 28), (3, 32, 32)

MODELS: dict[str, Reference] = {
    "lenet5": Reference(lenet5, _MNIST, "class"),
    "alexnet": Reference(alexnet, _CIFAR, "class"),
    "vgg11": Reference(vgg11, _CIFAR, "class"),
    "vgg11_bn": Reference(vgg11_bn, _CIFAR, "class"),
    "vgg16": Reference(vgg16, _CIFAR, "class"),
    "vgg16_bn": Reference(vgg16_bn, _CIFAR, "class"),
    "resnet20": Reference(resnet20, _CIFAR, "class"),
    "resnet56": Reference(resnet56, _CIFAR, "class"),
    "resnet110": Reference(resnet110, _CIFAR, "class"),
    "resnet50": Reference(resnet50, (3, 224, 224), "class"),
    "cosmoflow": Reference(cosmoflow, (4, 128, 128, 128), "values"),
    "mesh1k": Reference(mesh1k, (18, 1024, 1024), "cells"),
    "mesh2k": Reference(mesh2k, (18, 2048, 2048), "cells"),
    "unet": Reference(unet, (18, 512, 512), "cells"),
    "unet3d": Reference(unet3d, (1, 128, 128, 128), "cells"),
}
"""The reference models by name."""

MESH_MODELS = ("mesh1k", "mesh2k", "unet")
"""Models for mesh tangling: by default they take 18 channels and return one logit for each cell."""

__all__ = [
    "MESH_MODELS",
    "MODELS",
    "VGG",
    "AlexNet",
    "CifarResNet",
    "CosmoFlow",
    "LeNet5",
    "Mesh",
    "Reference",
    "ResNet50",
    "UNet",
    "alexnet",
    "cosmoflow",
    "lenet5",
    "mesh1k",
    "mesh2k",
    "resnet20",
    "resnet50",
    "resnet56",
    "resnet110",
    "unet",
    "unet3d",
    "vgg11",
    "vgg11_bn",
    "vgg16",
    "vgg16_bn",
]
