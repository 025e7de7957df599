"""Initial weights of deep networks: torch's own are too small for many layers of ReLU.

Source: He, Zhang, Ren, Sun, "Delving deep into rectifiers", ICCV 2015, eq. 15 (the backward case).
"""

from __future__ import annotations

from torch import nn


def initialise_for_relu(model: nn.Module, slope: float = 0.0) -> None:
    """Give each convolution of ``model`` normal weights that keep the variance of gradients, and biases of zero.

    ``slope`` is that of the activations for negative numbers.
    """
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            nn.init.kaiming_normal_(module.weight, slope, mode="fan_out", nonlinearity="leaky_relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
