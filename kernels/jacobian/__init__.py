"""Transposed Jacobians of layers, made analytically: sparse, vectorised, their patterns kept for each shape.

``conv2d``, ``relu``, ... return the torch CSR matrix of one sample, ``batched_conv2d``, ... what a scan takes: a
:class:`SparseJacobian`, one pattern for all samples, so that products of patterns are found once.

::

    convolution  The transposed Jacobian of a convolution: its values are weights
    csr          Sparse transposed Jacobians: one pattern for all samples of a batch, and values for each of them or all
    elementwise  Of what works element by element: diagonal matrices. And of a linear layer: its weight
    pooling      Transposed Jacobians of pooling
    product      The product of sparse Jacobians: which pairs of non-zeros meet is found once
    windows      Which inputs meet which outputs under a window that moves over two dimensions
"""

from .convolution import batched_conv2d, conv2d
from .csr import Pattern, SparseJacobian
from .elementwise import batched_relu, batched_tanh, linear, relu, tanh
from .pooling import batched_avg_pool2d, batched_max_pool2d, max_pool2d
from .product import multiply
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
