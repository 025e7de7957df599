"""Steps of torch's optimizers, gradient clipping, and other changes of parameters between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector

from distconv.jobs.verification.conformance.table import ConformanceCase, Input, Sizes, modules

_OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD, nesterov, foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam, amsgrad, foreach": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    "Adam, fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
}

_CLIPPING: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "clip_grad_norm_": lambda parameters: clip_grad_norm_(parameters, 0.5),
    "clip_grad_norm_, infinite norm": lambda parameters: clip_grad_norm_(parameters, 0.1, norm_type=torch.inf),
    "clip_grad_norm_, foreach=False": lambda parameters: clip_grad_norm_(parameters, 0.5, foreach=False),
    "clip_grad_value_": lambda parameters: clip_grad_value_(parameters, 0.01),
    "gradients halved": lambda parameters: [
        parameter.grad.mul_(0.5) for parameter in parameters if parameter.grad is not None
    ],
    "norm of all parameters": lambda parameters: parameters_to_vector(parameters).norm(),
}


def _network(sizes: Sizes) -> nn.Module:
    c = sizes["c"]
    return nn.Sequential(nn.Conv2d(c, 2 * c, 3, padding=1), nn.BatchNorm2d(2 * c), nn.Tanh(), nn.Conv2d(2 * c, 4, 1))


def _trained(
    build: Callable[..., torch.optim.Optimizer], options: dict[str, Any], change: Callable[..., Any] | None = None
) -> Callable[..., torch.Tensor]:
    """Return a function that takes two steps and returns the outputs of the network.

    ``change`` is applied to the parameters after each backward pass.
    """

    def train(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        parameters = list(module.parameters())
        optimizer = build(parameters, **options)
        for _ in range(2):
            optimizer.zero_grad()
            # The second term depends on parameters alone. Every rank computes its full gradient, which must not be
            # multiplied by the number of ranks.
            (module(x).square().mean() + 0.01 * sum(p.square().sum() for p in parameters)).backward()
            if change is not None:
                change(parameters)
            optimizer.step()
        # The comparison differentiates the result. Gradients of the steps would be added.
        optimizer.zero_grad()
        x.grad = None
        result: torch.Tensor = module(x)
        return result

    return train


_X = Input("N C H W")
_LEAST = {"h": 2, "w": 2}

# The second case of each pair only: the optimizer acts on the parameters of a parallelized module.
CASES: tuple[ConformanceCase, ...] = (
    *(
        one
        for name, (build, options) in _OPTIMIZERS.items()
        for one in modules("optimizer", name, _network, _X, function=_trained(build, options), least=_LEAST)[1:]
    ),
    *(
        one
        for name, change in _CLIPPING.items()
        for one in modules(
            "gradients", name, _network, _X, function=_trained(torch.optim.SGD, {"lr": 0.1}, change), least=_LEAST
        )[1:]
    ),
)
