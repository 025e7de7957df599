"""Other ways to call the same operators: autograd modes, autocast, modules without samples, random operators.

Cases that change a tensor in place copy it first (``x * 1``): torch rejects such changes of a leaf that requires a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.table import FEW, ConformanceCase, Input, Sizes, case, modules, plain

_X, _LABELS, _ROWS = Input("N C H W"), Input("N H W", "classes"), Input("N C")


def _without_gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = F.conv2d(x, w, padding=1)
    return y * x


def _inferred(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return F.conv2d(x * 1, w, padding=1)


def _penalty(x: torch.Tensor) -> torch.Tensor:
    """Return a term on dL/dx, as in gradient penalties. The differentiated function is elementwise."""
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return gradient * x


def _gradient_of_weight(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(F.conv2d(x, w, padding=1).square().sum(), w)
    return x * gradient.mean()


def _under_autocast(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*given: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(*given)

    return call


# An operator that takes the result of a convolution has an input in bfloat16.
_AUTOCAST: dict[str, tuple[Callable[..., torch.Tensor], tuple[Input, ...]]] = {
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (_X, plain("4 c 3 3"))),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (_X, plain("c 3 2 2"))),
    "linear": (lambda x, w: F.linear(x, w), (_ROWS, plain("3 c"))),
    "matmul": (lambda x, w: x @ w, (_X, plain("w 3"))),
    "batch_norm": (lambda x, w: F.batch_norm(F.conv2d(x, w), None, None, training=True), (_X, plain("4 c 3 2"))),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), (_X, _LABELS)),
    "softmax": (lambda x, w: F.conv2d(x, w).softmax(1), (_X, plain("4 c 1 1"))),
    "mul": (lambda x, w: F.conv2d(x, w) * x.mean(1, keepdim=True), (_X, plain("4 c 1 1"))),
}


def _dropout_twice(x: torch.Tensor) -> torch.Tensor:
    """Apply two masks in sequence, with another random number between them."""
    return F.dropout(F.dropout(x, 0.3) + torch.rand(()), 0.3)


_RANDOM: dict[tuple[str, str], Callable[[torch.Tensor], Any]] = {
    ("dropout", "twice"): _dropout_twice,
    ("dropout", "in place"): lambda x: F.dropout(x * 1, 0.4, inplace=True),
    ("dropout", "of tokens"): lambda x: F.dropout(x.flatten(2).transpose(1, 2), 0.4),
    ("dropout", "of permuted dimensions"): lambda x: F.dropout(x.permute(0, 2, 3, 1).sin(), 0.4),
    ("dropout", "channels_last"): lambda x: F.dropout(x.to(memory_format=torch.channels_last), 0.4),
    ("dropout1d", "of tokens"): lambda x: F.dropout1d(x.flatten(2), 0.4),
    ("randn_like", "of some channels, transposed"): lambda x: x[:, 1:].mT + torch.randn_like(x[:, 1:].mT),
    ("gumbel_softmax", "over C"): lambda x: F.gumbel_softmax(x, dim=1),
    **{
        # name=name: a lambda in a loop would otherwise see the last name.
        (name, "in place"): lambda x, name=name: getattr(x * 0 + 0.5, name)() * x  # type: ignore[misc]
        for name in ("bernoulli_", "random_", "normal_")
    },
}
"""Calls that draw random numbers. The reference draws them in one process from the same seed."""

_FURTHER: dict[tuple[str, str], Callable[[torch.Tensor], Any]] = {
    ("iteration", "over samples"): lambda x: tuple(x),
    ("reversed, in", ""): lambda x: (reversed(x), x * float(x[0, 0, 0, 0].item() in x.detach())),
    ("getitem", "[:, None, ..., 1:-1, 2:]"): lambda x: x[:, None, ..., :-1, 2:],
    ("getitem", "a mask"): lambda x: x[x > 0],
    ("detach", "x times a constant"): lambda x: x * x.detach(),
    ("any, all", "of a comparison"): lambda x: ((x > 1).any(), (x > -1).all(), (x > 1).any(1), (x > -9).all(3)),
    ("unsqueeze_, squeeze_, transpose_", ""): lambda x: (x * 1).unsqueeze_(0).squeeze_(0).transpose_(2, 3),
    ("new_ones", "of its channels"): lambda x: x * x.new_ones(x.shape[1], 1, 1),
    ("affine_grid", ""): lambda x: F.affine_grid(x.mean((2, 3))[:, :1, None].expand(-1, 2, 3), [x.shape[0], 1, 2, 3]),
    ("view", "groups of channels"): lambda x: x.view(x.shape[0], 2, -1, *x.shape[2:]),
    ("reshape", "channels and rows"): lambda x: x.reshape(x.shape[0], -1, x.shape[3]),
    ("flatten", "N, C"): lambda x: x.flatten(0, 1),
    ("contiguous", "after a transposition"): lambda x: x.transpose(1, 3).contiguous() * 2,
}

_MODULES: dict[str, tuple[Callable[[Sizes], nn.Module], tuple[Input, ...]]] = {
    "nn.Flatten": (lambda sizes: nn.Flatten(), (_X,)),
    "nn.Unflatten": (lambda sizes: nn.Unflatten(1, (2, -1)), (_X,)),
    "nn.Unfold": (lambda sizes: nn.Unfold(2), (_X,)),
    "nn.Dropout": (lambda sizes: nn.Dropout(0.4), (_X,)),
    "nn.Dropout2d": (lambda sizes: nn.Dropout2d(0.4), (_X,)),
    "nn.Bilinear": (lambda sizes: nn.Bilinear(sizes["c"], sizes["c"], 3), (_ROWS, _ROWS)),
    "nn.RNN": (lambda sizes: nn.RNN(sizes["c"], 3), (Input("W N C"),)),
    "nn.GRU": (lambda sizes: nn.GRU(sizes["c"], 3, 2, batch_first=True, bidirectional=True), (Input("N W C"),)),
}

CASES: tuple[ConformanceCase, ...] = (
    case("conv2d", "no_grad", _without_gradient, _X, plain("c c 3 3")),
    case("conv2d", "inference_mode", _inferred, _X, plain("c c 3 3")),
    case("autograd.grad", "create_graph, elementwise", _penalty, _X),
    case("autograd.grad", "of a weight", _gradient_of_weight, _X, plain("3 c 3 3")),
    # The comparison has the tolerance of float32, 1e-5. The condition makes it that of bfloat16, 2e-2.
    *(
        case(name, "autocast to bfloat16", _under_autocast(call), *given, dtype=torch.float32, condition=2e3, kinds=FEW)
        for name, (call, given) in _AUTOCAST.items()
    ),
    *(case(name, option, function, _X) for (name, option), function in _RANDOM.items()),
    *(
        case(name, option, function, _X, multiple=2, least={"h": 2, "w": 3})
        for (name, option), function in _FURTHER.items()
    ),
    # As built only: the first of the two cases of a module.
    *(
        modules(name, "", build, *given, multiple=2, least={"h": 2, "w": 2}, kinds=FEW)[0]
        for name, (build, given) in _MODULES.items()
    ),
    *modules(
        "nn.MultiheadAttention",
        "2 heads",
        lambda sizes: nn.MultiheadAttention(sizes["c"], 2, batch_first=True),
        Input("N W C"),
        function=lambda module, x: module(x, x, x, need_weights=False)[0],
        multiple=2,
    ),
)
