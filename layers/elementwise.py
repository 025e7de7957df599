"""Elementwise operators: they act on the blocks as they are once the operands are aligned.

Source: Dryden et al. 2019, III-B.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import implements, name_of
from distconv.errors import ShapeError, UnsupportedOperation
from distconv.layers.alignment import aligned, broadcast_shape, common_distribution, result_shape, whole_over
from distconv.tensor import DistTensor

_POINTWISE = """
abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sign sgn sin cos tan
asin acos atan sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv relu ceil floor round trunc frac
isnan isinf isfinite isposinf isneginf signbit nan_to_num logical_not bitwise_not clamp clip clamp_min clamp_max
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power atan2 hypot
maximum minimum fmax fmin lerp where addcmul addcdiv rsub xlogy copysign logaddexp heaviside
eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor masked_fill sinc
threshold hardtanh relu6 elu selu celu leaky_relu gelu silu mish softplus hardsigmoid hardswish softsign
tanhshrink hardshrink softshrink logsigmoid
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__
__pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__
__eq__ __ne__ __lt__ __le__ __gt__ __ge__
""".split()

_IN_PLACE = """
__iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
zero_ fill_ copy_
""".split()

_UNARY = """
clone detach contiguous to float double half bfloat16 int long short bool char byte cpu cuda type_as
zeros_like ones_like full_like empty_like real conj
""".split()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor)]


def pointwise(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function`` of broadcastable operands, element by element."""
    operands = _tensors(args) + _tensors(kwargs.values())
    if kwargs.get("out") is not None:
        raise UnsupportedOperation(f"{name_of(function)} with out=: assign the result instead")
    if len(operands) == 1:
        (only,) = operands
        assert isinstance(only, DistTensor)
        dist, shape = only.dist, only.shape
    else:
        shape = broadcast_shape(tuple(t.shape for t in operands))
        dist = common_distribution(operands, shape)

    def block(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, DistTensor) and value.dist == dist and value.shape == shape:
            return value.local
        return aligned(value, dist, shape)

    result = function(*(block(a) for a in args), **{k: block(v) for k, v in kwargs.items()})
    first = operands[0]
    if isinstance(first, DistTensor) and result is first.local:
        return first
    return DistTensor(result, dist, shape)


def in_place(function: Callable[..., Any], target: Any, *args: Any, **kwargs: Any) -> Any:
    """``function`` that changes ``target``, a DistTensor, element by element; the others are aligned to it."""
    if not isinstance(target, DistTensor):
        raise UnsupportedOperation(
            f"{name_of(function)} would write a DistTensor into a plain tensor; scatter that first"
        )
    shape = broadcast_shape((target.shape, *(t.shape for t in _tensors(args))))
    if shape != target.shape:
        raise ShapeError(f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(shape)}")

    def block(value: Any) -> Any:
        return aligned(value, target.dist, target.shape) if isinstance(value, torch.Tensor) else value

    function(target.local, *(block(a) for a in args), **{k: block(v) for k, v in kwargs.items()})
    return target


def unary(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function`` of one tensor whose result has its shape: copies, conversions, constants."""
    (tensor, *_) = [a for a in args if isinstance(a, DistTensor)]
    result = function(*(a.local if isinstance(a, DistTensor) else a for a in args), **kwargs)
    return tensor if result is tensor.local else DistTensor(result, tensor.dist, tensor.shape)


def _register() -> None:
    holders = (torch.Tensor, torch, F, torch.special)
    for names, rule in ((_POINTWISE, pointwise), (_UNARY, unary)):
        for function in {getattr(h, n) for n in names for h in holders if hasattr(h, n)}:
            implements(function)(partial(rule, function))
    twins = [n + "_" for n in _POINTWISE if not n.startswith("__")]
    for name in twins + _IN_PLACE:
        for function in {getattr(h, name) for h in holders if hasattr(h, name)}:
            implements(function)(partial(in_place, function))


_register()


@implements(vars(torch._C.TensorBase)["data"].__get__)
def data(tensor: DistTensor) -> DistTensor:
    """The tensor outside autograd, on the same memory."""
    return DistTensor(tensor.local.data, tensor.dist, tensor.shape)


@implements(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, F.alpha_dropout, F.feature_alpha_dropout)
def dropout(input: DistTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> DistTensor:
    """Dropout outside training, where it is the identity."""
    if training and p > 0:
        raise UnsupportedOperation(
            f"dropout with p={p} in training: its mask would depend on the grid; call model.eval() or set p=0"
        )
    return input


@implements(F.prelu, torch.prelu, torch.Tensor.prelu)
def prelu(input: torch.Tensor, weight: torch.Tensor) -> DistTensor:
    """``F.prelu`` with one slope, or one per channel (dimension 1, not split)."""
    result_shape(F.prelu, input, weight)
    if not isinstance(input, DistTensor) or (weight.numel() > 1 and input.dist.split[1]):
        raise UnsupportedOperation("prelu needs a distributed input whose channels are not split")
    return DistTensor(F.prelu(input.local, whole_over(weight, input.dist)), input.dist, input.shape)
