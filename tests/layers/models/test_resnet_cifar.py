"""The ResNets for CIFAR as published."""

from __future__ import annotations

import torch

from distconv.layers import models


def test_the_shortcut_of_a_cifar_resnet_takes_every_second_row_and_column_and_adds_zeros() -> None:
    block = models.resnet20(width=2).layer2[0]
    x = torch.randn(2, 2, 7, 8)
    expected = torch.cat([x[:, :, ::2, ::2], torch.zeros(2, 2, 4, 4)], 1)
    assert torch.equal(block.shortcut(x), expected)
