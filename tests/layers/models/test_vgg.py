"""The VGGs for CIFAR, with and without batch norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from distconv.layers.models import MODELS


def test_gradients_reach_the_first_layer_of_vgg16_without_batch_norm() -> None:
    torch.manual_seed(1)
    model = MODELS["vgg16"](width=8)
    F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.dim() > 2]
    assert norms[0] > 0.1 * norms[-1]
