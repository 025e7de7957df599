"""Kinds of operands: other distributions, plain, broadcast, views changed in place, Python operators, keywords.

Cases that change a tensor in place copy it first (``a * 1``): torch rejects such changes of a leaf that requires a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.table import FEW, ConformanceCase, Input, case, fixed, plain

_X, _LABELS = Input("N C H W"), Input("N H W", "classes")

_SECOND_OPERANDS: dict[str, Input] = {
    "per channel": Input("C 1 1"),
    "plain, per channel": plain("c 1 1"),
    "plain, of full size": plain("n c h w"),
    "replicated": Input("N C H W", layout="replicated"),
    "balanced": Input("N C H W", layout="balanced"),
    "per sample": Input("N 1 1 1"),
    "per row": Input("H 1"),
    "a plain number": plain(""),
    "split over the other axes": Input("N C W:h H:w"),
    "samples over c": Input("C:n N:c H W"),
    "one channel, split": Input("N C=1 H W"),
    "one row, split": Input("N C H=1 W"),
    "one sample, split": Input("N=1 C H W"),
    "without gradient": fixed("N C W:h H:w"),
}
"""Second operands, by their shape and distribution."""

_CONCATENATED: dict[str, Input] = {
    "another number of channels": Input("N C+2 H W"),
    "balanced": Input("N C H W", layout="balanced"),
    "replicated": Input("N C H W", layout="replicated"),
    "plain": plain("n c h w"),
    "split over the other axes": fixed("N C W:h H:w"),
}
"""Second operands of a concatenation along C."""

_LOSSES: dict[tuple[str, str], tuple[Callable[..., Any], Input, Input]] = {
    ("cross_entropy", "plain labels"): (F.cross_entropy, _X, plain("n h w", "classes")),
    ("cross_entropy", "plain logits"): (F.cross_entropy, plain("n c h w"), _LABELS),
    ("cross_entropy", "balanced labels"): (F.cross_entropy, _X, Input("N H W", "classes", layout="balanced")),
    ("cross_entropy", "labels split over the other axes"): (F.cross_entropy, _X, Input("N W:h H:w", "classes")),
    ("cross_entropy", "voxels"): (F.cross_entropy, Input("N C D H W"), Input("N D H W", "classes")),
    ("cross_entropy", "probabilities"): (F.cross_entropy, _X, fixed("N C H W", "probabilities")),
    ("mse_loss", "target split over the other axes"): (F.mse_loss, _X, Input("N C W:h H:w")),
    ("mse_loss", "plain target"): (F.mse_loss, _X, plain("n c h w")),
    ("l1_loss", "plain input"): (F.l1_loss, plain("n c h w"), _X),
}
"""Losses, inputs and targets."""

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    # numpy's own multiplication is tried first, and must not take the tensor for an array.
    "a numpy number first": lambda x: np.float64(2.5) * x,
    "a numpy number behind": lambda x: x * np.float64(2.5),
    "True": lambda x: x + True,
    "a 0-dim tensor of float32": lambda x: x * torch.tensor(0.1, dtype=torch.float32),
    "a 1-element tensor": lambda x: torch.tensor([0.5], dtype=torch.float64) - x,
    "a nn.Parameter": lambda x: x * nn.Parameter(torch.tensor(2.0, dtype=torch.float64)),
    "its own global mean": lambda x: x - x.mean(),
    "its own row means": lambda x: x - x.mean(3, keepdim=True),
    "itself turned": lambda x: x.mean(2, keepdim=True) * x.mean(3, keepdim=True),
    "plain coordinates": lambda x: x + torch.arange(x.shape[3]) * torch.arange(x.shape[2])[:, None],
}

_VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "of a view by view()": lambda y: y.view(y.shape[0], -1).mul_(2),
    "of a flattened view": lambda y: y.flatten(2).add_(1),
    "of an unsqueezed view": lambda y: y.unsqueeze(0).add_(1),
    "of a transposed view": lambda y: y.transpose(2, 3).mul_(3),
    "of some channels": lambda y: y[:, :1].mul_(0.5),
    "of some rows": lambda y: y[:, :, 1:].mul_(0.5),
    "of a narrow part": lambda y: y.narrow(3, 0, 1).zero_(),
    "of a chunk": lambda y: y.chunk(2, 3)[0].zero_(),
    "of detached data": lambda y: y.detach().clamp_(max=0.5),
    "through .data": lambda y: y.data.mul_(2.0),
    "by setitem": lambda y: y.__setitem__((slice(None), 0), 1.0),
    "by copy_": lambda y: y.copy_(y * 3),
}
"""Changes of a tensor through views of it."""

_EARLIER_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a flattened view": lambda y: y.flatten(1),
    "one row": lambda y: y[:, :, -1:].squeeze(2)[:, :, None],
}
"""Views that are read after their tensor has changed in place."""

# All arguments by keyword: a rule that reads them by position fails here.
_KEYWORDS: dict[str, Callable[..., Any]] = {
    "conv2d": lambda x, w: F.conv2d(input=x, weight=w, padding=1),
    "max_pool2d": lambda x, w: F.max_pool2d(input=x, kernel_size=3, stride=1, padding=1),
    "avg_pool2d": lambda x, w: F.avg_pool2d(input=x, kernel_size=3, stride=1, padding=1),
    "batch_norm": lambda x, w: F.batch_norm(input=x, running_mean=None, running_var=None, training=True),
    "interpolate": lambda x, w: F.interpolate(input=x, scale_factor=2, mode="nearest"),
    "pad": lambda x, w: F.pad(input=x, pad=[1, 1, 2, 0]),
    "relu": lambda x, w: F.relu(input=x * 1, inplace=True),
    "mul": lambda x, w: torch.mul(input=x, other=w.mean()),
    "where": lambda x, w: torch.where(condition=x > 0, input=x, other=w.mean()),
    "cat": lambda x, w: torch.cat(tensors=[x, x * w.mean()], dim=1),
    "stack": lambda x, w: torch.stack(tensors=[x, x], dim=0),
    "sum": lambda x, w: torch.sum(input=x, dim=[2, 3]) + x.sum(axis=(2, 3)),
    "mean": lambda x, w: torch.mean(input=x, dim=1, keepdim=True),
    "amax": lambda x, w: torch.amax(input=x, dim=(2, 3)),
    "softmax": lambda x, w: F.softmax(input=x, dim=1),
    "flatten": lambda x, w: torch.flatten(input=x, start_dim=1),
    "reshape": lambda x, w: torch.reshape(input=x, shape=(x.shape[0], -1)),
    "permute": lambda x, w: torch.permute(input=x, dims=(0, 2, 3, 1)),
    "transpose": lambda x, w: torch.transpose(input=x, dim0=-1, dim1=-2),
    "clamp": lambda x, w: x.clamp(max=0.5),
    "linear": lambda x, w: F.linear(input=x.mean((2, 3)), weight=w.mean((2, 3))),
    "dropout": lambda x, w: F.dropout(input=x, p=0.4),
    "group_norm": lambda x, w: F.group_norm(input=x, num_groups=1),
    "cross_entropy": lambda x, w: F.cross_entropy(input=x, target=x.detach().softmax(dim=1)),
    "mse_loss": lambda x, w: F.mse_loss(input=x, target=x.detach() * 2),
}


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * (b + 1)


def _concatenate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a, b], 1)


def _concatenate_cropped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a[:, :, 1 : 1 + b.shape[2], 2 : 2 + b.shape[3]], b], 1)


def _change_in_place(change: Callable[[torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = a * 1
        change(y)
        return y + b

    return call


def _read_earlier_view(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a call that reads a view after the tensor it was taken from has changed in place."""

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = a * 1
        earlier = view(y)
        F.relu(y, inplace=True)
        return earlier.sum() * y + b

    return call


