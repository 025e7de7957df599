"""Networks of other packages, unmodified, with few classes and on small inputs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from tests.distconv.layouts import normal

Axes = str | Sequence[str | None] | None
"""The grid axis that splits each dimension, as ``dc.scatter`` takes it."""


@dataclass(frozen=True)
class Network:
    """How to build one, from which package, its inputs, and the precision that it computes in."""

    package: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Shape of the first input."""
    dtype: torch.dtype = torch.float64
    dims: Axes = None
    """Grid axes of the first input."""
    others: tuple[tuple[tuple[int, ...], Axes], ...] = ()
    """Shapes and grid axes of further inputs, such as the time of each sample."""

    def inputs(self, grid: dc.ProcessGrid | None = None) -> list[torch.Tensor]:
        """The inputs, of which the first requires a gradient; split over ``grid``, or for one process."""
        every = [(self.shape, self.dims), *self.others]
        full = [normal(*shape, seed=8 + i).to(self.dtype) for i, (shape, _) in enumerate(every)]
        if grid is not None:
            full = [dc.scatter(tensor, grid, dims=dims) for tensor, (_, dims) in zip(full, every, strict=True)]
        full[0].requires_grad_()
        return full


_declared: list[torch.library.Library] = []


def torchvision() -> Any:
    """The package; beside a torch for CPUs the compiled operators of its wheel do not load, and it asks for two.

    No network here calls them.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
        return importlib.import_module("torchvision")


def hide_kernels() -> None:
    """In a checkout our folder kernels is found where a package looks for one of this name, now or later."""
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]


def _vision(name: str, *shape: int, **options: Any) -> Network:
    def build() -> nn.Module:
        model: nn.Module = torchvision().models.get_model(name, weights=None, num_classes=5, **options)
        return model

    return Network("torchvision", build, shape)


def _shallow(build: Callable[[Any], nn.Module], *shape: int) -> Network:
    """One of torchvision's classes with fewer layers than its networks have; ``build`` gets the package's models."""
    return Network("torchvision", lambda: build(torchvision().models), shape)


def _monai(name: str, *shape: int, others: Any = (), **options: Any) -> Network:
    def build() -> nn.Module:
        network = getattr(importlib.import_module("monai.networks.nets"), name)
        outputs = {} if "num_classes" in options else {"out_channels": 3}
        model: nn.Module = network(spatial_dims=len(shape) - 2, in_channels=shape[1], **outputs, **options)
        return model

    return Network("monai", build, shape, others=others)


def _segmentation(name: str, encoder: str, *shape: int, **options: Any) -> Network:
    def build() -> nn.Module:
        torchvision()
        package = importlib.import_module("segmentation_models_pytorch")
        network = getattr(package, name)
        model: nn.Module = network(encoder_name=encoder, encoder_weights=None, classes=3, **options)
        return model

    return Network("segmentation_models_pytorch", build, shape)


def _resnext(models: Any) -> nn.Module:
    model: nn.Module = models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], 5, groups=2, width_per_group=8)
    return model


def _convnext(models: Any) -> nn.Module:
    block = models.convnext.CNBlockConfig
    stages = [block(8, 16, 1), block(16, 24, 1), block(24, None, 1)]
    model: nn.Module = models.ConvNeXt(stages, stochastic_depth_prob=0.2, layer_scale=0.5, num_classes=5)
    return model


NETWORKS = {
    "ResNeXt": _shallow(_resnext, 3, 3, 35, 41),
    "DenseNet": _shallow(lambda m: m.DenseNet(6, (2, 2, 2), 8, num_classes=5, drop_rate=0.1), 3, 3, 35, 41),
    "MobileNet v3": _vision("mobilenet_v3_small", 3, 3, 67, 75),  # depthwise, squeeze and excite, hard swish
    "EfficientNet": _vision("efficientnet_b0", 3, 3, 67, 75),  # stochastic depth
    "ShuffleNet v2": _vision("shufflenet_v2_x0_5", 3, 3, 67, 75),  # channel shuffle
    "SqueezeNet": _vision("squeezenet1_1", 3, 3, 35, 41),  # ceil_mode, dropout
    "ConvNeXt": _shallow(_convnext, 3, 3, 35, 41),  # layer norm over permuted channels
    "LR-ASPP": _vision("lraspp_mobilenet_v3_large", 2, 3, 35, 41, weights_backbone=None),  # dilated, interpolated
    "MONAI U-Net": _monai(
        "UNet", 2, 1, 12, 16, 20, channels=(4, 8, 16), strides=(2, 2), num_res_units=2, dropout=0.1
    ),  # transposed convolution, instance norm, PReLU
    "MONAI DynUNet": _monai(
        "DynUNet", 2, 2, 12, 16, 20, kernel_size=(3, 3, 3), strides=(1, 2, 2), upsample_kernel_size=(2, 2),
        filters=(4, 8, 16), res_block=True,
    ),
    "MONAI SegResNet": _monai("SegResNet", 2, 1, 16, 24, 16, init_filters=8),  # group norm, trilinear
    "SMP FPN": _segmentation(
        "FPN", "tu-mobilenetv3_small_050", 2, 3, 64, 96,
        decoder_pyramid_channels=16, decoder_segmentation_channels=32,
    ),
    "SMP DeepLab v3+": _segmentation(
        "DeepLabV3Plus", "tu-mobilenetv3_small_050", 2, 3, 64, 96, decoder_channels=8
    ),  # atrous spatial pyramid, separable convolutions
}  # fmt: skip
"""Small enough for every run of the tests."""

LARGE = {
    "ResNet-50": _vision("resnet50", 3, 3, 67, 53),
    "DenseNet-121": _vision("densenet121", 3, 3, 67, 75),
    "GoogLeNet": _vision("googlenet", 2, 3, 67, 71, aux_logits=True, init_weights=False),  # auxiliary outputs
    "ConvNeXt-T": _vision("convnext_tiny", 3, 3, 35, 41),
    "DeepLab v3": _vision("deeplabv3_mobilenet_v3_large", 2, 3, 35, 41, weights_backbone=None, aux_loss=True),
    "R3D-18": _vision("r3d_18", 2, 3, 5, 23, 19),
    "SMP U-Net": _segmentation("Unet", "resnet18", 2, 3, 64, 96),
}


def need(package: str) -> None:
    """Skip the test if ``package`` is not installed; a network written from its paper needs none."""
    if " " not in package and find_spec(package) is None:
        pytest.skip(f"needs the package {package} (extra third-party)")


def built(network: Network) -> nn.Module:
    """The network in its precision, identical on all ranks. No scale is zero, so that errors of later layers show."""
    need(network.package)
    torch.manual_seed(5)
    model = network.build()
    model.double() if network.dtype is torch.float64 else model.float()
    random = torch.Generator().manual_seed(6)
    for parameter in model.parameters():
        if parameter.numel() and parameter.abs().max() < 1e-3 and not parameter.is_complex():
            parameter.data += 0.1 + 0.3 * torch.rand(parameter.shape, generator=random, dtype=parameter.dtype)
    return model


def tensors(outputs: Any) -> list[torch.Tensor]:
    """All tensors in what a network returned: one, a dict, or tuples."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    assert isinstance(outputs, (Mapping, Sequence))
    return [tensor for value in values if value is not None for tensor in tensors(value)]
