"""Other ways to call the same operators: keywords, odd operands, autograd modes, autocast, operands split otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.case import FEW, Case, Input, case, fixed, modules, plain

_X, _LABELS = Input("N C H W"), Input("N H W", "classes")

_KEYWORDS: dict[str, Callable[..., Any]] = {
    "conv2d": lambda x, w: F.conv2d(input=x, weight=w, padding=1),
    "max_pool2d": lambda x, w: F.max_pool2d(input=x, kernel_size=3, stride=1, padding=1),
    "avg_pool2d": lambda x, w: F.avg_pool2d(input=x, kernel_size=3, stride=1, padding=1),
    "batch_norm": lambda x, w: F.batch_norm(input=x, running_mean=None, running_var=None, training=True),
    "interpolate": lambda x, w: F.interpolate(input=x, scale_factor=2, mode="nearest"),
    "pad": lambda x, w: F.pad(input=x, pad=[1, 1, 2, 0]),
    "relu": lambda x, w: F.relu(input=x),
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

_ODD_OPERANDS: dict[str, Callable[..., Any]] = {
    "a numpy number first": lambda x: np.float64(2.5) * x,
    "a numpy number behind": lambda x: x * np.float64(2.5),
    "True": lambda x: x + True,
    "a 0-dim tensor of float32": lambda x: x * torch.tensor(0.1, dtype=torch.float32),
    "a 1-element tensor": lambda x: torch.tensor([0.5], dtype=torch.float64) - x,
    "a nn.Parameter": lambda x: x * nn.Parameter(torch.tensor(2.0, dtype=torch.float64)),
    "its own global mean": lambda x: x - x.mean(),
    "its own row means": lambda x: x - x.mean(3, keepdim=True),
    "itself turned": lambda x: x.mean(2, keepdim=True) * x.mean(3, keepdim=True),
}

_OTHERWISE: dict[str, Input] = {
    "split over the other axes": Input("N C W:h H:w"),
    "samples over c": Input("C:n N:c H W"),
    "one channel, split": Input("N C=1 H W"),
    "one row, split": Input("N C H=1 W"),
    "one sample, split": Input("N=1 C H W"),
    "without gradient": fixed("N C W:h H:w"),
}
"""Second operands whose distribution is another one, or whose split extents are broadcast."""


def _scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * (b + 1)


def _without_gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = F.conv2d(x, w, padding=1)
    return y * x


def _inferred(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return F.conv2d(x * 1, w, padding=1)


def _penalty(x: torch.Tensor) -> torch.Tensor:
    """A term on dL/dx, as in gradient penalties; elementwise up to here."""
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return gradient * x


def _own_gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(F.conv2d(x, w, padding=1).square().sum(), w)
    return x * gradient.mean()


def _under_autocast(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*given: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(*given)

    return call


_AUTOCAST: dict[str, tuple[Callable[..., torch.Tensor], tuple[Input, ...]]] = {
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (_X, plain("4 c 3 3"))),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (_X, plain("c 3 2 2"))),
    "linear": (lambda x, w: F.linear(x, w), (Input("N C"), plain("3 c"))),
    "matmul": (lambda x, w: x @ w, (_X, plain("w 3"))),
    "batch_norm": (lambda x, w: F.batch_norm(F.conv2d(x, w), None, None, training=True), (_X, plain("4 c 3 2"))),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), (_X, _LABELS)),
    "softmax": (lambda x, w: F.conv2d(x, w).softmax(1), (_X, plain("4 c 1 1"))),
    "mul": (lambda x, w: F.conv2d(x, w) * x.mean(1, keepdim=True), (_X, plain("4 c 1 1"))),
}

CASES: tuple[Case, ...] = (
    *(case(name, "keywords", function, _X, plain("c c 3 3"), kinds=FEW) for name, function in _KEYWORDS.items()),
    *(case("arithmetic", f"with {name}", function, _X, kinds=FEW) for name, function in _ODD_OPERANDS.items()),
    *(case("mul", f"second {name}", _scaled, _X, b) for name, b in _OTHERWISE.items()),
    *(case("mul", f"first {name}", _scaled, b, _X) for name, b in _OTHERWISE.items()),
    case(
        "cat",
        "C, second split over the other axes",
        lambda a, b: torch.cat([a, b], 1),
        _X,
        _OTHERWISE["without gradient"],
    ),
    case("mse_loss", "target split over the other axes", F.mse_loss, _X, Input("N C W:h H:w")),
    case("cross_entropy", "labels split over the other axes", F.cross_entropy, _X, Input("N W:h H:w", "classes")),
    case("conv2d", "no_grad", _without_gradient, _X, plain("c c 3 3")),
    case("conv2d", "inference_mode", _inferred, _X, plain("c c 3 3")),
    case("autograd.grad", "create_graph, elementwise", _penalty, _X),
    case("autograd.grad", "of a weight", _own_gradient, _X, plain("3 c 3 3")),
    *(
        case(
            name,
            "autocast to bfloat16",
            _under_autocast(function),
            *given,
            dtype=torch.float32,
            condition=2e3,
            kinds=FEW,
        )
        for name, (function, given) in _AUTOCAST.items()
    ),
    *modules("nn.Flatten", "", lambda sizes: nn.Flatten(), _X)[:1],
    *modules("nn.Unflatten", "", lambda sizes: nn.Unflatten(1, (2, -1)), _X, multiple=2)[:1],
    *modules("nn.Unfold", "K2", lambda sizes: nn.Unfold(2), _X, least={"h": 2, "w": 2})[:1],
    *modules("nn.Bilinear", "", lambda sizes: nn.Bilinear(sizes["c"], sizes["c"], 3), Input("N C"), Input("N C"))[:1],
    *modules(
        "nn.MultiheadAttention",
        "2 heads",
        lambda sizes: nn.MultiheadAttention(sizes["c"], 2, batch_first=True),
        Input("N W C"),
        function=lambda module, x: module(x, x, x, need_weights=False)[0],
        multiple=2,
    ),
    *modules("nn.RNN", "", lambda sizes: nn.RNN(sizes["c"], 3), Input("W N C"), kinds=FEW)[:1],
    *modules("nn.GRU", "", lambda sizes: nn.GRU(sizes["c"], 3, batch_first=True), Input("N W C"), kinds=FEW)[:1],
    *modules(
        "nn.GRU",
        "2 layers, bidirectional",
        lambda sizes: nn.GRU(sizes["c"], 3, 2, batch_first=True, bidirectional=True),
        Input("N W C"),
        kinds=FEW,
    )[:1],
)
