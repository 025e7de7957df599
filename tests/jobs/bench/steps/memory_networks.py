"""Networks that ``bench memory`` is tried with (docs/evidence/memory.md); those of MONAI need the extra third-party."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Double(nn.Sequential):
    def __init__(self, a, b, p):
        super().__init__(
            nn.Conv2d(a, b, 3, padding=1),
            nn.GroupNorm(8, b),
            nn.GELU(),
            nn.Dropout(p),
            nn.Conv2d(b, b, 3, padding=1),
            nn.GroupNorm(8, b),
            nn.GELU(),
        )


class OwnUNet(nn.Module):
    def __init__(self, in_channels, classes, width, depth=3, p=0.1):
        super().__init__()
        ws = [width << k for k in range(depth + 1)]
        self.down = nn.ModuleList(Double(a, b, p) for a, b in zip([in_channels, *ws[:-1]], ws, strict=True))
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(ws[-2::-1], ws[:0:-1], strict=True)
        )
        self.up = nn.ModuleList(Double(2 * a, a, p) for a in ws[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skips = []
        for k, d in enumerate(self.down):
            x = d(F.max_pool2d(x, 2) if k else x)
            skips.append(x)
        skips.pop()
        for u, d in zip(self.ups, self.up, strict=True):
            x = d(torch.cat([skips.pop(), u(x)], 1))
        return self.head(x)


def own(in_channels=4, classes=3, width=32):
    return OwnUNet(in_channels, classes, width)


class Transformer(nn.Module):
    def __init__(self, in_channels, classes, width):
        super().__init__()
        self.patch = nn.Conv2d(in_channels, width, 8, stride=8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(6)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x).mean(1))


def transformer(in_channels=3, classes=10, width=256):
    return Transformer(in_channels, classes, width)


def vnet(in_channels=1, classes=2):
    from monai.networks.nets import VNet

    return VNet(spatial_dims=3, in_channels=in_channels, out_channels=classes)


def monai_unet(in_channels=4, classes=3, width=32):
    from monai.networks.nets import UNet

    return UNet(
        spatial_dims=2,
        in_channels=in_channels,
        out_channels=classes,
        channels=[width << k for k in range(5)],
        strides=[2] * 4,
        num_res_units=2,
    )


def monai_unet3d(in_channels=1, classes=2, width=16):
    from monai.networks.nets import UNet

    return UNet(
        spatial_dims=3,
        in_channels=in_channels,
        out_channels=classes,
        channels=[width << k for k in range(4)],
        strides=[2] * 3,
        num_res_units=2,
    )


class Double64(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net.double()

    def forward(self, x):
        return self.net(x.double())


def own64(in_channels=4, classes=3, width=16):
    return Double64(own(in_channels, classes, width))


def segresnet(in_channels=1, classes=2, width=16):
    from monai.networks.nets import SegResNet

    return SegResNet(spatial_dims=3, in_channels=in_channels, out_channels=classes, init_filters=width)


def densenet(classes=10):
    from torchvision.models import densenet121

    return densenet121(num_classes=classes)


def convnext(classes=10):
    from torchvision.models import convnext_tiny

    return convnext_tiny(num_classes=classes, stochastic_depth_prob=0.0)
