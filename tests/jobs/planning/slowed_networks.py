"""A network that takes longer on some ranks: what stands for kinds of devices on a machine whose cores are alike.

``SLOW_DOWN=3`` in a rank's environment: each convolution does its work three times, forward and backward, and passes on
the numbers of one. So the rank's processor time is that of a slower device, whatever else the machine does.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from distconv.layers.models import vgg11_bn


class Repeated(nn.Conv2d):
    """A convolution that works ``SLOW_DOWN`` times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.device.type != "meta":
            for _ in range(int(os.environ.get("SLOW_DOWN", "1")) - 1):
                with torch.enable_grad():
                    weight, again = self.weight.detach().requires_grad_(), x.detach().requires_grad_()
                    y = F.conv2d(again, weight, self.bias, self.stride, self.padding)
                torch.autograd.grad(y, [again, weight], torch.ones_like(y))
        return super().forward(x)


def vgg(in_channels: int = 3, classes: int = 10, width: int = 16) -> nn.Module:
    """VGG-11 with batch norm, of such convolutions."""
    model: Any = vgg11_bn(width, in_channels, classes)
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = Repeated
    return model  # type: ignore[no-any-return]
