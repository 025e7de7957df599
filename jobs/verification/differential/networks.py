"""Draws small networks and training steps, which show gradients that are summed over the wrong ranks.

A network is a body of blocks, a head and a loss. In addition to the plain step there are the ways in which users handle
gradients: loss terms on parameters, accumulation, hooks, ``torch.autograd.grad``, parameters that are tied or unused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.families.blocks import BLOCKS
from distconv.jobs.verification.differential.draw import Draw, DrawnProgram
from distconv.jobs.verification.engine.backends import ReferenceBackend

CLASSES = 3


class PixelHead(nn.Module):
    """Classes of every pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.last = nn.Conv2d(channels, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)  # type: ignore[no-any-return]


class LinearHead(nn.Module):
    """Classes of every sample: global pooling (one of three ways) and two linear layers."""

    def __init__(self, channels: int, pooling: str) -> None:
        super().__init__()
        self.pooling = pooling
        self.first = nn.Linear(4 * channels if pooling == "flatten" else channels, 5)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pooling == "mean":
            pooled = x.mean((2, 3))
        elif self.pooling == "flatten":
            pooled = F.adaptive_avg_pool2d(x, 2).flatten(1)
        else:
            pooled = F.adaptive_avg_pool2d(x, 1).view(x.shape[0], -1)
        return self.last(F.relu(self.first(pooled)))  # type: ignore[no-any-return]


