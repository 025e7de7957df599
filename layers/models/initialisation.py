"""Initial weights for networks with many layers of ReLU.

torch's default weights are too small for these networks. The models of this package call
:func:`initialise_for_relu`.

Source: He, Zhang, Ren, Sun, "Delving deep into rectifiers", ICCV 2015, eq. 15 (the backward case).
"""

from __future__ import annotations

from torch import nn


def initialise_for_relu(model: nn.Module, slope: float = 0.0) -> None:
    """Initialize convolutions with normal weights that preserve the variance of gradients, and with zero biases.

    Parameters
    ----------
    model : nn.Module
    slope : float
        Slope of the activations for negative numbers.
    """
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            nn.init.kaiming_normal_(module.weight, slope, mode="fan_out", nonlinearity="leaky_relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
