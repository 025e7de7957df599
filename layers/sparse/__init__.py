"""Sparse tensors and their layers: features at the active sites of a grid of one to four dimensions.

::

    convolution         Convolution: strided, transposed and on submanifolds, with kernels of any shape
    coordinate_manager  Sets of sites and the kernel maps between them, shared by related tensors
    dense               Dense volumes from sparse tensors, and sparse tensors from volumes
    distributed         Sparse tensors that are split over ranks
    functions           Functions of torch that apply to features alone
    partition           The sites that each rank owns
    pooling             Pooling over windows, and over all sites of a sample
    site_halo           Exchange of the sites and features that a rank needs from other ranks
    stages              Sparse networks as pipeline stages
    tensor              SparseTensor: coordinates of active sites, and their features
    windows             Checks of arguments of layers with windows: kernels, strides, offsets, inputs

Examples
--------
>>> import torch
>>> from torch import nn
>>> coords = torch.tensor([[0, 5, 5, 5], [0, 5, 6, 7], [1, 0, 2, 4]])
>>> x = SparseTensor(coords, torch.ones(3, 1))
>>> model = nn.Sequential(SparseConv(1, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), SparseConv(8, 16, 2, stride=2))
>>> model(x)
SparseTensor(sites=3, channels=16, dimension=3, stride=2, batch_size=2, dtype=torch.float32, device=cpu)
"""

from .convolution import SparseConv
from .coordinate_manager import CoordinateManager
from .dense import from_dense, to_dense
from .distributed import from_local, gather, scatter
from .partition import Partition
from .pooling import SparseAvgPool, SparseGlobalPool, SparseMaxPool, SparseSumPool
from .tensor import SparseTensor

__all__ = [
    "CoordinateManager",
    "Partition",
    "SparseAvgPool",
    "SparseConv",
    "SparseGlobalPool",
    "SparseMaxPool",
    "SparseSumPool",
    "SparseTensor",
    "from_dense",
    "from_local",
    "gather",
    "scatter",
    "to_dense",
]
