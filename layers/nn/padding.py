"""Padding: constant (also negative), reflect, replicate and circular.

Padding of spatial dimensions exchanges only the positions that move between ranks. Padding of samples or channels
gathers the padded dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F

from distconv.dispatch import StridePolicy, implements
from distconv.kernels.convolution import Geometry
from distconv.layers.common.alignment import as_cast_for, balanced_input, result_shape
from distconv.layers.common.empty_blocks import whole_along
from distconv.layers.common.input_windows import needed_block, no_outputs
from distconv.layers.common.resampling import Resampling, Resamplings, own_memory, resampled
from distconv.tensor import DistTensor


@lru_cache(maxsize=1024)
def _padding(mode: str, extent: int, front: int, behind: int) -> Resampling | None:
    """Return the resampling that pads a dimension of ``extent`` indices; None if it needs no padding."""
    if not front and not behind:
        return None
    index = F.pad(torch.arange(extent, dtype=torch.float64)[None, None], (front, behind), mode=mode)
    low = tuple(int(i) for i in index.flatten())
    return Resampling(low, low, ())


@implements(F.pad, torch._C._nn.pad, order=StridePolicy.OF_INPUT_ON_CPU)
def pad(input: DistTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """Compute ``F.pad`` by an exchange of the positions that move between ranks. Parameters as in torch."""
    out_shape = result_shape(F.pad, input, tuple(pad), mode, value)
    if mode != "constant" and input.dim() == len(pad) // 2 + 1:
        return F.pad(input.unsqueeze(0), tuple(pad), mode, value).squeeze(0)
    fronts = [0] * input.dim()
    behinds = [0] * input.dim()
    for i, dim in enumerate(range(input.dim() - 1, input.dim() - 1 - len(pad) // 2, -1)):
        fronts[dim], behinds[dim] = pad[2 * i], pad[2 * i + 1]
    if any(fronts[:2]) or any(behinds[:2]) or input.dim() < 3:
        padded = [d for d in range(input.dim()) if fronts[d] or behinds[d]]
        return whole_along(lambda block: F.pad(block, pad, mode, value), input, padded, out_shape)
    x = balanced_input(input)
    count = input.dim() - 2
    if mode == "constant":
        shift = Geometry((1,) * count, (1,) * count, tuple(fronts[2:]), (1,) * count)
        block = needed_block(x, out_shape, shift, 0.0 if value is None else value)
        local_shape = x.dist.local_shape(out_shape)
        y = no_outputs(block, local_shape) if 0 in local_shape else own_memory(block, x)
        return DistTensor(y, x.dist, out_shape)
    x = as_cast_for(x, lambda block: F.pad(block, (0, 0) * count, mode), *(1,) * (count + 2))
    dims = [_padding(mode, n, f, b) for n, f, b in zip(x.shape[2:], fronts[2:], behinds[2:], strict=True)]
    return resampled(x, out_shape, Resamplings(tuple(dims)))
