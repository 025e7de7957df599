"""Operators that act element by element: of one tensor, of two that broadcast, and in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.case import FEW, Case, Input, case, modules, plain

_X = Input("N C H W")

_OF_ONE: dict[tuple[str, str], Callable[[torch.Tensor], Any]] = {
    ("gelu", "tanh"): lambda x: F.gelu(x, approximate="tanh"),
    ("leaky_relu", "0.2"): lambda x: F.leaky_relu(x, 0.2),
    ("clamp", "two numbers"): lambda x: x.clamp(-0.5, 0.7),
    ("clamp", "min"): lambda x: torch.clamp(x, min=0.1),
    ("threshold", "0.1, 20"): lambda x: F.threshold(x, 0.1, 20.0),
    ("pow", "3"): lambda x: x**3,
    ("pow", "of 2"): lambda x: 2**x,
    ("div", "floor"): lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    ("remainder", "0.3"): lambda x: x % 0.3,
    ("rsub", "1 - x"): lambda x: 1 - x,
    ("rdiv", "2 / (x x + 1) - 3"): lambda x: 2 / (x * x + 1) - 3,
    ("masked_fill", "of its own sign"): lambda x: x.masked_fill(x > 0.5, -1.0),
    ("where", "a number"): lambda x: torch.where(x > 0, x, 0.5),
    ("detach", "x times a constant"): lambda x: x * x.detach(),
    ("clone", ""): lambda x: x.clone() * 2,
    ("to", "float32 and back"): lambda x: x.float().double(),
    ("to", "bool"): lambda x: (x > 0).to(torch.float64) * x,
    ("zeros_like", "and ones, full"): lambda x: torch.zeros_like(x) + torch.ones_like(x) * torch.full_like(x, 3.0) + x,
    ("new_zeros", "of its shape"): lambda x: x + x.new_zeros(x.shape),
    ("new_ones", "of its channels"): lambda x: x * x.new_ones(x.shape[1], 1, 1),
    ("glu", "over C"): lambda x: F.glu(x, 1),
    ("glu", "over W"): lambda x: F.glu(torch.cat([x, x * 2], 3), 3),
    ("tril", ""): lambda x: x.tril(),
    ("gumbel_softmax", "over C"): lambda x: F.gumbel_softmax(x, dim=1),
}

_OF_TWO: dict[str, Callable[..., Any]] = {
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b * b + 1),
    "where of two": lambda a, b: torch.where(a > b, a, b),
    "pow of two": lambda a, b: (a * a + 0.1) ** b,
    "clamp by tensors": lambda a, b: a.clamp(b - 1, b + 0.5),
}

_SECONDS: dict[str, Input] = {
    "same layout": _X,
    "per channel": Input("C 1 1"),
    "plain, per channel": plain("c 1 1"),
    "plain, of full size": plain("n c h w"),
    "replicated": Input("N C H W", layout="whole"),
    "balanced": Input("N C H W", layout="balanced"),
    "per sample": Input("N 1 1 1"),
    "per row": Input("H 1"),
    "a plain number": plain(""),
    "ties": Input("N C H W", "ties"),
}
"""Second operands, by their layout."""

_IN_PLACE: dict[tuple[str, str], Callable[[torch.Tensor, torch.Tensor], Any]] = {
    ("add_", ""): lambda a, b: (a * 2).add_(b),
    ("mul_", "of itself"): lambda a, b: (a + b).mul_(a),
    ("relu_", ""): lambda a, b: F.relu_(a + b),
    ("relu", "inplace=True"): lambda a, b: F.relu(a * b, inplace=True),
    ("clamp_", ""): lambda a, b: (a + b).clamp_(-0.5, 0.5),
    ("copy_", "over itself"): lambda a, b: (a * 1).copy_(a * b) + a,
    ("copy_", ""): lambda a, b: (a * 0).copy_(b),
    ("zero_", ""): lambda a, b: (a * 1).zero_() + b,
    ("fill_", ""): lambda a, b: (a * 1).fill_(2.0) * b,
    ("masked_fill_", ""): lambda a, b: (a * 1).masked_fill_(b > 0, 3.0),
    ("addcmul_", ""): lambda a, b: (a * 1).addcmul_(a, b, value=0.5),
    ("lerp_", ""): lambda a, b: (a * 1).lerp_(b, 0.3),
    ("in place", "of a view by view()"): lambda a, b: _changed(a * 1, lambda y: y.view(y.shape[0], -1).mul_(2)) + b,
    ("in place", "of a flattened view"): lambda a, b: _changed(a * 1, lambda y: y.flatten(2).add_(1)) + b,
    ("in place", "of an unsqueezed view"): lambda a, b: _changed(a * 1, lambda y: y.unsqueeze(0).add_(1)) + b,
    ("in place", "of a transposed view"): lambda a, b: _changed(a * 1, lambda y: y.transpose(2, 3).mul_(3)) + b,
    ("in place", "of some channels"): lambda a, b: _changed(a * 1, lambda y: y[:, :1].mul_(0.5)) + b,
    ("in place", "of some rows"): lambda a, b: _changed(a * 1, lambda y: y[:, :, 1:].mul_(0.5)) + b,
    ("in place", "of a narrow part"): lambda a, b: _changed(a * 1, lambda y: y.narrow(3, 0, 1).zero_()) + b,
    ("in place", "of a chunk"): lambda a, b: _changed(a * 1, lambda y: y.chunk(2, 3)[0].zero_()) + b,
    ("in place", "of detached data"): lambda a, b: _changed(a * 1, lambda y: y.detach().clamp_(max=0.5)) + b,
    ("in place", "through .data"): lambda a, b: _changed(a * 1, lambda y: y.data.mul_(2.0)) + b,
    ("in place", "seen by a flattened view"): lambda a, b: _seen(a * 1, lambda y: y.flatten(1)) + b,
    ("in place", "seen by one row"): lambda a, b: _seen(a * 1, lambda y: y[:, :, -1:].squeeze(2)[:, :, None]) + b,
    ("setitem", "[:, 0] = 1"): lambda a, b: _assigned(a * b),
}


def _changed(a: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    change(a)
    return a


def _seen(a: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What a view taken before ``a`` is changed shows afterwards."""
    before = view(a)
    F.relu(a, inplace=True)
    return before.sum() * a


