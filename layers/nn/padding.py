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
from distconv.layers.common.alignment import redistribute_balanced, result_shape, to_probed_dtype
from distconv.layers.common.empty_blocks import run_with_gathered_dims
from distconv.layers.common.input_windows import empty_output, gather_needed_input
from distconv.layers.common.resampling import Resampling, Resamplings, copy_if_shared, resample
from distconv.tensor import DistTensor


@lru_cache(maxsize=1024)
def _padding_resampling(mode: str, extent: int, front: int, back: int) -> Resampling | None:
    """Return the resampling that pads a dimension of ``extent`` indices; None if it needs no padding."""
    if not front and not back:
        return None
    # Padding the indices shows which input each output takes.
    index = F.pad(torch.arange(extent, dtype=torch.float64)[None, None], (front, back), mode=mode)
    low = tuple(int(i) for i in index.flatten())
    return Resampling(low, low, ())


@implements(F.pad, torch._C._nn.pad, order=StridePolicy.OF_INPUT_ON_CPU)
def pad(input: DistTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """Compute ``F.pad`` by an exchange of the positions that move between ranks.

    Parameters
    ----------
    input, pad, mode, value
        As in ``F.pad``.

    Returns
    -------
    Tensor
    """
    out_shape = result_shape(F.pad, input, tuple(pad), mode, value)
    if mode != "constant" and input.dim() == len(pad) // 2 + 1:
        return F.pad(input.unsqueeze(0), tuple(pad), mode, value).squeeze(0)
    fronts = [0] * input.dim()
    backs = [0] * input.dim()
    for i, dim in enumerate(range(input.dim() - 1, input.dim() - 1 - len(pad) // 2, -1)):
        fronts[dim], backs[dim] = pad[2 * i], pad[2 * i + 1]
    if any(fronts[:2]) or any(backs[:2]) or input.dim() < 3:
        padded = [d for d in range(input.dim()) if fronts[d] or backs[d]]
        return run_with_gathered_dims(lambda block: F.pad(block, pad, mode, value), input, padded, out_shape)
    x = redistribute_balanced(input)
    count = input.dim() - 2
    # A window of one input whose padding is the front. Negative padding shifts the windows the other way.
    if mode == "constant":
        shift = Geometry((1,) * count, (1,) * count, tuple(fronts[2:]), (1,) * count)
        block = gather_needed_input(x, out_shape, shift, 0.0 if value is None else value)
        local_shape = x.dist.local_shape(out_shape)
        y = empty_output(block, local_shape) if 0 in local_shape else copy_if_shared(block, x)
        return DistTensor(y, x.dist, out_shape)
    x = to_probed_dtype(x, lambda block: F.pad(block, (0, 0) * count, mode), *(1,) * (count + 2))
    dims = [_padding_resampling(mode, n, f, b) for n, f, b in zip(x.shape[2:], fronts[2:], backs[2:], strict=True)]
    return resample(x, out_shape, Resamplings(tuple(dims)))
