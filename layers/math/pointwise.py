"""Elementwise operators.

The operands are brought to one distribution, and torch's function computes on the blocks. Other operators call
:func:`pointwise` and :func:`pointwise_in_place` for their elementwise parts.

Source: Dryden et al. 2019, III-B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import OperatorKind, functions_named, implements, name_of
from distconv.errors import NoRule, ShapeError
from distconv.layers.common.alignment import (
    broadcast_block,
    broadcast_shape,
    common_distribution,
    redistribute_balanced,
    replicate_parameter,
    result_shape,
)
from distconv.layers.common.empty_blocks import run_with_gathered_dims
from distconv.layers.common.inplace_views import record_inplace_change, record_shared_view
from distconv.layers.common.sharded_weights import parameter_block
from distconv.layers.common.value_check import call_or_raise_on_all_ranks
from distconv.tensor import DistTensor

_POINTWISE = """
abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sign sgn sin cos tan
asin acos atan sinh cosh tanh asinh acosh atanh arcsin arccos arctan arcsinh arccosh arctanh sigmoid logit erf erfc
relu ceil floor round trunc fix frac deg2rad rad2deg conj_physical angle
isnan isinf isfinite isposinf isneginf isreal signbit nan_to_num logical_not bitwise_not
clamp clip clamp_min clamp_max
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power atan2 arctan2 hypot
maximum minimum fmax fmin lerp addcmul addcdiv rsub xlogy copysign nextafter ldexp logaddexp logaddexp2 heaviside
gcd lcm bitwise_left_shift bitwise_right_shift
eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor masked_fill sinc
threshold hardtanh relu6 elu selu celu leaky_relu gelu silu mish softplus hardsigmoid hardswish softsign
tanhshrink hardshrink softshrink logsigmoid
expit
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__
__pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__
__lshift__ __rshift__ __rlshift__ __rrshift__ __div__
__eq__ __ne__ __lt__ __le__ __gt__ __ge__
""".split()
"""Elementwise functions, by name. They have in-place versions with ``_`` at the end."""

_SPECIAL = """
lgamma digamma polygamma i0 igamma igammac entr erfcx gammaln i0e i1 i1e log_ndtr
ndtr ndtri psi xlog1py zeta gammainc gammaincc erfinv mvlgamma multigammaln
airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0
modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0
chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
legendre_polynomial_p
""".split()
"""Elementwise functions whose cost is arithmetic instead of memory traffic."""

_IN_PLACE = """
__iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ __ilshift__
__irshift__ zero_ fill_ copy_ detach_
""".split()
"""Elementwise in-place functions without an out-of-place version in ``_POINTWISE``."""

_UNARY = """
clone contiguous to float double half bfloat16 int long short bool char byte cpu cuda type_as
zeros_like ones_like full_like empty_like
""".split()
"""Functions of one tensor whose result has its shape."""

_ALIASES = ["detach", "conj"]
"""Functions of one tensor whose result shares its memory."""


def _only_tensors(values: Any) -> list[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor)]


_DIVISIONS = frozenset(
    getattr(holder, name)
    for name in (
        "floor_divide", "remainder", "fmod", "div", "divide", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__",
        "floor_divide_", "remainder_", "fmod_", "div_", "divide_", "__ifloordiv__", "__imod__",
    )
    for holder in (torch.Tensor, torch)
    if hasattr(holder, name)
)  # fmt: skip
"""Divisions, which reject integers divided by zero."""


def _checks_values(function: Any, args: Sequence[Any], operands: Sequence[torch.Tensor]) -> bool:
    """Return True if torch checks the values of ``operands`` before it computes, and may reject them."""
    if function in _DIVISIONS:
        by_number = len(args) > 1 and isinstance(args[1], int) and args[1] != 0 and "__r" not in function.__name__
        return not by_number and not any(t.is_floating_point() or t.is_complex() for t in operands)
    return getattr(function, "func", None) is F.binary_cross_entropy


def _block_or_value(value: Any) -> Any:
    return value.local if isinstance(value, DistTensor) else value


def pointwise(function: Callable[..., Any], *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """Call a function on operands that broadcast, element by element.

    Collective: call on every rank. At least one operand is a DistTensor.

    Parameters
    ----------
    function : callable
        An elementwise function of torch.
    *args, **kwargs
        Its arguments. Plain tensors count as replicated.
    out : DistTensor, optional
        Receives the result.

    Returns
    -------
    DistTensor
        Distributed as the first DistTensor, and along dimensions that only later operands split.
    """
    operands = _only_tensors(args) + _only_tensors(kwargs.values())
    if out is not None:
        plain = not any(isinstance(t, DistTensor) for t in operands)
        return _write_out(
            function, out, operands, (function if plain else partial(pointwise, function))(*args, **kwargs)
        )
    # The most frequent case, without the search for a common distribution: blocks stay, balanced or not.
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
        # Also for an equal distribution that is another object, which broadcast_block does not recognize.
        if isinstance(value, DistTensor) and value.dist == dist and value.shape == shape:
            return value.local
        return broadcast_block(value, dist, shape)

    blocks, named = [block(a) for a in args], {k: block(v) for k, v in kwargs.items()}
    checked = _checks_values(function, args, operands)
    result = (
        call_or_raise_on_all_ranks(dist.grid, function, *blocks, **named) if checked else function(*blocks, **named)
    )
    # Functions with inplace=True, such as F.relu, and those that return their argument, such as `positive`.
    first = operands[0]
    if isinstance(first, DistTensor) and result is first.local:
        if kwargs.get("inplace"):
            record_inplace_change(first)
        return first
    return DistTensor(result, dist, shape)


def _write_out(
    function: Callable[..., Any], out: torch.Tensor, operands: list[torch.Tensor], result: torch.Tensor
) -> Any:
    """Write ``result`` to ``out``, as optimizers require."""
    is_recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (out, *operands))
    if not isinstance(out, DistTensor) or out.shape != result.shape or is_recorded:
        raise NoRule(
            f"{name_of(function)}: out= must be a distributed tensor of the result's shape, and autograd must not "
            "record; assign the result instead"
        )
    return pointwise_in_place(torch.Tensor.copy_, out, result)


def pointwise_in_place(function: Callable[..., Any], target: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that changes a tensor element by element; the other operands are aligned to it.

    Collective: call on every rank.

    Parameters
    ----------
    function : callable
        An in-place function of torch.
    target : Tensor or DistTensor
        The tensor to change. A plain target counts as replicated. Then no other operand may be split, and autograd must
        not record.
    *args, **kwargs
        Further arguments of ``function``.

    Returns
    -------
    Tensor or DistTensor
        ``target``.

    Raises
    ------
    NoRule
        If a split operand would be written to a plain target.
    ShapeError
        If the operands are larger than the target, with torch's message.
    """
    others = _only_tensors(args) + _only_tensors(kwargs.values())
    if not isinstance(target, DistTensor):
        is_recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (target, *others))
        if is_recorded or any(t.dist.split_axes for t in others if isinstance(t, DistTensor)):
            raise NoRule(
                f"{name_of(function)} would write a DistTensor into a plain tensor; scatter the plain tensor first"
            )
        return function(target, *map(_block_or_value, args), **{k: _block_or_value(v) for k, v in kwargs.items()})
    # Checked for global shapes: blocks of a mismatched operand could broadcast on some ranks.
    shape = broadcast_shape((target.shape, *(t.shape for t in others)))
    if shape != target.shape:
        raise ShapeError(f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(shape)}")

    def block(value: Any) -> Any:
        return broadcast_block(value, target.dist, target.shape) if isinstance(value, torch.Tensor) else value

    blocks, named = [block(a) for a in args], {k: block(v) for k, v in kwargs.items()}
    if _checks_values(function, (target, *args), (target, *others)):
        call_or_raise_on_all_ranks(target.grid, function, target.local, *blocks, **named)
    else:
        function(target.local, *blocks, **named)
    record_inplace_change(target)
    return target


