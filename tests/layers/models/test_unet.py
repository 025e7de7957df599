"""U-Nets of any depth and dimension."""

from __future__ import annotations

import pytest
import torch

from distconv.layers.models import UNet


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_unet_doubles_its_width_with_each_level(depth: int, dimensions: int) -> None:
    model = UNet(in_channels=5, classes=2, width=3, depth=depth, dimensions=dimensions)
    assert [block[0].out_channels for block in model.down] == [3 << level for level in range(depth + 1)]
    assert [block[0].in_channels for block in model.up] == [3 * (3 << level) for level in reversed(range(depth))]
    size = (19, 37, 29)[-dimensions:]
    assert model(torch.zeros(1, 5, *size)).shape == (1, 2, *size)
