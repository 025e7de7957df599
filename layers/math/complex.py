"""Complex numbers: their parts, and construction from parts.

All of it is elementwise. Only the dimension of real and imaginary part is gathered, if it is split.
"""

from __future__ import annotations

from functools import partial

import torch

from distconv.dispatch import OperatorKind, StridePolicy, implements
from distconv.layers.common.alignment import result_shape
from distconv.layers.common.inplace_views import ViewResult, takes_view
from distconv.layers.math.pointwise import alias, pointwise, unary
from distconv.tensor import DistTensor

for _name in ("real", "imag"):
    implements(
        getattr(torch, _name), getattr(torch.Tensor, _name).__get__, kind=OperatorKind.VIEW, order=StridePolicy.NEW
    )(partial(alias, getattr(torch, _name)))
# Views, because torch returns the argument itself if there is nothing to resolve.
for _name in ("resolve_conj", "resolve_neg"):
    for _function in {getattr(h, _name) for h in (torch, torch.Tensor)}:
        implements(_function, kind=OperatorKind.VIEW)(partial(alias, _function))
for _function in (torch.complex, torch.polar):
    implements(_function, tensors=None)(partial(pointwise, _function))
for _name in ("cfloat", "cdouble"):
    implements(getattr(torch.Tensor, _name), tensors=None)(partial(unary, getattr(torch.Tensor, _name)))


@implements(torch.view_as_real, kind=OperatorKind.VIEW)
@takes_view()
def view_as_real(input: DistTensor) -> ViewResult:
    """Compute ``torch.view_as_real``; the last dimension, of real and imaginary part, is not split."""
    shape = result_shape(torch.view_as_real, input)
    return DistTensor(torch.view_as_real(input.local), input.dist.with_axes((*input.dist.axes, None)), shape), input


@implements(torch.view_as_complex, kind=OperatorKind.VIEW)
@takes_view(lambda changed, input: input.copy_(view_as_real(changed)))
def view_as_complex(input: DistTensor) -> ViewResult:
    """Compute ``torch.view_as_complex``; the last dimension, of two parts, is gathered if it is split."""
    shape = result_shape(torch.view_as_complex, input)
    x = input.replicated([input.dim() - 1])
    return DistTensor(torch.view_as_complex(x.local), x.dist.with_axes(x.dist.axes[:-1]), shape), x
