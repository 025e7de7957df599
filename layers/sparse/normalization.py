"""Instance normalization: features of each sample and channel, normalized over the sites of the sample.

Batch norm is ``nn.BatchNorm1d``, and layer norm over channels ``nn.LayerNorm``.
"""

from __future__ import annotations

import torch
from torch import nn

from .pooling import SparseGlobalPool
from .site_sets import broadcast_to_sites
from .tensor import SparseTensor


class SparseInstanceNorm(nn.Module):
    """Instance norm: torch's of the features (1, C, sites) of each sample, without running statistics.

    A sample with one site gives the bias, where torch raises.

    Parameters
    ----------
    num_features : int
        Number of channels C.
    eps : float
        Added to the variance.
    affine : bool
        True for a weight and a bias for each channel. Otherwise there are no parameters.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, *, affine: bool = True) -> None:
        super().__init__()
        self.num_features, self.eps = num_features, eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self._mean = SparseGlobalPool("avg")

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return the normalized features of ``x`` on its sites."""
        centred = x - broadcast_to_sites(self._mean(x), x)
        variance = self._mean(centred * centred)
        y: SparseTensor = centred * broadcast_to_sites((variance + self.eps).rsqrt(), x)
        return y if self.weight is None else y * self.weight + self.bias

    def extra_repr(self) -> str:
        """Return the options that the module's representation shows."""
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"
