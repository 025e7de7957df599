"""A CosmoFlow-like regressor: cosmological parameters from a cube of dark matter densities.

Source: Mathuriya et al., "CosmoFlow: using deep learning to learn the universe at scale", SC 2018; with the layers of
Oyama et al., "The case for strong scaling in deep learning: training large 3D CNNs with hybrid parallelism", 2020,
table I: 9.44 M parameters for four densities and four targets.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .initialisation import initialise_for_relu

FILTERS = (1, 2, 4, 8, 16, 16, 16)
"""Filters of each convolution, as multiples of ``width``."""
SLOPE = 0.3
"""Slope of the activations for negative numbers."""
FINAL_SIZE = 2
"""Size at which the features are no longer halved: that of the input of the linear layers."""


class CosmoFlow(nn.Module):
    """A CosmoFlow-like regressor: x (N, in_channels, D, H, W) to values (N, classes), for any size.

    An overlapping average pool after each of the seven convolutions halves the size until it is 2; a cube of 128^3
    needs six pools. Features that are larger after the last convolution are averaged to 2^3.

    Parameters
    ----------
    width : int
        Filters of the first convolution.
    in_channels : int
    classes : int
        Number of values.
    dropout : float
        Probability of dropout.
    """

    def __init__(self, width: int = 16, in_channels: int = 4, classes: int = 4, dropout: float = 0.5) -> None:
        super().__init__()
        widths = [factor * width for factor in FILTERS]
        self.convolutions = nn.ModuleList(
            nn.Conv3d(before, after, 3, padding=1)
            for before, after in zip([in_channels, *widths], widths, strict=False)
        )
        self.regressor = nn.Sequential(
            nn.Linear(FINAL_SIZE**3 * widths[-1], 128 * width),
            nn.LeakyReLU(SLOPE),
            nn.Dropout(dropout),
            nn.Linear(128 * width, 16 * width),
            nn.LeakyReLU(SLOPE),
            nn.Dropout(dropout),
            nn.Linear(16 * width, classes),
        )
        initialise_for_relu(self, SLOPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution in self.convolutions:
            x = F.leaky_relu(convolution(x), SLOPE)
            if min(x.shape[2:]) > FINAL_SIZE:
                x = F.avg_pool3d(x, 3, stride=2, padding=1)
        values: torch.Tensor = self.regressor(torch.flatten(F.adaptive_avg_pool3d(x, FINAL_SIZE), 1))
        return values


def cosmoflow(width: int = 16, in_channels: int = 4, classes: int = 4) -> CosmoFlow:
    """Return a CosmoFlow-like regressor.

    Parameters
    ----------
    width, in_channels, classes : int
        As in :class:`CosmoFlow`.

    Returns
    -------
    CosmoFlow
    """
    return CosmoFlow(width, in_channels, classes)