def unary(function: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a function of one tensor whose result has its shape: a copy, a conversion or a constant.

    No communication.

    Parameters
    ----------
    function : callable
    input : Tensor or DistTensor
    *args, **kwargs
        Further arguments of ``function``.

    Returns
    -------
    Tensor or DistTensor
        ``input`` itself if ``function`` returns its block.
    """
    block = _block_or_value(input)
    result = function(block, *map(_block_or_value, args), **{k: _block_or_value(v) for k, v in kwargs.items()})
    if result is block:
        return input
    return DistTensor(result, input.dist, input.shape) if isinstance(input, DistTensor) else result


def alias(function: Callable[..., Any], input: DistTensor) -> DistTensor:
    """Call a function of one tensor whose result shares its memory.

    Parameters
    ----------
    function : callable
    input : DistTensor

    Returns
    -------
    DistTensor
    """
    result: DistTensor = unary(function, input)
    return record_shared_view(result, input, lambda: unary(function, input))


_holders = (torch.Tensor, torch, F, torch.special)
_operators: tuple[tuple[list[str], Callable[..., Any], dict[str, Any]], ...] = (
    (_POINTWISE, pointwise, {}),
    (_SPECIAL, pointwise, {"passes": None}),
    (_UNARY, unary, {}),
    (_ALIASES, alias, {"kind": OperatorKind.VIEW}),
)
for _names, _operator, _options in _operators:
    # A set: several names may stand for one function.
    for _function in {function for name in _names for function in functions_named(name, *_holders)}:
        implements(_function, tensors=None, **_options)(partial(_operator, _function))
implements(torch.Tensor.where, tensors=None)(partial(pointwise, torch.Tensor.where))
for _name in [*(f"{name}_" for name in _POINTWISE + _SPECIAL if not name.startswith("__")), *_IN_PLACE]:
    for _function in functions_named(_name, *_holders):
        implements(_function, tensors=None)(partial(pointwise_in_place, _function))


@implements(torch.where, tensors=None)
def where(condition: torch.Tensor, *branches: Any, **named: Any) -> DistTensor:
    """Compute ``torch.where`` with two branches.

    Parameters
    ----------
    condition, *branches, **named
        As in ``torch.where``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        For a condition alone.
    """
    if not branches and not named:
        raise NoRule("torch.where of a condition alone has no distributed rule: gather it first (dc.gather(condition))")
    result: DistTensor = pointwise(torch.where, condition, *branches, **named)
    return result


# -- activations that are not elementwise throughout ------------------------------------------------------------------


@implements(F.glu)
def glu(input: DistTensor, dim: int = -1) -> DistTensor:
    """Compute ``F.glu``; ``dim`` is gathered if it is split, and split again.

    Parameters
    ----------
    input, dim
        As in ``F.glu``.

    Returns
    -------
    DistTensor
    """
    out_shape = result_shape(F.glu, input, dim)
    if input.dist.split[dim] is None:
        return DistTensor(F.glu(input.local, dim), input.dist, out_shape)
    return run_with_gathered_dims(lambda block: F.glu(block, dim), input, [dim % input.dim()], out_shape)


@implements(vars(torch._C.TensorBase)["data"].__get__, kind=OperatorKind.VIEW)
def data(tensor: DistTensor) -> DistTensor:
    """Return the tensor without autograd, on the same memory."""

    def take() -> DistTensor:
        return DistTensor(tensor.local.data, tensor.dist, tensor.shape)

    return record_shared_view(take(), tensor, take)


@implements(F.prelu, torch.prelu, torch.Tensor.prelu, tensors="input weight")
def prelu(input: torch.Tensor, weight: torch.Tensor) -> DistTensor:
    """Compute ``F.prelu`` with one slope, or one slope for each channel (dimension 1).

    Parameters
    ----------
    input, weight
        As in ``F.prelu``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        For a plain tensor with a distributed slope.
    """
    result_shape(F.prelu, input, weight)
    if not isinstance(input, DistTensor):
        raise NoRule("prelu of a plain tensor with a distributed weight: scatter the input first")
    if weight.numel() == 1:
        return DistTensor(F.prelu(input.local, replicate_parameter(weight, input.dist)), input.dist, input.shape)
    # A block of slopes is one range of channels.
    x = redistribute_balanced(input) if input.dist.cyclic else input
    return DistTensor(F.prelu(x.local, parameter_block(weight, x.dist, [1])), x.dist, x.shape)
