"""Elementwise operators under every name that torch has for them: method, function, special function, in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from distconv.jobs.verification.conformance.case import Case, Input, case

_KINDS = ("height", "samples + space", "uneven", "empty samples", "empty channels", "channels + space")

_UNARY = {
    "normal": """
        abs absolute neg negative exp exp2 expm1 square sign sin cos sinh cosh tanh atan arctan asinh arcsinh
        sigmoid expit erf erfc erfcx relu ceil floor round trunc fix frac nan_to_num sinc positive deg2rad rad2deg
        angle conj conj_physical isreal i0 i0e i1 i1e ndtr log_ndtr""",
    "positive": "log log2 log10 log1p sqrt rsqrt reciprocal lgamma gammaln digamma psi entr",
    "unit": "asin arcsin acos arccos atanh arctanh erfinv logit tan ndtri",
    "above one": "acosh arccosh",
    "ties": "sgn",
    "NaN": "isnan isfinite signbit isposinf isneginf",
    "infinite": "isinf isposinf isneginf nan_to_num",
    "bool": "logical_not bitwise_not",
    "whole numbers": "bitwise_not abs sign",
}
"""Names of functions of one tensor, by what they take."""

_BINARY = {
    "normal": """
        add sub subtract mul multiply div divide true_divide maximum minimum fmax fmin atan2 arctan2 hypot copysign
        logaddexp logaddexp2 fmod remainder""",
    "positive": "pow float_power xlogy xlog1py ldexp",
    "ties": """
        eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose logical_and logical_or logical_xor
        heaviside nextafter zeta gammainc gammaincc igamma igammac floor_divide""",
    "whole numbers": "bitwise_and bitwise_or bitwise_xor gcd lcm",
    "small numbers": "bitwise_left_shift bitwise_right_shift",
}

_FLAT = {"ties"}
"""Operands without gradient, because torch has none for their functions."""

_FLAT_IN_PLACE = {"sgn", "asinh", "arcsinh", "atanh", "arctanh", "acosh", "arccosh"}
"""Functions that torch differentiates, but not in place."""

_ACTIVATIONS = """relu relu6 elu selu celu gelu silu mish softplus hardsigmoid hardswish hardtanh softsign tanhshrink
    hardshrink softshrink logsigmoid leaky_relu sigmoid tanh threshold""".split()

_ARGUMENTS: dict[str, tuple[float, ...]] = {"threshold": (0.1, 20.0)}


def _spelled(name: str) -> Iterator[Callable[..., Any]]:
    """Each way to call ``name``; those in place get a copy of their first operand."""
    for holder in (torch.Tensor, torch, torch.special):
        if hasattr(holder, name):
            yield getattr(holder, name)
    for holder in (torch.Tensor, torch):
        if hasattr(holder, f"{name}_"):
            function = getattr(holder, f"{name}_")
            yield _on_copy(function, name in _FLAT_IN_PLACE)


def _on_copy(function: Callable[..., Any], flat: bool) -> Callable[..., Any]:
    return lambda a, *b: function((a.detach() if flat else a).clone(), *b)


def _every(name: str) -> Callable[..., Any]:
    calls = list(_spelled(name))
    return lambda *operands: tuple(function(*operands) for function in calls)


def _activated(name: str) -> Callable[[torch.Tensor], Any]:
    """An activation as function, as ``inplace=True``, and as the function whose name ends in an underscore."""
    function, arguments = getattr(F, name), _ARGUMENTS.get(name, ())

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [function(x, *arguments)]
        if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters:
            found.append(function(x * 1, *arguments, inplace=True))
        if hasattr(F, f"{name}_"):
            found.append(getattr(F, f"{name}_")(x * 1, *arguments))
        return tuple(found)

    return call


def _unary(domain: str, name: str) -> Case:
    x = Input("N C H W", domain, grad=domain not in _FLAT)
    return case(name, f"every spelling, {domain}", _every(name), x, kinds=_KINDS)


def _binary(domain: str, name: str) -> Case:
    x = Input("N C H W", domain, grad=domain not in _FLAT)
    return case(name, f"of two, every spelling, {domain}", _every(name), x, x, kinds=_KINDS)


def _by_sign(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Python's operators."""
    values = (a + b, a - b, a * b, a / b, a**2, 2**a, 2 + a, 2 - a, 2 * a, 2 / b, -a, +a, abs(a))
    flat_a, flat_b = a.detach(), b.detach()
    whole = (flat_a // flat_b, a % b, 7 // flat_b, 7 % flat_b, flat_a // 2, a % 2)
    return *values, *whole, a < b, a <= b, a > b, a >= b, a == b, a != b, a < 1, a >= 1, a == 1


def _by_bits(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ~a, a & b, a | b, a ^ b, 3 & a, 3 | a, 3 ^ a, a << 1, a >> 1


def _augmented(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a * 1
    a += b
    a -= 0.3
    a *= b
    a /= b
    a **= 2
    return a


def _augmented_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a.clone()
    a &= b
    a |= 4
    a ^= b
    a <<= 2
    a >>= 1
    a //= 3
    a %= 5
    return a


_TWO = (Input("N C H W", "above one"), Input("N C H W", "above one"))
_NUMBERS = (Input("N C H W", "whole numbers"), Input("N C H W", "whole numbers"))

CASES: tuple[Case, ...] = (
    *(_unary(domain, name) for domain, names in _UNARY.items() for name in names.split()),
    *(_binary(domain, name) for domain, names in _BINARY.items() for name in names.split()),
    *(case(name, "activation", _activated(name), Input("N C H W"), kinds=_KINDS) for name in _ACTIVATIONS),
    case("polygamma", "1", lambda x: torch.polygamma(1, x), Input("N C H W", "positive"), kinds=_KINDS),
    case("operators", "+ - * / ** // % and comparisons", _by_sign, *_TWO),
    case("operators", "~ & | ^ << >>", _by_bits, *_NUMBERS),
    case("operators", "+= -= *= /= **=", _augmented, *_TWO),
    case("operators", "&= |= ^= <<= >>= //= %=", _augmented_bits, *_NUMBERS),
)
