"""The VGGs for CIFAR, with and without batch norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.layers.models import MODELS


@pytest.mark.parametrize("name", ["vgg11", "vgg16"])
def test_batch_norm_adds_two_numbers_per_filter(name: str) -> None:
    with torch.device("meta"):
        plain, normalised = MODELS[name](), MODELS[f"{name}_bn"]()
    filters = sum(m.out_channels for m in plain.modules() if isinstance(m, nn.Conv2d))
    more = sum(p.numel() for p in normalised.parameters()) - sum(p.numel() for p in plain.parameters())
    assert more == 2 * filters


def test_gradients_reach_the_first_layer_of_vgg16_without_batch_norm() -> None:
    torch.manual_seed(1)
    model = MODELS["vgg16"](width=8)
    F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.dim() > 2]
    assert norms[0] > 0.1 * norms[-1]