def _python_operators(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Apply Python's operators. Those that have no gradient get detached tensors."""
    values = (a + b, a - b, a * b, a / b, a**2, 2**a, 2 + a, 2 - a, 2 * a, 2 / b, -a, +a, abs(a))
    flat_a, flat_b = a.detach(), b.detach()
    rounded = (flat_a // flat_b, a % b, 7 // flat_b, 7 % flat_b, flat_a // 2, a % 2)
    return *values, *rounded, a < b, a <= b, a > b, a >= b, a == b, a != b, a < 1, a >= 1, a == 1


def _bit_operators(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ~a, a & b, a | b, a ^ b, 3 & a, 3 | a, 3 ^ a, a << 1, a >> 1


def _augmented_assignments(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a * 1
    a += b
    a -= 0.3
    a *= b
    a /= b
    a **= 2
    return a


def _augmented_bit_assignments(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a.clone()
    a &= b
    a |= 4
    a ^= b
    a <<= 2
    a >>= 1
    a //= 3
    a %= 5
    return a


_TWO_NUMBERS = (Input("N C H W", "above one"),) * 2
_TWO_WHOLE_NUMBERS = (Input("N C H W", "whole numbers"),) * 2

CASES: tuple[ConformanceCase, ...] = (
    *(case("mul", f"second {name}", _multiply, _X, b) for name, b in _SECOND_OPERANDS.items()),
    *(case("mul", f"first {name}", _multiply, b, _X) for name, b in _SECOND_OPERANDS.items()),
    *(case("cat", f"C, second {name}", _concatenate, _X, b) for name, b in _CONCATENATED.items()),
    *(case("cat", f"C, first {name}", _concatenate, b, _X) for name, b in _CONCATENATED.items() if name == "plain"),
    case("cat", "W, second balanced", lambda a, b: torch.cat([a, b], 3), _X, _CONCATENATED["balanced"]),
    case("cat", "skip connection, cropped", _concatenate_cropped, _X, Input("N C H-2 W-4"), least={"h": 3, "w": 5}),
    *(case(name, option, function, *given) for (name, option), (function, *given) in _LOSSES.items()),
    *(case("arithmetic", f"with {name}", function, _X, kinds=FEW) for name, function in _ARITHMETIC.items()),
    *(case("in place", option, _change_in_place(change), _X, _X) for option, change in _VIEWS.items()),
    *(case("in place", f"seen by {name}", _read_earlier_view(view), _X, _X) for name, view in _EARLIER_VIEWS.items()),
    case("operators", "+ - * / ** // % and comparisons", _python_operators, *_TWO_NUMBERS),
    case("operators", "~ & | ^ << >>", _bit_operators, *_TWO_WHOLE_NUMBERS),
    case("operators", "+= -= *= /= **=", _augmented_assignments, *_TWO_NUMBERS),
    case("operators", "&= |= ^= <<= >>= //= %=", _augmented_bit_assignments, *_TWO_WHOLE_NUMBERS),
    *(case(name, "keywords", function, _X, plain("c c 3 3"), kinds=FEW) for name, function in _KEYWORDS.items()),
)
