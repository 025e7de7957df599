"""Transposed Jacobians of layers in closed form: sparse, vectorized, with patterns cached for each shape.

The transposed Jacobian of a layer is J = (dy/dx)^T for flattened x and y. J g is the gradient of x, given the gradient
g of y. ``conv2d``, ``relu``, ... return the torch CSR matrix of one sample. ``batched_conv2d``, ... return a
:class:`SparseJacobian` for a scan: one pattern for all samples, so products of patterns are computed once.

::

    convolution  The transposed Jacobian of a convolution: its values are weights
    csr          Sparse transposed Jacobians and their products: one pattern for all samples, values for each or for all
    elementwise  Transposed Jacobians of elementwise layers (diagonal) and of a linear layer (its weight)
    pooling      Transposed Jacobians of pooling
    windows      Pairs of inputs and outputs of a window that moves over two dimensions
"""

from .convolution import batched_conv2d, conv2d
from .csr import Pattern, SparseJacobian, multiply
from .elementwise import batched_relu, batched_tanh, linear, relu, tanh
from .pooling import batched_avg_pool2d, batched_max_pool2d, max_pool2d
from .windows import Windows

__all__ = [
    "Pattern",
    "SparseJacobian",
    "Windows",
    "batched_avg_pool2d",
    "batched_conv2d",
    "batched_max_pool2d",
    "batched_relu",
    "batched_tanh",
    "conv2d",
    "linear",
    "max_pool2d",
    "multiply",
    "relu",
    "tanh",
]