def _convolutions(draw: Draw, channels: int) -> nn.Module:
    kernel, stride = draw.number(1, 5), draw.pick(1, 1, 2)
    layers: list[nn.Module] = [nn.Conv2d(channels, channels, kernel, stride, kernel // 2, bias=draw.chance(0.7))]
    if draw.chance(0.5):
        layers.append(nn.BatchNorm2d(channels))
    return nn.Sequential(*layers, draw.pick(nn.ReLU, nn.GELU, nn.Tanh)())


_DRAWN: dict[str, Callable[[Draw, int], nn.Module]] = {
    "convolutions": _convolutions,
    "max pool": lambda draw, c: nn.MaxPool2d(draw.number(2, 3), draw.number(1, 2), 1),
    "average pool": lambda draw, c: nn.AvgPool2d(2, ceil_mode=True),
    "PReLU": lambda draw, c: nn.PReLU(draw.pick(1, c)),
}


class DrawnNetwork(nn.Module):
    """Body and head. A function between them may, for example, gather the features to a plain tensor on every rank."""

    def __init__(self, blocks: list[nn.Module], head: nn.Module, unused: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*blocks), head
        if unused:
            self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, between: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the output of the head for the body's features, to which ``between`` is applied.

        Parameters
        ----------
        x : torch.Tensor
        between : callable
            Function applied to the features.

        Returns
        -------
        torch.Tensor
        """
        return self.head(between(self.body(x)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Habits:
    """Options of a training step in addition to the plain forward, backward and update."""

    parallel: bool
    l2: bool
    accumulate: int
    gradients: str
    """``backward``, or ``grad`` for torch.autograd.grad."""
    hooks: str
    """Kind of hooks, which must receive full gradients (``none``, ``tensor``, ``accumulated``, ``node``, ``layer``)."""
    gathered: bool
    """True runs the head on a gathered, plain tensor."""
    frozen: bool
    clipped: bool
    to_input: bool
    """True computes dL/dx, too."""

    def __str__(self) -> str:
        told = [f"x{self.accumulate}", self.gradients, f"hooks {self.hooks}"]
        switches = ("parallel", "l2", "gathered", "frozen", "clipped", "to_input")
        return ", ".join(told + [name for name in switches if getattr(self, name)])


def draw_habits(draw: Draw) -> Habits:
    """Draw the options of a training step."""
    return Habits(
        parallel=draw.chance(0.6),
        l2=draw.chance(0.3),
        accumulate=draw.pick(1, 1, 2),
        gradients=draw.weighted(["backward", "grad"], [6, 1]),
        hooks=draw.weighted(["none", "tensor", "accumulated", "node", "layer"], [6, 1, 1, 1, 1]),
        gathered=draw.chance(0.15),
        frozen=draw.chance(0.15),
        clipped=draw.chance(0.15),
        to_input=draw.chance(0.5),
    )


def draw_network(draw: Draw, channels: int) -> tuple[DrawnNetwork, str]:
    """Return a network of two input channels, and a description of its parts.

    Parameters
    ----------
    draw : Draw
    channels : int
        Channels of the first layer.

    Returns
    -------
    (DrawnNetwork, str)
    """
    names = [draw.pick(*BLOCKS, *_DRAWN, *_DRAWN) for _ in range(draw.number(1, 3))]
    head_name = draw.pick("pixels", "mean", "flatten", "pooled")
    torch.default_generator.manual_seed(draw.seed)
    blocks: list[nn.Module] = [nn.Conv2d(2, channels, 3, padding=1)]
    blocks += [_DRAWN[name](draw, channels) if name in _DRAWN else BLOCKS[name](channels) for name in names]
    head = PixelHead(channels) if head_name == "pixels" else LinearHead(channels, head_name)
    unused = draw.chance(0.2)
    text = ", ".join([*names, head_name, *["unused"] * unused])
    return DrawnNetwork(blocks, head, unused).double(), text


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LOSSES: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "mean of squares": lambda y, t: ((y - t[:, None]) ** 2).mean(),
    "sum": lambda y, t: F.cross_entropy(y, t, reduction="sum") / t.shape[0],
}
"""Losses of a network's output ``y`` and of classes ``t``."""


def draw(source: Draw) -> DrawnProgram:
    """Draw a network, its data and the options of its steps; two steps of SGD with momentum."""
    # The order of the draws defines the case of a seed: another order changes all cases, and the approved ones.
    channels = source.number(1, 4)
    network, text = draw_network(source, channels)
    network.train(source.chance(0.9))
    habits = draw_habits(source)
    sizes = source.numbers(2, 4, 11)
    samples = source.number(1, 5)
    steps = 2 * habits.accumulate
    images = [source.tensor(samples, 2, *sizes) for _ in range(steps)]
    shape = result_shape(network, images[0])
    targets = [source.classes(samples, *shape[2:], below=CLASSES) for _ in range(steps)]
    loss_name = source.pick(*LOSSES)

    def run(backend: ReferenceBackend) -> None:
        _train(backend, network, habits, LOSSES[loss_name], list(zip(images, targets, strict=True)))

    return DrawnProgram("network", f"{text}; {loss_name}; {habits}; C={channels} {tuple(images[0].shape)}", run, 2)


def result_shape(network: DrawnNetwork, x: torch.Tensor) -> torch.Size:
    """Return the shape of the output of ``network`` for ``x``.

    Parameters
    ----------
    network : DrawnNetwork
    x : torch.Tensor

    Returns
    -------
    torch.Size
    """
    # Of a copy in evaluation mode, so that the running statistics of ``network`` do not change.
    with torch.no_grad():
        return copy.deepcopy(network).eval()(x, lambda y: y).shape  # type: ignore[no-any-return]


def _train(
    backend: ReferenceBackend,
    network: DrawnNetwork,
    habits: Habits,
    loss_of: Loss,
    data: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    model = backend.model(copy.deepcopy(network), habits.parallel)
    if habits.frozen:
        for parameter in next(model.children())[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    hook(backend, trained, habits.hooks)
    if habits.hooks == "layer":
        hook_layer(next(m for m in model.modules() if isinstance(m, nn.Conv2d)))
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    for number, (image, target) in enumerate(data):
        if number % habits.accumulate == 0:
            optimizer.zero_grad()
        x = backend.put(image, grad=habits.to_input)
        y = model(x, backend.gather if habits.gathered else lambda t: t)
        wanted = backend.plain(target) if habits.gathered else backend.put(target, ("n", "h", "w")[: target.dim()])
        loss = loss_of(y, wanted)
        if habits.l2:
            loss = loss + 0.1 * sum(p.pow(2).sum() for p in trained)
        backend.record(f"loss {number}", loss)
        backend.record(f"y {number}", y)
        backend.together()  # a rank that failed in forward sends no messages of backward
        backward(loss, trained, habits.gradients)
        backend.record(f"dL/dx {number}", backend.gradient(x))
        if (number + 1) % habits.accumulate == 0:
            for name, parameter in model.named_parameters():
                backend.record(f"dL/d{name} {number}", parameter.grad)
            if habits.clipped:
                backend.record(f"norm {number}", nn.utils.clip_grad_norm_(trained, 0.5))
            optimizer.step()
    backend.state(model)


def backward(loss: torch.Tensor, parameters: list[nn.Parameter], how: str) -> None:
    """Compute gradients of the loss in one of two ways.

    Parameters
    ----------
    loss : torch.Tensor
    parameters : list of torch.nn.Parameter
    how : str
        Way: through ``backward`` or ``torch.autograd.grad``.
    """
    if how == "backward":
        loss.backward()
        return
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def hook(backend: ReferenceBackend, parameters: list[nn.Parameter], kind: str) -> None:
    """Register hooks that change gradients in a way that shows if they received only a contribution.

    Parameters
    ----------
    backend : ReferenceBackend
    parameters : list of torch.nn.Parameter
    kind : str
        Kind of hooks.
    """
    for number, parameter in enumerate(parameters[::2]):
        if kind == "tensor":
            parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01) + grad**2)
        elif kind == "accumulated":
            parameter.register_post_accumulate_grad_hook(
                lambda p, number=number: backend.record(f"seen by hook {number}", p.grad)
            )
        elif kind == "node":
            view: Any = parameter.view_as(parameter)
            node = view.grad_fn.next_functions[0][0]
            node.register_prehook(lambda out: (out[0].clamp(-0.01, 0.01) + out[0] ** 2,))
            vars(parameter)["node"] = node  # as in torch, the hook exists only while the node is referenced


def hook_layer(layer: nn.Module) -> None:
    """Register full backward hooks that change the incoming gradients of inputs that require one."""

    def changed(_: nn.Module, out: Any) -> Any:
        return (out[0].clamp(-0.01, 0.01) + out[0] ** 2,)

    layer.register_full_backward_pre_hook(changed)
