"""Initial weights of the reference models have the variance of He et al., ICCV 2015, eq. 15."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from distconv.layers import models
from distconv.layers.models import sparse

NETWORKS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "alexnet": (lambda: models.alexnet(width=16), 0.0),
    "cosmoflow": (lambda: models.CosmoFlow(width=8), 0.3),
    "resnet20": (lambda: models.resnet20(width=16), 0.0),
    "resnet50": (lambda: models.resnet50(width=16), 0.0),
    "vgg11": (lambda: models.vgg11(width=16), 0.0),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_convolutions_preserve_the_variance_of_gradients_and_have_no_bias(name: str) -> None:
    build, slope = NETWORKS[name]
    torch.manual_seed(1)
    layers = [module for module in build().modules() if isinstance(module, nn.modules.conv._ConvNd)]
    assert len(layers) > 4
    for layer in layers:
        fan_out = layer.out_channels * math.prod(layer.kernel_size)
        expected = math.sqrt(2 / (1 + slope**2) / fan_out)
        count = layer.weight.numel()
        # Five standard deviations of the estimate, sigma / sqrt(2 count).
        assert abs(layer.weight.std() / expected - 1) < 5 / math.sqrt(2 * count)
        assert layer.bias is None or not layer.bias.any()


@pytest.mark.parametrize("build", [sparse.sparse_resnet, sparse.sparse_unet, sparse.sparse_vgg16_bn, sparse.dense_unet])
def test_sparse_convolutions_and_their_dense_equivalents_have_the_same_variance(
    build: Callable[..., nn.Module],
) -> None:
    torch.manual_seed(1)
    weights = [weight for weight in build(width=8).parameters() if weight.ndim == 5]
    assert len(weights) > 4
    for weight in weights:
        filters, _, *kernel = weight.shape
        expected = math.sqrt(2 / (filters * math.prod(kernel)))
        assert abs(weight.std() / expected - 1) < 5 / math.sqrt(2 * weight.numel())
