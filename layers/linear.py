"""Linear layers: sample-parallel, with whole features on each rank.

Source: Dryden et al. 2019, III-B.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from distconv.dispatch import implements
from distconv.errors import UnsupportedOperation
from distconv.layers.alignment import check_dtypes, result_shape, whole_over
from distconv.tensor import DistTensor


@implements(F.linear, torch._C._nn.linear)
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> DistTensor:
    """``F.linear`` of x (..., features); split features are gathered first."""
    check_dtypes(F.linear, input, weight, bias)
    out_shape = result_shape(F.linear, input, weight, bias)
    if not isinstance(input, DistTensor):
        raise UnsupportedOperation("F.linear of a plain tensor with a distributed weight: scatter the input first")
    x = input.replicated([input.dim() - 1])
    w = whole_over(weight, x.dist)
    b = None if bias is None else whole_over(bias, x.dist)
    return DistTensor(F.linear(x.local, w, b), x.dist, out_shape)
