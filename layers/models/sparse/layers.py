"""Sparse and dense layers of which the networks consist."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from distconv.layers.sparse import SparseConv, SparseGlobalPool, SparseMaxPool


class Layers(NamedTuple):
    """Factories of each kind of layer.

    ``convolution`` and ``transposed`` take input and output channels, kernel size, stride, and True for a bias;
    ``norm`` takes channels, and ``max_pool`` the size of a window. ``global_max`` returns a module with output (B, C).
    """

    convolution: Callable[[int, int, int, int, bool], nn.Module]
    transposed: Callable[[int, int, int, int, bool], nn.Module]
    norm: Callable[[int], nn.Module]
    max_pool: Callable[[int], nn.Module]
    global_max: Callable[[], nn.Module]


def _sparse_convolution(in_channels: int, channels: int, kernel: int, stride: int, bias: bool) -> nn.Module:
    return SparseConv(in_channels, channels, kernel, stride, bias=bias)


def _sparse_transposed(in_channels: int, channels: int, kernel: int, stride: int, bias: bool) -> nn.Module:
    return SparseConv(in_channels, channels, kernel, stride, transposed=True, bias=bias)


def _dense_convolution(in_channels: int, channels: int, kernel: int, stride: int, bias: bool) -> nn.Module:
    return nn.Conv3d(in_channels, channels, kernel, stride, padding=(kernel - 1) // 2, bias=bias)


def _dense_transposed(in_channels: int, channels: int, kernel: int, stride: int, bias: bool) -> nn.Module:
    return nn.ConvTranspose3d(in_channels, channels, kernel, stride, padding=(kernel - 1) // 2, bias=bias)


def _dense_global_max() -> nn.Module:
    return nn.Sequential(nn.AdaptiveMaxPool3d(1), nn.Flatten())


SPARSE = Layers(_sparse_convolution, _sparse_transposed, nn.BatchNorm1d, SparseMaxPool, lambda: SparseGlobalPool("max"))
DENSE = Layers(_dense_convolution, _dense_transposed, nn.BatchNorm3d, nn.MaxPool3d, _dense_global_max)


def convolution_block(
    layers: Layers, in_channels: int, channels: int, kernel: int = 3, stride: int = 1
) -> nn.Sequential:
    """Return a convolution with batch norm and ReLU.

    Parameters
    ----------
    layers : Layers
    in_channels, channels, kernel, stride : int

    Returns
    -------
    nn.Sequential
    """
    convolution = layers.convolution(in_channels, channels, kernel, stride, False)
    return nn.Sequential(convolution, layers.norm(channels), nn.ReLU(inplace=True))


def initialise(model: nn.Module) -> None:
    """Initialize kernels with normal weights that preserve the variance of gradients through layers of ReLU.

    Parameters
    ----------
    model : nn.Module
    """
    # Kernels have more than two dimensions; biases and batch norm have one, and linear layers keep torch's default.
    for parameter in model.parameters():
        if parameter.ndim > 2:
            nn.init.kaiming_normal_(parameter, mode="fan_out", nonlinearity="relu")
