"""Pipelines as the command line asks for them, for the tests of training."""

from __future__ import annotations

import argparse

import torch
from torch import nn

from distconv.jobs.commands import train_classify
from distconv.jobs.training.pipelines.options import Pipelining, pipelining_of


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train_classify.add_arguments(parser)
    return parser.parse_args(arguments)


def pipelining(ranks: int, schedule: str, *arguments: str) -> Pipelining:
    found = pipelining_of(parsed("--pipeline", schedule, *arguments), ranks)
    assert found is not None
    return found


BY_SHAPES = f"{__name__}:ByShapes"
"""A network of the user's that ``torch.fx`` cannot follow."""


class ByShapes(nn.Module):
    """Three layers, and decisions by shapes between them."""

    def __init__(self, in_channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.last = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        samples = len(x)
        if len(x.shape) == 4:
            x = self.second(x)
        return self.last(x.view(samples, x.shape[1], -1).mean(2))
