"""Sparse tensors and their layers: features at the active sites of a grid of one to four dimensions.

::

    convolution         Convolution: strided, transposed and on submanifolds, with kernels of any shape
    coordinate_manager  Sets of sites and the kernel maps between them, shared by related tensors
    dense               Dense volumes from sparse tensors, and sparse tensors from volumes
    distributed         Sparse tensors that are split over ranks
    functions           Functions of torch that apply to features alone
    interpolation       Features of a sparse tensor at points between its sites
    neighbours          Nearest points, and points within a radius, in point sets that are split over ranks
    normalization       Instance normalization
    partition           The sites that each rank owns
    pooling             Pooling over windows, and over all sites of a sample
    site_halo           Exchange of the sites and features that a rank needs from other ranks
    site_sets           Pruning and union of sites, and features of samples at their sites
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
from .interpolation import interpolate
from .neighbours import NeighbourPairs, Neighbours, knn, radius_pairs, radius_search
from .normalization import SparseInstanceNorm
from .partition import Partition
from .pooling import SparseAvgPool, SparseGlobalPool, SparseMaxPool, SparseSumPool
from .site_sets import broadcast_to_sites, prune, union
from .tensor import SparseTensor

__all__ = [
    "CoordinateManager",
    "NeighbourPairs",
    "Neighbours",
    "Partition",
    "SparseAvgPool",
    "SparseConv",
    "SparseGlobalPool",
    "SparseInstanceNorm",
    "SparseMaxPool",
    "SparseSumPool",
    "SparseTensor",
    "broadcast_to_sites",
    "from_dense",
    "from_local",
    "gather",
    "interpolate",
    "knn",
    "prune",
    "radius_pairs",
    "radius_search",
    "scatter",
    "to_dense",
    "union",
]
