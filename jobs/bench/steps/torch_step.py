"""The training step of ``distconv bench step`` and ``bench layer``; run as a program it is the reference process.

Its arguments are the :class:`StepOptions` as JSON, the number of threads, and ``eager`` or ``compiled``. It reads a
number of steps per line and answers with their seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

HEADS = 4
"""Number of attention heads."""


class Attention(nn.Module):
    """Attention of every pixel to all pixels, with a residual connection, as in a vision transformer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output (N, C, H, W) for the input (N, C, H, W)."""
        n, c, h, w = x.shape
        parts = self.qkv(x.flatten(2).transpose(1, 2)).reshape(n, h * w, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2]).transpose(1, 2).reshape(n, h * w, c)
        mixed: torch.Tensor = self.out(y)
        return x + mixed.transpose(1, 2).reshape(n, c, h, w)


class GlobalFilter(nn.Module):
    """Each channel's spectrum times weights, with a residual connection: a convolution as wide as the sample.

    Source: Rao et al. 2021, Global Filter Networks, 3.2.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, size, size // 2 + 1, 2) / size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output (N, C, H, W) for the input (N, C, H, W)."""
        filtered: torch.Tensor = torch.fft.irfft2(
            torch.fft.rfft2(x) * torch.view_as_complex(self.weight), s=x.shape[2:]
        )
        return x + filtered


def _normalized_convolution(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())


KINDS = {
    "convolution": "conv 3x3 + ReLU",
    "batch-norm": "conv 3x3 + batch norm + ReLU",
    "attention": f"attention over all pixels, {HEADS} heads",
    "fourier": "rfft2, product with weights, irfft2",
}
"""Kinds of layers."""

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
"""Memory formats of the input and of the weights."""


class StepOptions(NamedTuple):
    """The network and the mini-batch of a step."""

    kind: str
    """Kind of the layers, of :data:`KINDS`."""
    size: int
    """Height and width of a sample."""
    channels: int
    """Input and output channels of each layer."""
    layers: int
    """Number of layers."""
    batch: int
    """Samples of a mini-batch."""
    memory_format: str = "contiguous"
    """Memory format of the input and the weights, of :data:`FORMATS`."""
    kernel: int = 3
    """Odd kernel size of convolutions without batch norm."""
    groups: int = 1
    """Groups of convolutions without batch norm."""
    loss: str = "cross entropy"
    """``cross entropy`` over the channels, or ``mean`` of the output."""
    momentum: float = 0.0
    """Momentum of SGD."""


class ModelTraining(NamedTuple):
    """Loss and optimizer of a model, and a mini-batch: an input (N, C, H, W) and labels (N, H, W)."""

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Returns the loss, given input and labels."""
    optimizer: torch.optim.Optimizer
    x: torch.Tensor
    labels: torch.Tensor

    def step(self) -> None:
        """Take a step: forward, loss, backward, update."""
        self.optimizer.zero_grad()
        self.loss(self.x, self.labels).backward()
        self.optimizer.step()


def build(options: StepOptions) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the model, its input (batch, channels, size, size) in float32, and labels (batch, size, size); seeded.

    Parameters
    ----------
    options : StepOptions

    Returns
    -------
    (torch.nn.Module, torch.Tensor, torch.Tensor)
    """
    torch.manual_seed(0)
    channels, kernel = options.channels, options.kernel
    convolution = partial(nn.Conv2d, channels, channels, kernel, padding=kernel // 2, groups=options.groups)
    make: Callable[[], nn.Module] = {
        "convolution": lambda: nn.Sequential(convolution(), nn.ReLU()),
        "batch-norm": lambda: _normalized_convolution(channels),
        "attention": lambda: Attention(channels),
        "fourier": lambda: GlobalFilter(channels, options.size),
    }[options.kind]
    order = FORMATS[options.memory_format]
    model = nn.Sequential(*(make() for _ in range(options.layers)))
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.to(memory_format=order)  # type: ignore[call-overload]
    x = torch.randn(options.batch, channels, options.size, options.size).to(memory_format=order)
    return model, x, torch.randint(0, channels, (options.batch, options.size, options.size))


def training(
    model: nn.Module, x: torch.Tensor, labels: torch.Tensor, options: StepOptions, *, compiled: bool = False
) -> ModelTraining:
    """Return the training of a model by SGD.

    Parameters
    ----------
    model : torch.nn.Module
    x : torch.Tensor
        Input.
    labels : torch.Tensor
        Class of each position.
    options : StepOptions
        Loss and momentum.
    compiled : bool
        True compiles model and loss by ``torch.compile``.

    Returns
    -------
    ModelTraining
    """

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), labels) if options.loss == "cross entropy" else model(x).mean()

    optimizer = torch.optim.SGD(model.parameters(), 1e-3, options.momentum)
    return ModelTraining(torch.compile(loss) if compiled else loss, optimizer, x, labels)


def main() -> None:
    """Take the requested numbers of steps until a request is 0."""
    options, threads, mode = StepOptions(**json.loads(sys.argv[1])), sys.argv[2], sys.argv[3]
    torch.set_num_threads(int(threads))
    trained = training(*build(options), options, compiled=mode == "compiled")
    while count := int(sys.stdin.readline() or 0):
        times = []
        for _ in range(count):
            start = time.perf_counter()
            trained.step()
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