def _assigned(a: torch.Tensor) -> torch.Tensor:
    a[:, 0] = 1.0
    return a


CASES: tuple[Case, ...] = (
    *(case(name, option, function, _X, multiple=2, kinds=FEW) for (name, option), function in _OF_ONE.items()),
    *(case(name, "same layout", function, _X, _X, kinds=FEW) for name, function in _OF_TWO.items()),
    *(case("mul", option, lambda a, b: a * b, _X, b) for option, b in _SECONDS.items() if option != "same layout"),
    *(case("sub", f"{option}, first", lambda a, b: b - a, _X, b) for option, b in _SECONDS.items() if b is not _X),
    case("maximum", "ties", lambda a, b: torch.maximum(a, b), Input("N C H W", "ties"), Input("N C H W", "ties")),
    case("where", "condition per pixel", lambda c, a: torch.where(c, a, -a), Input("N 1 H W", "bool"), _X),
    *(case(name, option, function, _X, _X) for (name, option), function in _IN_PLACE.items()),
    case("add_", "a plain number", lambda a, b: (a * 1).add_(b), _X, plain("")),
    *modules("nn.PReLU", "one slope", lambda sizes: nn.PReLU(), _X),
    *modules("nn.PReLU", "a slope per channel", lambda sizes: nn.PReLU(sizes["c"]), _X),
    *modules("nn.ReLU", "inplace=True", lambda sizes: nn.ReLU(inplace=True), _X, function=lambda m, x: m(x * 1))[:1],
    *modules("nn.SiLU", "inplace=True", lambda sizes: nn.SiLU(inplace=True), _X, function=lambda m, x: m(x * 1))[:1],
)
