"""Local computation on sparse tensors: sites with integer coordinates, and their features.

All functions take explicit coordinates or kernel maps, so the sites may be a full point cloud, or those of a rank and
its halo. :mod:`distconv.layers.sparse` calls them.

::

    convolution  Convolution over a kernel map, and its gradients
    coordinates  Coordinates of sites: checks, integer keys that sort like them, coarser and wider sets of sites
    kernel_map   Kernel maps: which input site meets which output site at each offset of a kernel
    pooling      Pooling over a kernel map, and over all sites of a sample
"""

from .convolution import sparse_convolution
from .coordinates import KeySpace, check_coordinates, coarsen, reachable_sites, sorting_order
from .kernel_map import KernelMap, box_offsets, kernel_map
from .pooling import global_max, global_sum, sparse_average_pool, sparse_max_pool, sparse_sum_pool

__all__ = [
    "KernelMap",
    "KeySpace",
    "box_offsets",
    "check_coordinates",
    "coarsen",
    "global_max",
    "global_sum",
    "kernel_map",
    "reachable_sites",
    "sorting_order",
    "sparse_average_pool",
    "sparse_convolution",
    "sparse_max_pool",
    "sparse_sum_pool",
]
