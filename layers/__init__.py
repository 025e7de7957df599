"""Distributed operators on DistTensor; importing this package fills the operator registry."""

if __name__ != "distconv.layers":
    raise ImportError(
        "import this package as distconv.layers: under the bare name 'layers' its classes would exist twice"
    )

from distconv.layers import (
    convolution,
    elementwise,
    gradients,
    indexing,
    joining,
    linear,
    losses,
    normalization,
    pooling,
    reductions,
    shapes,
    transposed,
)
from distconv.layers.normalization import batch_norm_statistics

__all__ = [
    "batch_norm_statistics",
    "convolution",
    "elementwise",
    "gradients",
    "indexing",
    "joining",
    "linear",
    "losses",
    "normalization",
    "pooling",
    "reductions",
    "shapes",
    "transposed",
]
