"""Linear layers, split over samples or over features.

If features are not split, each rank multiplies its rows by the full weight. If they are split over axis ``c``, they are
split as the channels of a convolution are (see :mod:`distconv.layers.common.sharded_weights`).

Source: Dryden et al. 2019, III-B and III-D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from distconv.communication.collectives import gather_region
from distconv.communication.routes import Needs
from distconv.communication.transfer import transfer_plan
from distconv.dispatch import implements
from distconv.errors import NoRule
from distconv.layers.common.alignment import check_dtypes, replicate_parameters, result_shape
from distconv.layers.common.sharded_weights import (
    channel_needs,
    parameter_block,
    redistribute_channels,
    reduce_scatter_output,
    weight_block,
)
from distconv.parameters.channel_split import AXIS, channel_split
from distconv.tensor import DistTensor


@implements(F.linear, torch._C._nn.linear, tensors="input weight bias")
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> DistTensor:
    """Compute ``F.linear`` of x (..., features).

    Features that are split over another axis than ``c`` are gathered first, or moved to ``c`` if the weight is sharded.

    Parameters
    ----------
    input, weight, bias
        As in ``F.linear``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        For a plain tensor with a distributed weight, or a weight of one dimension.
    """
    check_dtypes(F.linear, input, weight, bias)
    out_shape = result_shape(F.linear, input, weight, bias)
    if not isinstance(input, DistTensor):
        raise NoRule("F.linear of a plain tensor with a distributed weight: scatter the input first")
    if weight.dim() == 1:
        raise NoRule("F.linear with a weight of one dimension: unsqueeze(0) it, and squeeze the result")
    last = input.dim() - 1
    sharded = isinstance(weight, DistTensor) and bool(weight.dist.split_axes)
    # Rows are independent, so blocks need not be balanced, and nothing is moved.
    by_rows = input.dist.split[last] is None and not sharded
    x = input if by_rows else redistribute_channels(input, last, weight)
    if x.dist.split[last] is None:
        return DistTensor(F.linear(x.local, *replicate_parameters(weight, bias, x.dist)), x.dist, out_shape)
    split = channel_split(input.shape[last], weight.shape[0], 1, x.grid.shape[AXIS])
    needs = Needs(x.dist, (channel_needs(x.dist, last, split),))
    block = gather_region(x.local, transfer_plan(x.dist, needs, tuple(x.shape)))
    y = F.linear(block, weight_block(weight, x.dist, split))
    y = reduce_scatter_output(y, x.dist, out_shape, last, split)
    if bias is not None:
        y = y + parameter_block(bias, x.dist, [last]).to(y.dtype)
    return DistTensor(y, x.dist, out_shape)
